from google.rpc import status_pb2 as _status_pb2
from pd.v1 import types_pb2 as _types_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AbortRoomRequest(_message.Message):
    __slots__ = ("bootstrap_room", "message", "recipient", "ticket", "failure")
    BOOTSTRAP_ROOM_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RECIPIENT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    bootstrap_room: int
    message: str
    recipient: _types_pb2.Instance
    ticket: bytes
    failure: _status_pb2.Status
    def __init__(self, bootstrap_room: _Optional[int] = ..., message: _Optional[str] = ..., recipient: _Optional[_Union[_types_pb2.Instance, _Mapping]] = ..., ticket: _Optional[bytes] = ..., failure: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class AbortRoomResponse(_message.Message):
    __slots__ = ("state", "drained")
    STATE_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    state: _types_pb2.TransferState
    drained: _types_pb2.Instance
    def __init__(self, state: _Optional[_Union[_types_pb2.TransferState, str]] = ..., drained: _Optional[_Union[_types_pb2.Instance, _Mapping]] = ...) -> None: ...
