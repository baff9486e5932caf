"""Readiness that means something: a pair is used only after a real room has gone through it."""

from __future__ import annotations

import asyncio
import logging

from pd_common.aio import Tasks
from pd_common.control.server import ControlServer
from pd_common.errors import PdError
from pd_common.generation import ClientRequest, SamplingParams
from services.router.dispatch import Dispatcher
from services.router.policy import LeastRooms, Lives, Pair

_log = logging.getLogger(__name__)

_AT_ONCE = 8
_FIRST_AGAIN_S, _LAST_AGAIN_S = 0.5, 2.0
_TIMEOUT_S = 20.0


class Prober:
    """Sends a short prompt, a page and one token long, through every pair that came up, until one has gone through.

    Each pair is tried by itself, so that none waits for another's trouble; `_AT_ONCE` probes run at a time.
    """

    def __init__(
        self, dispatcher: Dispatcher, policy: LeastRooms, changed: asyncio.Event, control: ControlServer
    ) -> None:
        self._dispatcher = dispatcher
        self._policy = policy
        self._changed = changed
        self._control = control
        self._at_once = asyncio.Semaphore(_AT_ONCE)
        self._probed: set[Pair] = set()
        self._probes = Tasks()

    async def run(self) -> None:
        """Keeps the router's health true as well; ends only by cancellation."""
        try:
            while True:
                self._changed.clear()
                for pair in self._policy.pairs:
                    if pair.needs_probe and pair not in self._probed:
                        self._probed.add(pair)
                        self._probes.start(f"probe of {pair}", self._until_proven(pair))
                await self._control.set_serving(self._dispatcher.is_ready)
                await self._changed.wait()
        finally:
            await self._probes.close()

    async def watch(self) -> None:
        """Raises InternalError when a probe has died: its pair would never be used. Otherwise it never returns."""
        await self._probes.watch()

    async def _until_proven(self, pair: Pair) -> None:
        """Ends as well when one of the two is gone."""
        again_s = _FIRST_AGAIN_S
        while (lives := pair.lives) is not None and pair.needs_probe:
            async with self._at_once:
                await self._try(pair, lives)
            if pair.needs_probe:
                await asyncio.sleep(again_s)
                again_s = min(2 * again_s, _LAST_AGAIN_S)
        self._probed.discard(pair)
        self._changed.set()

    async def _try(self, pair: Pair, lives: Lives) -> None:
        try:
            async for _ in self._dispatcher.generate_through(pair, _probe(pair)):
                pass
        except PdError as error:
            if pair.note_probe(lives, f"the probe failed: {error.message}"):  # said once, not at every attempt
                _log.warning("the probe through %s failed, trying again: %s", pair, error.message)
            return
        pair.note_probe(lives, None)
        _log.info("%s is proven: a page has gone through", pair)


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
