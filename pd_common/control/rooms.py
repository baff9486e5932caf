"""What prefill and decode have in common for the control plane: rooms that can be asked for, told and ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from opentelemetry.context import Context
from pd.v1 import types_pb2

from pd_common.control import convert
from pd_common.control.peers import Peer
from pd_common.errors import PdError, StaleInstance
from pd_common.generation import GenerationRequest, Load
from pd_common.handoff.quarantine import Held
from pd_common.handoff.state import Progress, Transfer, TransferState
from pd_common.handoff.table import TransferTable
from pd_common.types import BootstrapRoom, Instance

Call = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What the other side says about a room."""

    room: BootstrapRoom
    reporter: Instance
    sequence: int
    state: TransferState
    progress: Progress
    failure: PdError | None


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """What pages and metadata slots are doing."""

    pages_total: int
    pages_free: int
    pages_quarantined: int
    slots_total: int
    slots_free: int
    slots_quarantined: int
    live_rooms: int
    pages_cached: int = 0
    requests_queued: int = 0
    requests_retracted: int = 0
    pages_on_host: int = 0


class RoomService(Protocol):
    """What prefill and decode have in common in the eyes of the control plane."""

    @property
    def instance(self) -> Instance:
        """Identity of the process's present life."""

    @property
    def transfers(self) -> TransferTable:
        """Every room on record."""

    def pool_status(self) -> PoolStatus: ...

    def load(self) -> Load: ...

    def quarantined(self) -> tuple[Held, ...]:
        """What failed rooms keep from reuse, oldest first."""

    def peers(self) -> tuple[Peer, ...]:
        """The processes that this one is paired with, oldest pairing first."""

    def submit(self, request: GenerationRequest, parent: Context) -> None:
        """Takes a request in; its outputs go to the hub. Raises PdError when it is refused; then nothing is left."""

    async def abort(self, room: BootstrapRoom, error: PdError) -> TransferState | None:
        """Ends the room, or remembers it if it is unknown; returns when this process will write nothing more of it."""

    def abandon(self, room: BootstrapRoom, error: PdError) -> None:
        """Ends a room whose client is gone; does not wait."""

    async def report(self, report: TransferReport) -> Transfer:
        """Takes in what the other side says; gives the room as it stands here."""


def within_call(timeout_s: float, call: Call) -> float:
    """Seconds for a request that is answered in this call: its own timeout, or what the caller's deadline leaves."""
    remaining_s: float | None = call.time_remaining()
    return timeout_s if remaining_s is None else min(timeout_s, remaining_s)


def check_recipient(message: types_pb2.Instance, own: Instance, field: str = "recipient") -> None:
    """Refuses what is meant for an earlier life of this process (or for another one); `field` is what says for whom.

    Raises:
        StaleInstance: always with both names.
        InvalidRequest: it is meant for nobody.

    """
    meant = convert.instance_from(message, field)
    if meant != own:
        raise StaleInstance(
            f"meant for {meant.instance_id} (epoch {meant.epoch}); this is {own.instance_id} (epoch {own.epoch})",
            expected=f"{own.instance_id}/{own.epoch}",
            got=f"{meant.instance_id}/{meant.epoch}",
        )
