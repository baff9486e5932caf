"""The one tree of errors: a subclass for each reason a request, a transfer or a handshake can fail.

Raised anywhere; mapped to a gRPC status in control/status.py and to an HTTP status in services/router/http_errors.py.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar


class Reason(StrEnum):
    """Machine-readable cause; the same names as `pd.v1.ErrorReason` without its prefix."""

    INVALID_REQUEST = "INVALID_REQUEST"
    PROMPT_EMPTY = "PROMPT_EMPTY"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    ROOM_IN_USE = "ROOM_IN_USE"
    ROOM_ABORTED = "ROOM_ABORTED"
    ROOM_UNKNOWN = "ROOM_UNKNOWN"
    PROMPT_MISMATCH = "PROMPT_MISMATCH"
    LAYOUT_MISMATCH = "LAYOUT_MISMATCH"
    STALE_INSTANCE = "STALE_INSTANCE"
    RECEIVER_UNKNOWN = "RECEIVER_UNKNOWN"
    ALLOCATION_CONFLICT = "ALLOCATION_CONFLICT"
    PAGES_INVALID = "PAGES_INVALID"
    TOPOLOGY_INCOMPLETE = "TOPOLOGY_INCOMPLETE"
    PEER_LOST = "PEER_LOST"
    TRANSFER_FAILED = "TRANSFER_FAILED"
    METADATA_INVALID = "METADATA_INVALID"
    DIGEST_MISMATCH = "DIGEST_MISMATCH"
    DEADLINE = "DEADLINE"
    CAPACITY = "CAPACITY"
    NO_WORKERS = "NO_WORKERS"
    CLIENT_CANCELLED = "CLIENT_CANCELLED"
    SHUTTING_DOWN = "SHUTTING_DOWN"
    TRANSPORT_UNAVAILABLE = "TRANSPORT_UNAVAILABLE"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    INTERNAL = "INTERNAL"


class PdError(Exception):
    """Base of all: a message for a person, and metadata that holds every changing part of it, in order of the keys."""

    reason: ClassVar[Reason] = Reason.INTERNAL

    def __init__(self, message: str, /, **metadata: object) -> None:  # any name may come from a peer
        super().__init__(message)
        self.message = message
        self.metadata = {key: str(value) for key, value in sorted(metadata.items())}


class InvalidRequest(PdError):
    """A field is unknown, of the wrong type, out of range, or not supported."""

    reason = Reason.INVALID_REQUEST


class PromptEmpty(PdError):
    """The prompt has no token."""

    reason = Reason.PROMPT_EMPTY


class PromptTooLong(PdError):
    """Prompt and answer do not fit into the model's context or into the KV pool."""

    reason = Reason.PROMPT_TOO_LONG


class RoomInUse(PdError):
    """Another live request has this room (I12)."""

    reason = Reason.ROOM_IN_USE


class RoomAborted(PdError):
    """The room was aborted, perhaps before its request arrived; it is never revived (I4)."""

    reason = Reason.ROOM_ABORTED


class RoomUnknown(PdError):
    """No record of this room: never seen, or finished so long ago that it was dropped."""

    reason = Reason.ROOM_UNKNOWN


class PromptMismatch(PdError):
    """The two legs of a room were sent different prompts."""

    reason = Reason.PROMPT_MISMATCH


class LayoutMismatch(PdError):
    """Two pools cannot be paired; metadata names the field (I10)."""

    reason = Reason.LAYOUT_MISMATCH


class StaleInstance(PdError):
    """The message is meant for, or comes from, an earlier life of a process."""

    reason = Reason.STALE_INSTANCE


class ReceiverUnknown(PdError):
    """The decode rank has to register (again) before it may publish pages."""

    reason = Reason.RECEIVER_UNKNOWN


class AllocationConflict(PdError):
    """The room already has other destination pages."""

    reason = Reason.ALLOCATION_CONFLICT


class PagesInvalid(PdError):
    """A page list has the wrong length, repeats a page or leaves the pool (I11)."""

    reason = Reason.PAGES_INVALID


class TopologyIncomplete(PdError):
    """Not all ranks of the current epoch have registered."""

    reason = Reason.TOPOLOGY_INCOMPLETE


class PeerLost(PdError):
    """The other process is gone, or does not answer any more."""

    reason = Reason.PEER_LOST


class TransferFailed(PdError):
    """A write did not reach the other side's memory."""

    reason = Reason.TRANSFER_FAILED


class MetadataInvalid(PdError):
    """The metadata slot does not hold this room, this generation or the whole prompt."""

    reason = Reason.METADATA_INVALID


class DigestMismatch(PdError):
    """The pages that arrived are not the pages that were sent."""

    reason = Reason.DIGEST_MISMATCH


class DeadlineExceeded(PdError):
    """The request's one deadline has passed."""

    reason = Reason.DEADLINE


class CapacityExceeded(PdError):
    """Too many requests wait already."""

    reason = Reason.CAPACITY


class NoWorkers(PdError):
    """The router has no live prefill and decode to send to."""

    reason = Reason.NO_WORKERS


class ClientCancelled(PdError):
    """The client went away or cancelled."""

    reason = Reason.CLIENT_CANCELLED


class ShuttingDown(PdError):
    """The process drains and takes no new request."""

    reason = Reason.SHUTTING_DOWN


class TransportUnavailable(PdError):
    """The data plane's library cannot be loaded or offers no usable transport."""

    reason = Reason.TRANSPORT_UNAVAILABLE


class PermissionDenied(PdError):
    """The caller's certificate names another role, or the room's ticket is missing, forged or over."""

    reason = Reason.PERMISSION_DENIED


class InternalError(PdError):
    """A defect: something that must not happen did."""

    reason = Reason.INTERNAL


ERROR_OF_REASON: dict[Reason, type[PdError]] = {cls.reason: cls for cls in PdError.__subclasses__()}
