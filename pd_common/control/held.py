"""The quarantine as the control plane shows it."""

from __future__ import annotations

from pd.v1 import transfer_status_pb2, types_pb2

from pd_common.control import convert
from pd_common.handoff.quarantine import Held, Proof, Writer

_PROOF = {
    Proof.FENCED: transfer_status_pb2.QUIET_PROOF_FENCED,
    Proof.PROCESS_GONE: transfer_status_pb2.QUIET_PROOF_PROCESS_GONE,
}


def held_to(held: Held, now: float, wall_offset_s: float) -> transfer_status_pb2.QuarantinedRoom:
    """`wall_offset_s` is what must be added to the monotonic clock, on which `now` lies, to get seconds since 1970."""
    return transfer_status_pb2.QuarantinedRoom(
        bootstrap_room=held.room,
        page_ids=held.pages,
        metadata_slot=types_pb2.MetadataSlot(index=held.slot.index, generation=held.slot.generation),
        since=convert.timestamp_to(held.since_s + wall_offset_s),
        writers=[_writer_to(writer, missing) for writer, missing in held.missing.items()],
        description=held.in_words(now),
    )


def _writer_to(writer: Writer, missing: frozenset[Proof]) -> transfer_status_pb2.QuarantineWriter:
    return transfer_status_pb2.QuarantineWriter(
        instance=convert.instance_to(writer.instance),
        address=writer.address,
        missing=[_PROOF[proof] for proof in Proof if proof in missing],
    )
