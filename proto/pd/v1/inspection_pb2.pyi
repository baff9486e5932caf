import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from pd.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetProcessRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Worker(_message.Message):
    __slots__ = ("role", "control_address", "live", "trouble", "open_rooms", "queued", "max_queued", "oldest_wait", "pages_available", "pages_total", "stopping")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTROL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    OPEN_ROOMS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_FIELD_NUMBER: _ClassVar[int]
    OLDEST_WAIT_FIELD_NUMBER: _ClassVar[int]
    PAGES_AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    role: _types_pb2.Role
    control_address: str
    live: bool
    trouble: str
    open_rooms: int
    queued: int
    max_queued: int
    oldest_wait: _duration_pb2.Duration
    pages_available: int
    pages_total: int
    stopping: bool
    def __init__(self, role: _Optional[_Union[_types_pb2.Role, str]] = ..., control_address: _Optional[str] = ..., live: _Optional[bool] = ..., trouble: _Optional[str] = ..., open_rooms: _Optional[int] = ..., queued: _Optional[int] = ..., max_queued: _Optional[int] = ..., oldest_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., pages_available: _Optional[int] = ..., pages_total: _Optional[int] = ..., stopping: _Optional[bool] = ...) -> None: ...

class Route(_message.Message):
    __slots__ = ("prefill_address", "decode_address", "proven", "trouble")
    PREFILL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DECODE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PROVEN_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    prefill_address: str
    decode_address: str
    proven: bool
    trouble: str
    def __init__(self, prefill_address: _Optional[str] = ..., decode_address: _Optional[str] = ..., proven: _Optional[bool] = ..., trouble: _Optional[str] = ...) -> None: ...

class GetProcessResponse(_message.Message):
    __slots__ = ("instance", "role", "software_version", "now", "model", "workers", "routes", "open_rooms")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    OPEN_ROOMS_FIELD_NUMBER: _ClassVar[int]
    instance: _types_pb2.Instance
    role: _types_pb2.Role
    software_version: str
    now: _timestamp_pb2.Timestamp
    model: str
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    routes: _containers.RepeatedCompositeFieldContainer[Route]
    open_rooms: int
    def __init__(self, instance: _Optional[_Union[_types_pb2.Instance, _Mapping]] = ..., role: _Optional[_Union[_types_pb2.Role, str]] = ..., software_version: _Optional[str] = ..., now: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., model: _Optional[str] = ..., workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ..., routes: _Optional[_Iterable[_Union[Route, _Mapping]]] = ..., open_rooms: _Optional[int] = ...) -> None: ...

class GetSpansRequest(_message.Message):
    __slots__ = ("bootstrap_room",)
    BOOTSTRAP_ROOM_FIELD_NUMBER: _ClassVar[int]
    bootstrap_room: int
    def __init__(self, bootstrap_room: _Optional[int] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("name", "start", "end", "attributes", "failure")
    class AttributesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    name: str
    start: _timestamp_pb2.Timestamp
    end: _timestamp_pb2.Timestamp
    attributes: _containers.ScalarMap[str, str]
    failure: str
    def __init__(self, name: _Optional[str] = ..., start: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., end: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., attributes: _Optional[_Mapping[str, str]] = ..., failure: _Optional[str] = ...) -> None: ...

class RoomSpans(_message.Message):
    __slots__ = ("trace_id", "root", "stages")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    root: Span
    stages: _containers.RepeatedCompositeFieldContainer[Span]
    def __init__(self, trace_id: _Optional[str] = ..., root: _Optional[_Union[Span, _Mapping]] = ..., stages: _Optional[_Iterable[_Union[Span, _Mapping]]] = ...) -> None: ...

class GetSpansResponse(_message.Message):
    __slots__ = ("legs",)
    LEGS_FIELD_NUMBER: _ClassVar[int]
    legs: _containers.RepeatedCompositeFieldContainer[RoomSpans]
    def __init__(self, legs: _Optional[_Iterable[_Union[RoomSpans, _Mapping]]] = ...) -> None: ...
