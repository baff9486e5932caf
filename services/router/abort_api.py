"""SGLang's /abort_request: ends the requests with exactly this id, or one room."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pd_common.errors import InvalidRequest, RoomAborted
from pd_common.types import BootstrapRoom
from services.router.backend import Backend
from services.router.http_body import Body, Rid, Room, only, parse, read_body


class AbortBody(Body):
    """`abort_all` is known and has no effect here: an abort always says of what."""

    rid: Rid | None = None
    bootstrap_room: Room | None = None
    abort_message: Annotated[str, Field(max_length=1000)] = "aborted by the client"
    abort_all: Annotated[bool, only(False)] = False


async def abort_request(request: Request, backend: Backend) -> Response:
    """Answers when both legs of each room have; `aborted_rooms` are decimal strings.

    Raises:
        InvalidRequest: there is not exactly one of `rid` and `bootstrap_room`.

    """
    body = parse(AbortBody, await read_body(request))
    if (body.rid is None) == (body.bootstrap_room is None):
        raise InvalidRequest("give rid or bootstrap_room", field="rid")
    aborted: list[BootstrapRoom] = []
    if body.rid is not None:
        aborted += await backend.abort_rid(body.rid, body.abort_message)
    elif body.bootstrap_room is not None:
        room = BootstrapRoom(body.bootstrap_room)
        if await backend.abort(room, RoomAborted(body.abort_message, room=room)) is not None:
            aborted.append(room)
    return JSONResponse({"aborted_rooms": [str(room) for room in aborted]})
