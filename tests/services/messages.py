"""Single messages between prefill and decode, and what may become of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from pd.v1 import types_pb2

from pd_common.control import peer_client
from pd_common.handoff.state import TransferState
from pd_common.types import BootstrapRoom
from services.decode import offering, service
from services.prefill import reports
from tests.services.pair import Node, Pair, until
from tests.services.tap import Rule, answer_lost, lost, overtaken, silence, twice

ALWAYS = 10**9


def be_impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is repeated after a second is repeated soon."""
    monkeypatch.setattr(peer_client, "ATTEMPT_S", 0.15)
    monkeypatch.setattr(service, "SILENT_S", 0.1)
    for module in (offering, reports):
        monkeypatch.setattr(module, "_AGAIN_S", 0.01)


@dataclass(frozen=True)
class Message:
    """A message between prefill and decode: the side that serves it, its method, and which of its calls are meant."""

    name: str
    at: str
    method: str
    applies: Callable[[Any], bool] = lambda _: True

    def spoil(self, pair: Pair, fault: Callable[..., Rule]) -> asyncio.Event:
        """From now on its first call goes wrong; the event is set when it has."""
        struck = asyncio.Event()

        def applies(request: Any) -> bool:
            if not self.applies(request):
                return False
            struck.set()
            return True

        node: Node = getattr(pair, f"at_{self.at}")
        node.tap.rules[self.method] = fault(applies=applies)
        return struck


def _report(state: types_pb2.TransferState) -> Callable[[Any], bool]:
    return lambda request: request.state == state


OFFER = Message("offer", "prefill", "AllocatePages")
PROGRESS = Message("progress", "decode", "ReportTransfer", _report(types_pb2.TRANSFER_STATE_TRANSFERRING))
SUCCESS = Message("success", "decode", "ReportTransfer", _report(types_pb2.TRANSFER_STATE_SUCCESS))
FAILURE = Message("failure", "decode", "ReportTransfer", _report(types_pb2.TRANSFER_STATE_FAILED))
PROOF = Message("proof", "prefill", "AbortRoom", lambda request: request.HasField("recipient"))

FAULTS: dict[str, Callable[..., Rule]] = {
    "lost": partial(lost, 1),
    "lost in silence": partial(silence, 1),
    "answer lost": partial(answer_lost, 1),
    "twice": twice,
    "overtaken": overtaken,
}


async def both_ended(pair: Pair, room: BootstrapRoom) -> list[TransferState]:
    """Its last state on prefill and on decode."""
    tables = (pair.prefill.transfers, pair.decode.transfers)

    def states() -> list[TransferState]:
        return [record.state for table in tables if (record := table.find(room)) is not None]

    await until(lambda: len(states()) == 2 and all(state.is_final for state in states()))
    return states()
