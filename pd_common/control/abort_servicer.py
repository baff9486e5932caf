"""Abort on router, prefill and decode: answers when this process will write nothing more of the room."""

from __future__ import annotations

from typing import Protocol

from pd.v1 import abort_pb2, abort_pb2_grpc, types_pb2

from pd_common.control import convert
from pd_common.control.rooms import Call, check_recipient
from pd_common.control.status import MOST_OF_A_MESSAGE, from_status
from pd_common.errors import PdError, RoomAborted
from pd_common.handoff.state import TransferState
from pd_common.types import BootstrapRoom, Instance


class Abortable(Protocol):
    """What Abort needs of a process."""

    @property
    def instance(self) -> Instance:
        """Identity of the process's present life."""

    async def abort(self, room: BootstrapRoom, error: PdError) -> TransferState | None:
        """Ends the room, or remembers it if it is unknown; returns when this process will write nothing more of it."""


class AbortServicer(abort_pb2_grpc.AbortServicer):
    """Ends rooms of one process."""

    def __init__(self, service: Abortable) -> None:
        self._service = service

    async def AbortRoom(self, request: abort_pb2.AbortRoomRequest, context: Call) -> abort_pb2.AbortRoomResponse:
        if request.HasField("recipient"):
            check_recipient(request.recipient, self._service.instance)
        room = convert.room_from(request.bootstrap_room)
        state = await self._service.abort(room, _why(request, room))
        return abort_pb2.AbortRoomResponse(
            state=convert.state_to(state) if state else types_pb2.TRANSFER_STATE_UNSPECIFIED,
            drained=convert.instance_to(self._service.instance),
        )


def _why(request: abort_pb2.AbortRoomRequest, room: BootstrapRoom) -> PdError:
    if request.HasField("failure"):
        return from_status(request.failure)
    return RoomAborted(request.message[:MOST_OF_A_MESSAGE] or f"room {room} was aborted", room=room)
