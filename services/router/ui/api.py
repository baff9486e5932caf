"""The status page's routes: its files, and the two questions that it asks about once a second."""

from __future__ import annotations

import asyncio
import json
import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pd_common.control.convert import room_from
from pd_common.errors import InvalidRequest
from pd_common.inspection.inspector import Inspector
from pd_common.inspection.process_client import RoomFilter
from pd_common.types import MAX_ROOM, BootstrapRoom
from services.router.exchange import Json
from services.router.ui.files import HEADERS, file_routes
from services.router.ui.processes import processes_to, routes_to
from services.router.ui.refresh import Shared
from services.router.ui.rooms import FAILED, LIVE, SUCCESS, failures_to, latest_ended, merged, oldest_live
from services.router.ui.waterfall import room_to

REFRESH_S = 0.9
"""A little less than the page's own second, so that each of its questions finds something new."""

_ASKED = {LIVE: 300, (SUCCESS,): 50, (FAILED,): 50}
"""Rooms of each kind that every process is asked for; of more that live the oldest might be missing."""
_SHOWN = 100
"""Of those that live and of those that have ended: more nobody reads."""


def ui_routes(inspector: Inspector) -> list[Route]:
    """Everything under `/ui`."""
    api = _Api(inspector)
    return [
        Route("/ui/api/system", api.system, methods=["GET"]),
        Route("/ui/api/rooms/{room}", api.room, methods=["GET"]),
        *file_routes(),
    ]


class _Api:
    """Asks the processes only when a browser asks it, and for the whole system at most once a second."""

    def __init__(self, inspector: Inspector) -> None:
        self._inspector = inspector
        self._system = Shared(self._look, REFRESH_S)

    async def system(self, _: Request) -> Response:
        """All processes, and the latest rooms."""
        return _json(await self._system.get())

    async def room(self, request: Request) -> Response:
        """One room in full.

        Raises:
            InvalidRequest, RoomUnknown: it is no room, or none that anybody knows.

        """
        view = await self._inspector.room(_number(request.path_params["room"]))
        return _json(_encoded(room_to(view, time.time() * 1e3)))

    async def _look(self) -> bytes:
        view = await self._inspector.cluster()
        asked = (
            self._inspector.rooms_of(process, RoomFilter(states), most)
            for process in view.processes
            for states, most in _ASKED.items()
        )
        listed = await asyncio.gather(*asked)
        now_ms = time.time() * 1e3
        rooms = merged(listed, now_ms)
        return _encoded(
            {
                "now_ms": now_ms,
                "processes": processes_to(view),
                "routes": routes_to(view),
                "failures": failures_to(rooms),
                "rooms_live": sum(room.is_live for room in rooms),
                "live": [room.shown() for room in oldest_live(rooms)[:_SHOWN]],
                "ended": [room.shown() for room in latest_ended(rooms)[:_SHOWN]],
            }
        )


def _number(text: str) -> BootstrapRoom:
    if not text.isascii() or not text.isdecimal() or len(text) > len(str(MAX_ROOM)):
        raise InvalidRequest("a room is a decimal number", field="room")
    return room_from(int(text))


def _encoded(content: Json) -> bytes:
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def _json(body: bytes) -> Response:
    return Response(body, 200, HEADERS, "application/json")
