import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.rpc import status_pb2 as _status_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
    ROLE_ROUTER: _ClassVar[Role]

class TransferState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSFER_STATE_UNSPECIFIED: _ClassVar[TransferState]
    TRANSFER_STATE_BOOTSTRAPPING: _ClassVar[TransferState]
    TRANSFER_STATE_WAITING_FOR_INPUT: _ClassVar[TransferState]
    TRANSFER_STATE_TRANSFERRING: _ClassVar[TransferState]
    TRANSFER_STATE_SUCCESS: _ClassVar[TransferState]
    TRANSFER_STATE_FAILED: _ClassVar[TransferState]

class BufferKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BUFFER_KIND_UNSPECIFIED: _ClassVar[BufferKind]
    BUFFER_KIND_KEY: _ClassVar[BufferKind]
    BUFFER_KIND_VALUE: _ClassVar[BufferKind]
    BUFFER_KIND_KEY_VALUE: _ClassVar[BufferKind]

class StateKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STATE_KIND_UNSPECIFIED: _ClassVar[StateKind]
    STATE_KIND_RECURRENT: _ClassVar[StateKind]
    STATE_KIND_WINDOW: _ClassVar[StateKind]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
ROLE_ROUTER: Role
TRANSFER_STATE_UNSPECIFIED: TransferState
TRANSFER_STATE_BOOTSTRAPPING: TransferState
TRANSFER_STATE_WAITING_FOR_INPUT: TransferState
TRANSFER_STATE_TRANSFERRING: TransferState
TRANSFER_STATE_SUCCESS: TransferState
TRANSFER_STATE_FAILED: TransferState
BUFFER_KIND_UNSPECIFIED: BufferKind
BUFFER_KIND_KEY: BufferKind
BUFFER_KIND_VALUE: BufferKind
BUFFER_KIND_KEY_VALUE: BufferKind
STATE_KIND_UNSPECIFIED: StateKind
STATE_KIND_RECURRENT: StateKind
STATE_KIND_WINDOW: StateKind

class Instance(_message.Message):
    __slots__ = ("instance_id", "epoch")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    epoch: int
    def __init__(self, instance_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class ProcessProof(_message.Message):
    __slots__ = ("host_id", "pid", "start_ticks")
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    START_TICKS_FIELD_NUMBER: _ClassVar[int]
    host_id: str
    pid: int
    start_ticks: int
    def __init__(self, host_id: _Optional[str] = ..., pid: _Optional[int] = ..., start_ticks: _Optional[int] = ...) -> None: ...

class BufferSpec(_message.Message):
    __slots__ = ("kind", "layer_ids", "item_len_bytes")
    KIND_FIELD_NUMBER: _ClassVar[int]
    LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    ITEM_LEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    kind: BufferKind
    layer_ids: _containers.RepeatedScalarFieldContainer[int]
    item_len_bytes: int
    def __init__(self, kind: _Optional[_Union[BufferKind, str]] = ..., layer_ids: _Optional[_Iterable[int]] = ..., item_len_bytes: _Optional[int] = ...) -> None: ...

class KvLayout(_message.Message):
    __slots__ = ("model", "dtype", "page_size", "layers", "kv_heads", "head_dim", "metadata_schema", "software_version", "buffers", "state_kinds")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    METADATA_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    STATE_KINDS_FIELD_NUMBER: _ClassVar[int]
    model: str
    dtype: str
    page_size: int
    layers: int
    kv_heads: int
    head_dim: int
    metadata_schema: int
    software_version: str
    buffers: _containers.RepeatedCompositeFieldContainer[BufferSpec]
    state_kinds: _containers.RepeatedScalarFieldContainer[StateKind]
    def __init__(self, model: _Optional[str] = ..., dtype: _Optional[str] = ..., page_size: _Optional[int] = ..., layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., metadata_schema: _Optional[int] = ..., software_version: _Optional[str] = ..., buffers: _Optional[_Iterable[_Union[BufferSpec, _Mapping]]] = ..., state_kinds: _Optional[_Iterable[_Union[StateKind, str]]] = ...) -> None: ...

class MetadataSlot(_message.Message):
    __slots__ = ("index", "generation")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    index: int
    generation: int
    def __init__(self, index: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class TransferTransition(_message.Message):
    __slots__ = ("state", "time", "sequence", "chunks_done", "pages_done", "bytes_done", "reason")
    STATE_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_DONE_FIELD_NUMBER: _ClassVar[int]
    PAGES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    state: TransferState
    time: _timestamp_pb2.Timestamp
    sequence: int
    chunks_done: int
    pages_done: int
    bytes_done: int
    reason: str
    def __init__(self, state: _Optional[_Union[TransferState, str]] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., sequence: _Optional[int] = ..., chunks_done: _Optional[int] = ..., pages_done: _Optional[int] = ..., bytes_done: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Transfer(_message.Message):
    __slots__ = ("bootstrap_room", "rid", "role", "state", "sequence", "chunks_done", "pages_done", "bytes_done", "peer", "failure", "timeline", "deadline")
    BOOTSTRAP_ROOM_FIELD_NUMBER: _ClassVar[int]
    RID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_DONE_FIELD_NUMBER: _ClassVar[int]
    PAGES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    bootstrap_room: int
    rid: str
    role: Role
    state: TransferState
    sequence: int
    chunks_done: int
    pages_done: int
    bytes_done: int
    peer: Instance
    failure: _status_pb2.Status
    timeline: _containers.RepeatedCompositeFieldContainer[TransferTransition]
    deadline: _timestamp_pb2.Timestamp
    def __init__(self, bootstrap_room: _Optional[int] = ..., rid: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., state: _Optional[_Union[TransferState, str]] = ..., sequence: _Optional[int] = ..., chunks_done: _Optional[int] = ..., pages_done: _Optional[int] = ..., bytes_done: _Optional[int] = ..., peer: _Optional[_Union[Instance, _Mapping]] = ..., failure: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., timeline: _Optional[_Iterable[_Union[TransferTransition, _Mapping]]] = ..., deadline: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...
