"""Abort on prefill and decode: answers when this process will write nothing more of the room."""

from __future__ import annotations

from pd.v1 import abort_pb2, abort_pb2_grpc, types_pb2

from pd_common.control import convert
from pd_common.control.rooms import Call, RoomService, check_recipient
from pd_common.errors import RoomAborted


class AbortServicer(abort_pb2_grpc.AbortServicer):
    """Ends rooms of one process."""

    def __init__(self, service: RoomService) -> None:
        self._service = service

    async def AbortRoom(self, request: abort_pb2.AbortRoomRequest, context: Call) -> abort_pb2.AbortRoomResponse:
        if request.HasField("recipient"):
            check_recipient(request.recipient, self._service.instance)
        room = convert.room_from(request.bootstrap_room)
        error = RoomAborted(request.message or f"room {room} was aborted", room=room)
        state = await self._service.abort(room, error)
        return abort_pb2.AbortRoomResponse(
            state=convert.state_to(state) if state else types_pb2.TRANSFER_STATE_UNSPECIFIED,
            drained=convert.instance_to(self._service.instance),
        )
