"""One room on its way to decode: computed chunk by chunk, each written while the next is computed, then handed over.

What the prefix cache had of it leaves before anything is computed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from pd_common.errors import InternalError, PdError, PeerLost, TransferFailed
from pd_common.handoff.chunk import ChunkPlanner, PoolBuffers, TransferKVChunk
from pd_common.handoff.destination import Destination
from pd_common.handoff.digest import PageDigest
from pd_common.handoff.metadata import CachedTokens, HandoffMetadata, MetadataBuffers, Slot
from pd_common.handoff.sender import KVSender
from pd_common.handoff.state import TransferState
from pd_common.handoff.table import TransferTable
from pd_common.telemetry.spans import SpanName, now_ns
from pd_common.telemetry.tracing import RoomTrace
from pd_common.transport.base import WriteReceipt
from pd_common.types import BootstrapRoom
from services.prefill.job import Job
from services.prefill.receivers import Receivers
from services.prefill.reports import Reports


@dataclass(frozen=True, slots=True, eq=False)
class Handover:
    """A room that is computed and sent, from `Handovers.begin` to `Handovers.end`."""

    room: BootstrapRoom
    trace: RoomTrace
    job: Job
    slot: Slot
    sender: KVSender
    planner: ChunkPlanner
    reports: Reports
    receivers: Receivers
    transfers: TransferTable

    async def carry_out(self) -> None:
        """Returns when decode has committed the room.

        Raises:
            PdError: computing or writing has failed, or decode has given the room up.

        """
        chunk, metadata = await self._compute_and_send()
        self.trace.enter(SpanName.COMMIT)
        self.reports.leave_to_decode()
        await self._send(chunk, metadata)
        await self.reports.success(self.sender.progress)

    async def _compute_and_send(self) -> tuple[TransferKVChunk, HandoffMetadata]:
        """Sends every finished chunk while the next is computed; gives the last chunk unsent, with what goes along."""
        try:
            async with asyncio.TaskGroup() as sends:
                return await self._compute(sends)
        except* PdError as failed:
            raise failed.exceptions[0] from failed

    async def _compute(self, sends: asyncio.TaskGroup) -> tuple[TransferKVChunk, HandoffMetadata]:
        while True:
            done = await self.job.next_chunk()
            if not done.was_cached:
                tokens = done.end - done.start
                self.trace.record(SpanName.CHUNK_COMPUTE, done.began_ns, done.ended_ns, tokens=tokens, end=done.end)
            is_last = done.sampled is not None
            chunk = self.planner.next_chunk(done.end, self.job.sequence.pages, is_last=is_last)
            if chunk is None:
                continue
            if done.sampled is not None:
                cached = CachedTokens(total=self.job.cached_tokens, device=self.job.cached_tokens)
                return chunk, HandoffMetadata(done.sampled.token_id, done.end, cached, done.sampled.logprob)
            sends.create_task(self._send_and_report(chunk))

    async def _send_and_report(self, chunk: TransferKVChunk) -> None:
        await self._send(chunk, None)
        await self.reports.progress(self.sender.progress)

    async def _send(self, chunk: TransferKVChunk, metadata: HandoffMetadata | None) -> None:
        began_ns = now_ns()
        self.transfers.advance(self.room, TransferState.TRANSFERRING, time.monotonic())
        try:
            receipt = await self._write(chunk, metadata)
        except (TransferFailed, PeerLost) as broken:
            # The channel is broken for good: decode has to register again before it can offer pages to this process.
            await self.receivers.drop(self.reports.receiver, broken.message)
            raise
        self.transfers.advance(self.room, TransferState.TRANSFERRING, time.monotonic(), progress=self.sender.progress)
        self.trace.record(
            SpanName.CHUNK_TRANSFER,
            began_ns,
            now_ns(),
            chunk=chunk.index,
            pages=len(chunk.src_pages),
            descriptors=receipt.descriptors,
            bytes=receipt.bytes,
            gb_per_s=round(receipt.bytes / max(receipt.seconds, 1e-9) / 1e9, 3),
            carrier=self.reports.receiver.channel.carrier,
        )

    async def _write(self, chunk: TransferKVChunk, metadata: HandoffMetadata | None) -> WriteReceipt:
        if metadata is None:
            return await self.sender.send_kv_chunk(chunk)
        return await self.sender.finish(chunk, metadata)


class Handovers:
    """Begins and ends them. Each has a metadata slot of its own, from which the last row is written."""

    def __init__(
        self,
        source: PoolBuffers,
        metadata: MetadataBuffers,
        transfers: TransferTable,
        new_digest: Callable[[], PageDigest] | None,
    ) -> None:
        self._source = source
        self._metadata = metadata
        self._transfers = transfers
        self._new_digest = new_digest
        self._free_slots = asyncio.Semaphore(metadata.free_slots)

    def use(self, receivers: Receivers) -> None:
        """Who offers memory; made after this."""
        self._receivers = receivers

    async def begin(self, trace: RoomTrace, job: Job, destination: Destination, reports: Reports) -> Handover:
        """Waits for a slot. Who has one has pages already, so it waits for nobody who waits for a slot."""
        room, offer = job.sequence.request.room, destination.offer
        planner = ChunkPlanner(room, offer.prompt_tokens, self._source.page_size, offer.decode_prefix_len)
        await self._free_slots.acquire()
        slot = self._metadata.alloc()
        if slot is None:
            raise InternalError("the semaphore and the metadata slots disagree")
        digest = None if self._new_digest is None else self._new_digest()
        sender = KVSender(room, self._source, destination, self._metadata, slot, digest)
        return Handover(room, trace, job, slot, sender, planner, reports, self._receivers, self._transfers)

    async def end(self, handover: Handover) -> None:
        """Returns when nothing of it is written any more, so that its pages are not read either (I3)."""
        await handover.sender.abort()
        self._metadata.free(handover.slot)
        self._free_slots.release()
