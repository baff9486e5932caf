"""Readiness that means something: a route is used only after a real room has gone through it."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from pd_common.aio import Tasks
from pd_common.control.server import ControlServer
from pd_common.errors import LayoutMismatch, PdError
from pd_common.generation import ClientRequest, SamplingParams
from services.router.dispatch import Dispatcher
from services.router.policy import LeastLoaded
from services.router.route import Lives, Route

_log = logging.getLogger(__name__)

_AT_ONCE = 8
_FIRST_AGAIN_S, _LAST_AGAIN_S = 0.5, 2.0
_UNLIKE_AGAIN_S = 30.0
"""Where the two do not fit together, and nothing that is seen from here has changed: a rank behind one of them may."""
_TIMEOUT_S = 20.0
_FIRST_OF_ALL = 2**31 - 1
"""The priority of a probe: it must not wait behind the load that the route is to take a part of."""


class Prober:
    """Sends a short prompt, a page and one token long, through every route that came up, until one has gone through.

    Each route is tried by itself, so that none waits for another's trouble; `_AT_ONCE` probes run at a time.
    """

    def __init__(
        self, dispatcher: Dispatcher, policy: LeastLoaded, changed: asyncio.Event, control: ControlServer
    ) -> None:
        self._dispatcher = dispatcher
        self._policy = policy
        self._changed = changed
        self._control = control
        self._at_once = asyncio.Semaphore(_AT_ONCE)
        self._probed: set[Route] = set()
        self._probes = Tasks()

    async def run(self) -> None:
        """Keeps the router's health true as well; ends only by cancellation."""
        try:
            while True:
                self._changed.clear()
                for route in self._policy.routes:
                    if route.needs_probe and route not in self._probed:
                        self._probed.add(route)
                        self._probes.start(f"probe of {route}", self._until_proven(route))
                await self._control.set_serving(self._dispatcher.is_ready)
                await self._changed.wait()
        finally:
            await self._probes.close()

    async def watch(self) -> None:
        """Raises InternalError when a probe has died: its route would never be used. Otherwise it never returns."""
        await self._probes.watch()

    async def _until_proven(self, route: Route) -> None:
        """Ends as well when one of its workers is gone."""
        again_s = _FIRST_AGAIN_S
        while (lives := route.lives) is not None and route.needs_probe:
            async with self._at_once:
                fits = await self._try(route, lives)
            if not fits and route.lives == lives:
                await self._until_changed()
            elif route.needs_probe:
                await asyncio.sleep(again_s)
                again_s = min(2 * again_s, _LAST_AGAIN_S)
        self._probed.discard(route)
        self._changed.set()

    async def _until_changed(self) -> None:
        """Returns when a worker has come or gone, or something else is new, and after a while in any case."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_UNLIKE_AGAIN_S):
                await self._changed.wait()

    async def _try(self, route: Route, lives: Lives) -> bool:
        """Gives whether these lives can serve together, for all that is known now."""
        try:
            async for _ in self._dispatcher.generate_through(route, _probe(route), "probe"):
                pass
        except PdError as error:
            if route.note_probe(lives, f"the probe failed: {error.message}"):  # said once, not at every attempt
                _log.warning("the probe through %s failed, trying again: %s", route, error.message)
            return not isinstance(error, LayoutMismatch)
        route.note_probe(lives, None)
        _log.info("%s is proven: a real request has gone through", route)
        return True


def _probe(route: Route) -> ClientRequest:
    model = route.decode.model
    length = 1 if model is None else min(model.page_size + 1, model.max_request_tokens - 2)
    vocabulary = 1 if model is None else model.vocab_size
    return ClientRequest(
        prompt=tuple(index % vocabulary for index in range(length)),
        sampling=SamplingParams(max_new_tokens=2, temperature=0.0, ignore_eos=True),
        rid="probe",
        timeout_s=_TIMEOUT_S,
        priority=_FIRST_OF_ALL,
    )
