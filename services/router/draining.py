"""The end of a router: no answer is cut off before its time, and nobody is sent away as long as others are served."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from typing import Any

from pd_common.control.http_server import HttpServer
from pd_common.control.server import ControlServer
from pd_common.errors import ShuttingDown
from services.router.dispatch import Dispatcher
from services.router.open_requests import OpenRequests

_LAST_WORDS_S = 1.0
"""For what is still on its way to clients when nothing may go on any longer."""

_Work = Coroutine[Any, Any, None]


async def drain(
    requests: OpenRequests, dispatcher: Dispatcher, http: HttpServer, control: ControlServer, out_of_patience: _Work
) -> None:
    """Serves on while anybody is being served, then lets nobody in; ends what runs when it is out of patience.

    Whoever comes meanwhile has not heard yet that this router is not ready any more.
    """
    dispatcher.withdraw()
    requests.are_last = True
    patience = asyncio.create_task(out_of_patience)
    await _ended(requests.none(), patience)
    closed, refusing = asyncio.create_task(http.stop(math.inf)), asyncio.create_task(control.stop(math.inf))
    await _ended(_all_gone(closed, requests), patience)
    dispatcher.end_all(ShuttingDown("this router is stopping"))
    await asyncio.gather(http.stop(_LAST_WORDS_S), control.stop(_LAST_WORDS_S), closed, refusing)
    patience.cancel()
    await asyncio.wait((patience,))


async def _ended(work: _Work, patience: asyncio.Task[None]) -> None:
    """Returns when it has, or when patience has."""
    working = asyncio.create_task(work)
    await asyncio.wait((working, patience), return_when=asyncio.FIRST_COMPLETED)
    working.cancel()
    await asyncio.wait((working,))


async def _all_gone(closed: asyncio.Task[None], requests: OpenRequests) -> None:
    """Nobody is connected over HTTP, and nobody is being served over gRPC."""
    await asyncio.wait((closed,))
    await requests.none()
