from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from typing import ClassVar as _ClassVar

DESCRIPTOR: _descriptor.FileDescriptor

class ErrorReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_REASON_UNSPECIFIED: _ClassVar[ErrorReason]
    ERROR_REASON_INVALID_REQUEST: _ClassVar[ErrorReason]
    ERROR_REASON_PROMPT_EMPTY: _ClassVar[ErrorReason]
    ERROR_REASON_PROMPT_TOO_LONG: _ClassVar[ErrorReason]
    ERROR_REASON_ROOM_IN_USE: _ClassVar[ErrorReason]
    ERROR_REASON_ROOM_ABORTED: _ClassVar[ErrorReason]
    ERROR_REASON_ROOM_UNKNOWN: _ClassVar[ErrorReason]
    ERROR_REASON_PROMPT_MISMATCH: _ClassVar[ErrorReason]
    ERROR_REASON_LAYOUT_MISMATCH: _ClassVar[ErrorReason]
    ERROR_REASON_STALE_INSTANCE: _ClassVar[ErrorReason]
    ERROR_REASON_RECEIVER_UNKNOWN: _ClassVar[ErrorReason]
    ERROR_REASON_ALLOCATION_CONFLICT: _ClassVar[ErrorReason]
    ERROR_REASON_PAGES_INVALID: _ClassVar[ErrorReason]
    ERROR_REASON_TOPOLOGY_INCOMPLETE: _ClassVar[ErrorReason]
    ERROR_REASON_PEER_LOST: _ClassVar[ErrorReason]
    ERROR_REASON_TRANSFER_FAILED: _ClassVar[ErrorReason]
    ERROR_REASON_METADATA_INVALID: _ClassVar[ErrorReason]
    ERROR_REASON_DIGEST_MISMATCH: _ClassVar[ErrorReason]
    ERROR_REASON_DEADLINE: _ClassVar[ErrorReason]
    ERROR_REASON_CAPACITY: _ClassVar[ErrorReason]
    ERROR_REASON_NO_WORKERS: _ClassVar[ErrorReason]
    ERROR_REASON_CLIENT_CANCELLED: _ClassVar[ErrorReason]
    ERROR_REASON_SHUTTING_DOWN: _ClassVar[ErrorReason]
    ERROR_REASON_TRANSPORT_UNAVAILABLE: _ClassVar[ErrorReason]
    ERROR_REASON_INTERNAL: _ClassVar[ErrorReason]
ERROR_REASON_UNSPECIFIED: ErrorReason
ERROR_REASON_INVALID_REQUEST: ErrorReason
ERROR_REASON_PROMPT_EMPTY: ErrorReason
ERROR_REASON_PROMPT_TOO_LONG: ErrorReason
ERROR_REASON_ROOM_IN_USE: ErrorReason
ERROR_REASON_ROOM_ABORTED: ErrorReason
ERROR_REASON_ROOM_UNKNOWN: ErrorReason
ERROR_REASON_PROMPT_MISMATCH: ErrorReason
ERROR_REASON_LAYOUT_MISMATCH: ErrorReason
ERROR_REASON_STALE_INSTANCE: ErrorReason
ERROR_REASON_RECEIVER_UNKNOWN: ErrorReason
ERROR_REASON_ALLOCATION_CONFLICT: ErrorReason
ERROR_REASON_PAGES_INVALID: ErrorReason
ERROR_REASON_TOPOLOGY_INCOMPLETE: ErrorReason
ERROR_REASON_PEER_LOST: ErrorReason
ERROR_REASON_TRANSFER_FAILED: ErrorReason
ERROR_REASON_METADATA_INVALID: ErrorReason
ERROR_REASON_DIGEST_MISMATCH: ErrorReason
ERROR_REASON_DEADLINE: ErrorReason
ERROR_REASON_CAPACITY: ErrorReason
ERROR_REASON_NO_WORKERS: ErrorReason
ERROR_REASON_CLIENT_CANCELLED: ErrorReason
ERROR_REASON_SHUTTING_DOWN: ErrorReason
ERROR_REASON_TRANSPORT_UNAVAILABLE: ErrorReason
ERROR_REASON_INTERNAL: ErrorReason
