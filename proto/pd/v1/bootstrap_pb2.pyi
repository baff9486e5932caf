import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from pd.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RankPosition(_message.Message):
    __slots__ = ("dp_rank", "dp_size", "tp_rank", "tp_size", "pp_rank", "pp_size")
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    DP_SIZE_FIELD_NUMBER: _ClassVar[int]
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    PP_RANK_FIELD_NUMBER: _ClassVar[int]
    PP_SIZE_FIELD_NUMBER: _ClassVar[int]
    dp_rank: int
    dp_size: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    def __init__(self, dp_rank: _Optional[int] = ..., dp_size: _Optional[int] = ..., tp_rank: _Optional[int] = ..., tp_size: _Optional[int] = ..., pp_rank: _Optional[int] = ..., pp_size: _Optional[int] = ...) -> None: ...

class DataPlane(_message.Message):
    __slots__ = ("backend", "version", "host", "transports", "devices")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    backend: str
    version: str
    host: str
    transports: _containers.RepeatedScalarFieldContainer[str]
    devices: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, backend: _Optional[str] = ..., version: _Optional[str] = ..., host: _Optional[str] = ..., transports: _Optional[_Iterable[str]] = ..., devices: _Optional[_Iterable[str]] = ...) -> None: ...

class RankInfo(_message.Message):
    __slots__ = ("instance", "role", "position", "control_address", "layout", "data_plane")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    CONTROL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    DATA_PLANE_FIELD_NUMBER: _ClassVar[int]
    instance: _types_pb2.Instance
    role: _types_pb2.Role
    position: RankPosition
    control_address: str
    layout: _types_pb2.KvLayout
    data_plane: DataPlane
    def __init__(self, instance: _Optional[_Union[_types_pb2.Instance, _Mapping]] = ..., role: _Optional[_Union[_types_pb2.Role, str]] = ..., position: _Optional[_Union[RankPosition, _Mapping]] = ..., control_address: _Optional[str] = ..., layout: _Optional[_Union[_types_pb2.KvLayout, _Mapping]] = ..., data_plane: _Optional[_Union[DataPlane, _Mapping]] = ...) -> None: ...

class RegisterRankRequest(_message.Message):
    __slots__ = ("rank",)
    RANK_FIELD_NUMBER: _ClassVar[int]
    rank: RankInfo
    def __init__(self, rank: _Optional[_Union[RankInfo, _Mapping]] = ...) -> None: ...

class RegisterRankResponse(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: _duration_pb2.Duration
    def __init__(self, lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RenewLeaseRequest(_message.Message):
    __slots__ = ("instance",)
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    instance: _types_pb2.Instance
    def __init__(self, instance: _Optional[_Union[_types_pb2.Instance, _Mapping]] = ...) -> None: ...

class RenewLeaseResponse(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: _duration_pb2.Duration
    def __init__(self, lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class UnregisterRankRequest(_message.Message):
    __slots__ = ("instance",)
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    instance: _types_pb2.Instance
    def __init__(self, instance: _Optional[_Union[_types_pb2.Instance, _Mapping]] = ...) -> None: ...

class UnregisterRankResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTopologyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTopologyResponse(_message.Message):
    __slots__ = ("ranks", "epoch")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedCompositeFieldContainer[RankInfo]
    epoch: int
    def __init__(self, ranks: _Optional[_Iterable[_Union[RankInfo, _Mapping]]] = ..., epoch: _Optional[int] = ...) -> None: ...

class WatchTopologyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchTopologyResponse(_message.Message):
    __slots__ = ("ranks", "epoch")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedCompositeFieldContainer[RankInfo]
    epoch: int
    def __init__(self, ranks: _Optional[_Iterable[_Union[RankInfo, _Mapping]]] = ..., epoch: _Optional[int] = ...) -> None: ...

class RegisterDpRankRequest(_message.Message):
    __slots__ = ("bootstrap_room", "dp_rank")
    BOOTSTRAP_ROOM_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    bootstrap_room: int
    dp_rank: int
    def __init__(self, bootstrap_room: _Optional[int] = ..., dp_rank: _Optional[int] = ...) -> None: ...

class RegisterDpRankResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class QueryDpRanksRequest(_message.Message):
    __slots__ = ("bootstrap_rooms",)
    BOOTSTRAP_ROOMS_FIELD_NUMBER: _ClassVar[int]
    bootstrap_rooms: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, bootstrap_rooms: _Optional[_Iterable[int]] = ...) -> None: ...

class QueryDpRanksResponse(_message.Message):
    __slots__ = ("dp_ranks",)
    class DpRanksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    DP_RANKS_FIELD_NUMBER: _ClassVar[int]
    dp_ranks: _containers.ScalarMap[int, int]
    def __init__(self, dp_ranks: _Optional[_Mapping[int, int]] = ...) -> None: ...
