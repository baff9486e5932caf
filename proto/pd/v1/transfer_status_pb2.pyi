import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.rpc import status_pb2 as _status_pb2
from pd.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class QuietProof(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    QUIET_PROOF_UNSPECIFIED: _ClassVar[QuietProof]
    QUIET_PROOF_FENCED: _ClassVar[QuietProof]
    QUIET_PROOF_PROCESS_GONE: _ClassVar[QuietProof]
QUIET_PROOF_UNSPECIFIED: QuietProof
QUIET_PROOF_FENCED: QuietProof
QUIET_PROOF_PROCESS_GONE: QuietProof

class ReportTransferRequest(_message.Message):
    __slots__ = ("bootstrap_room", "reporter", "recipient", "sequence", "state", "chunks_done", "pages_done", "bytes_done", "failure", "ticket")
    BOOTSTRAP_ROOM_FIELD_NUMBER: _ClassVar[int]
    REPORTER_FIELD_NUMBER: _ClassVar[int]
    RECIPIENT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_DONE_FIELD_NUMBER: _ClassVar[int]
    PAGES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    bootstrap_room: int
    reporter: _types_pb2.Instance
    recipient: _types_pb2.Instance
    sequence: int
    state: _types_pb2.TransferState
    chunks_done: int
    pages_done: int
    bytes_done: int
    failure: _status_pb2.Status
    ticket: bytes
    def __init__(self, bootstrap_room: _Optional[int] = ..., reporter: _Optional[_Union[_types_pb2.Instance, _Mapping]] = ..., recipient: _Optional[_Union[_types_pb2.Instance, _Mapping]] = ..., sequence: _Optional[int] = ..., state: _Optional[_Union[_types_pb2.TransferState, str]] = ..., chunks_done: _Optional[int] = ..., pages_done: _Optional[int] = ..., bytes_done: _Optional[int] = ..., failure: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class ReportTransferResponse(_message.Message):
    __slots__ = ("state", "failure")
    STATE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    state: _types_pb2.TransferState
    failure: _status_pb2.Status
    def __init__(self, state: _Optional[_Union[_types_pb2.TransferState, str]] = ..., failure: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class GetTransferRequest(_message.Message):
    __slots__ = ("bootstrap_room",)
    BOOTSTRAP_ROOM_FIELD_NUMBER: _ClassVar[int]
    bootstrap_room: int
    def __init__(self, bootstrap_room: _Optional[int] = ...) -> None: ...

class GetTransferResponse(_message.Message):
    __slots__ = ("transfer",)
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    transfer: _types_pb2.Transfer
    def __init__(self, transfer: _Optional[_Union[_types_pb2.Transfer, _Mapping]] = ...) -> None: ...

class ListTransfersRequest(_message.Message):
    __slots__ = ("states", "peer_instance_id", "older_than", "page_size", "page_token")
    STATES_FIELD_NUMBER: _ClassVar[int]
    PEER_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    OLDER_THAN_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    states: _containers.RepeatedScalarFieldContainer[_types_pb2.TransferState]
    peer_instance_id: str
    older_than: _duration_pb2.Duration
    page_size: int
    page_token: str
    def __init__(self, states: _Optional[_Iterable[_Union[_types_pb2.TransferState, str]]] = ..., peer_instance_id: _Optional[str] = ..., older_than: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListTransfersResponse(_message.Message):
    __slots__ = ("transfers", "next_page_token", "sequence")
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    transfers: _containers.RepeatedCompositeFieldContainer[_types_pb2.Transfer]
    next_page_token: str
    sequence: int
    def __init__(self, transfers: _Optional[_Iterable[_Union[_types_pb2.Transfer, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., sequence: _Optional[int] = ...) -> None: ...

class WatchTransfersRequest(_message.Message):
    __slots__ = ("after_sequence",)
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    after_sequence: int
    def __init__(self, after_sequence: _Optional[int] = ...) -> None: ...

class WatchTransfersResponse(_message.Message):
    __slots__ = ("transfer",)
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    transfer: _types_pb2.Transfer
    def __init__(self, transfer: _Optional[_Union[_types_pb2.Transfer, _Mapping]] = ...) -> None: ...

class GetPoolRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetPoolResponse(_message.Message):
    __slots__ = ("pages_total", "pages_free", "pages_quarantined", "slots_total", "slots_free", "slots_quarantined", "live_rooms", "pages_cached", "requests_queued", "requests_retracted", "pages_on_host")
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    PAGES_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    SLOTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FREE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    LIVE_ROOMS_FIELD_NUMBER: _ClassVar[int]
    PAGES_CACHED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_QUEUED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_RETRACTED_FIELD_NUMBER: _ClassVar[int]
    PAGES_ON_HOST_FIELD_NUMBER: _ClassVar[int]
    pages_total: int
    pages_free: int
    pages_quarantined: int
    slots_total: int
    slots_free: int
    slots_quarantined: int
    live_rooms: int
    pages_cached: int
    requests_queued: int
    requests_retracted: int
    pages_on_host: int
    def __init__(self, pages_total: _Optional[int] = ..., pages_free: _Optional[int] = ..., pages_quarantined: _Optional[int] = ..., slots_total: _Optional[int] = ..., slots_free: _Optional[int] = ..., slots_quarantined: _Optional[int] = ..., live_rooms: _Optional[int] = ..., pages_cached: _Optional[int] = ..., requests_queued: _Optional[int] = ..., requests_retracted: _Optional[int] = ..., pages_on_host: _Optional[int] = ...) -> None: ...

class QuarantineWriter(_message.Message):
    __slots__ = ("instance", "address", "missing")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    instance: _types_pb2.Instance
    address: str
    missing: _containers.RepeatedScalarFieldContainer[QuietProof]
    def __init__(self, instance: _Optional[_Union[_types_pb2.Instance, _Mapping]] = ..., address: _Optional[str] = ..., missing: _Optional[_Iterable[_Union[QuietProof, str]]] = ...) -> None: ...

class QuarantinedRoom(_message.Message):
    __slots__ = ("bootstrap_room", "page_ids", "metadata_slot", "since", "writers", "description")
    BOOTSTRAP_ROOM_FIELD_NUMBER: _ClassVar[int]
    PAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    METADATA_SLOT_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    WRITERS_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    bootstrap_room: int
    page_ids: _containers.RepeatedScalarFieldContainer[int]
    metadata_slot: _types_pb2.MetadataSlot
    since: _timestamp_pb2.Timestamp
    writers: _containers.RepeatedCompositeFieldContainer[QuarantineWriter]
    description: str
    def __init__(self, bootstrap_room: _Optional[int] = ..., page_ids: _Optional[_Iterable[int]] = ..., metadata_slot: _Optional[_Union[_types_pb2.MetadataSlot, _Mapping]] = ..., since: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., writers: _Optional[_Iterable[_Union[QuarantineWriter, _Mapping]]] = ..., description: _Optional[str] = ...) -> None: ...

class ListQuarantineRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListQuarantineResponse(_message.Message):
    __slots__ = ("rooms",)
    ROOMS_FIELD_NUMBER: _ClassVar[int]
    rooms: _containers.RepeatedCompositeFieldContainer[QuarantinedRoom]
    def __init__(self, rooms: _Optional[_Iterable[_Union[QuarantinedRoom, _Mapping]]] = ...) -> None: ...

class ListPeersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Peer(_message.Message):
    __slots__ = ("instance", "role", "control_address", "carrier", "since", "canary_time", "canary_took", "live_rooms")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTROL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CARRIER_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    CANARY_TIME_FIELD_NUMBER: _ClassVar[int]
    CANARY_TOOK_FIELD_NUMBER: _ClassVar[int]
    LIVE_ROOMS_FIELD_NUMBER: _ClassVar[int]
    instance: _types_pb2.Instance
    role: _types_pb2.Role
    control_address: str
    carrier: str
    since: _timestamp_pb2.Timestamp
    canary_time: _timestamp_pb2.Timestamp
    canary_took: _duration_pb2.Duration
    live_rooms: int
    def __init__(self, instance: _Optional[_Union[_types_pb2.Instance, _Mapping]] = ..., role: _Optional[_Union[_types_pb2.Role, str]] = ..., control_address: _Optional[str] = ..., carrier: _Optional[str] = ..., since: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., canary_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., canary_took: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., live_rooms: _Optional[int] = ...) -> None: ...

class ListPeersResponse(_message.Message):
    __slots__ = ("peers",)
    PEERS_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    def __init__(self, peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ...) -> None: ...
