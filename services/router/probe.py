"""Readiness that means something: a worker is used only after a real room has gone through it."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from contextlib import suppress

from pd_common.control.server import ControlServer
from pd_common.errors import PdError
from pd_common.generation import ClientRequest, SamplingParams
from services.router.dispatch import Dispatcher
from services.router.policy import LeastRooms, Pair
from services.router.worker import Worker

_log = logging.getLogger(__name__)

_AGAIN_S = 0.5
_TIMEOUT_S = 20.0


class Prober:
    """Sends a short prompt, a page and one token long, through every worker that came up since it was proven."""

    def __init__(
        self, dispatcher: Dispatcher, policy: LeastRooms, changed: asyncio.Event, control: ControlServer
    ) -> None:
        self._dispatcher = dispatcher
        self._policy = policy
        self._changed = changed
        self._control = control

    async def run(self) -> None:
        """Keeps the router's health true as well; ends only by cancellation."""
        for turn in itertools.count():
            self._changed.clear()
            pairs = self._unproven_pairs(turn)
            await asyncio.gather(*(self._prove(pair) for pair in pairs))
            await self._control.set_serving(self._dispatcher.is_ready)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _AGAIN_S if pairs else None)

    def _unproven_pairs(self, turn: int) -> set[Pair]:
        """Each live worker that is not proven with a counterpart, proven if there is one; `turn` changes it."""
        prefills = [worker for worker in self._policy.prefills if worker.is_live]
        decodes = [worker for worker in self._policy.decodes if worker.is_live]
        if not prefills or not decodes:
            return set()
        pairs = {Pair(prefill, _counterpart(decodes, turn)) for prefill in prefills if not prefill.proven}
        return pairs | {Pair(_counterpart(prefills, turn), decode) for decode in decodes if not decode.proven}

    async def _prove(self, pair: Pair) -> None:
        try:
            async for _ in self._dispatcher.generate_through(pair, _probe(pair)):
                pass
        except PdError as error:
            pair.prefill.why_not = pair.decode.why_not = f"the probe failed: {error.message}"
            _log.warning(
                "the probe through %s and %s failed: %s",
                pair.prefill.address.target,
                pair.decode.address.target,
                error.message,
            )
            return
        pair.prefill.proven, pair.decode.proven = pair.prefill.is_live, pair.decode.is_live
        await self._control.set_serving(self._dispatcher.is_ready)
        _log.info(
            "%s and %s are proven: a page has gone through", pair.prefill.address.target, pair.decode.address.target
        )


def _counterpart(workers: Sequence[Worker], turn: int) -> Worker:
    choice = [worker for worker in workers if worker.proven] or workers
    return choice[turn % len(choice)]


def _probe(pair: Pair) -> ClientRequest:
    model = pair.decode.model
    length = 1 if model is None else min(model.page_size + 1, model.max_request_tokens - 2)
    vocabulary = 1 if model is None else model.vocab_size
    return ClientRequest(
        prompt=tuple(index % vocabulary for index in range(length)),
        sampling=SamplingParams(max_new_tokens=2, temperature=0.0, ignore_eos=True),
        rid="probe",
        timeout_s=_TIMEOUT_S,
    )
