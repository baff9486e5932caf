import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from pd.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RegisterReceiverRequest(_message.Message):
    __slots__ = ("receiver", "sender", "control_address", "layout", "data_address", "buffer_bases", "num_pages", "metadata_base", "metadata_item_len_bytes", "metadata_slots", "canary_base", "canary_pages", "registration")
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    CONTROL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BUFFER_BASES_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    METADATA_BASE_FIELD_NUMBER: _ClassVar[int]
    METADATA_ITEM_LEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    METADATA_SLOTS_FIELD_NUMBER: _ClassVar[int]
    CANARY_BASE_FIELD_NUMBER: _ClassVar[int]
    CANARY_PAGES_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    receiver: _types_pb2.Instance
    sender: _types_pb2.Instance
    control_address: str
    layout: _types_pb2.KvLayout
    data_address: bytes
    buffer_bases: _containers.RepeatedScalarFieldContainer[int]
    num_pages: int
    metadata_base: int
    metadata_item_len_bytes: int
    metadata_slots: int
    canary_base: int
    canary_pages: int
    registration: int
    def __init__(self, receiver: _Optional[_Union[_types_pb2.Instance, _Mapping]] = ..., sender: _Optional[_Union[_types_pb2.Instance, _Mapping]] = ..., control_address: _Optional[str] = ..., layout: _Optional[_Union[_types_pb2.KvLayout, _Mapping]] = ..., data_address: _Optional[bytes] = ..., buffer_bases: _Optional[_Iterable[int]] = ..., num_pages: _Optional[int] = ..., metadata_base: _Optional[int] = ..., metadata_item_len_bytes: _Optional[int] = ..., metadata_slots: _Optional[int] = ..., canary_base: _Optional[int] = ..., canary_pages: _Optional[int] = ..., registration: _Optional[int] = ...) -> None: ...

class RegisterReceiverResponse(_message.Message):
    __slots__ = ("sender", "process", "carrier")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    CARRIER_FIELD_NUMBER: _ClassVar[int]
    sender: _types_pb2.Instance
    process: _types_pb2.ProcessProof
    carrier: str
    def __init__(self, sender: _Optional[_Union[_types_pb2.Instance, _Mapping]] = ..., process: _Optional[_Union[_types_pb2.ProcessProof, _Mapping]] = ..., carrier: _Optional[str] = ...) -> None: ...

class HoldReceiverRequest(_message.Message):
    __slots__ = ("receiver", "sender", "registration")
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    receiver: _types_pb2.Instance
    sender: _types_pb2.Instance
    registration: int
    def __init__(self, receiver: _Optional[_Union[_types_pb2.Instance, _Mapping]] = ..., sender: _Optional[_Union[_types_pb2.Instance, _Mapping]] = ..., registration: _Optional[int] = ...) -> None: ...

class HoldReceiverResponse(_message.Message):
    __slots__ = ("interval",)
    INTERVAL_FIELD_NUMBER: _ClassVar[int]
    interval: _duration_pb2.Duration
    def __init__(self, interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class SendCanaryRequest(_message.Message):
    __slots__ = ("receiver", "sender", "page", "seed", "registration")
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    PAGE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    receiver: _types_pb2.Instance
    sender: _types_pb2.Instance
    page: int
    seed: bytes
    registration: int
    def __init__(self, receiver: _Optional[_Union[_types_pb2.Instance, _Mapping]] = ..., sender: _Optional[_Union[_types_pb2.Instance, _Mapping]] = ..., page: _Optional[int] = ..., seed: _Optional[bytes] = ..., registration: _Optional[int] = ...) -> None: ...

class SendCanaryResponse(_message.Message):
    __slots__ = ("took",)
    TOOK_FIELD_NUMBER: _ClassVar[int]
    took: _duration_pb2.Duration
    def __init__(self, took: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class StateIndices(_message.Message):
    __slots__ = ("indices",)
    INDICES_FIELD_NUMBER: _ClassVar[int]
    indices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, indices: _Optional[_Iterable[int]] = ...) -> None: ...

class AllocatePagesRequest(_message.Message):
    __slots__ = ("bootstrap_room", "receiver", "sender", "page_ids", "metadata_slot", "decode_prefix_len", "prompt_tokens", "prompt_digest", "time_left", "ticket", "state_indices", "registration")
    BOOTSTRAP_ROOM_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    PAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    METADATA_SLOT_FIELD_NUMBER: _ClassVar[int]
    DECODE_PREFIX_LEN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    STATE_INDICES_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    bootstrap_room: int
    receiver: _types_pb2.Instance
    sender: _types_pb2.Instance
    page_ids: _containers.RepeatedScalarFieldContainer[int]
    metadata_slot: _types_pb2.MetadataSlot
    decode_prefix_len: int
    prompt_tokens: int
    prompt_digest: bytes
    time_left: _duration_pb2.Duration
    ticket: bytes
    state_indices: _containers.RepeatedCompositeFieldContainer[StateIndices]
    registration: int
    def __init__(self, bootstrap_room: _Optional[int] = ..., receiver: _Optional[_Union[_types_pb2.Instance, _Mapping]] = ..., sender: _Optional[_Union[_types_pb2.Instance, _Mapping]] = ..., page_ids: _Optional[_Iterable[int]] = ..., metadata_slot: _Optional[_Union[_types_pb2.MetadataSlot, _Mapping]] = ..., decode_prefix_len: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., prompt_digest: _Optional[bytes] = ..., time_left: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., ticket: _Optional[bytes] = ..., state_indices: _Optional[_Iterable[_Union[StateIndices, _Mapping]]] = ..., registration: _Optional[int] = ...) -> None: ...

class AllocatePagesResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: _types_pb2.TransferState
    def __init__(self, state: _Optional[_Union[_types_pb2.TransferState, str]] = ...) -> None: ...
