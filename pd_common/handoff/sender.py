"""Prefill's side of one room's data plane: chunks in order, the metadata row after the last, and a drain to trust.

Driven by the service; knows neither the table nor the control plane.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np

from pd_common.errors import InternalError, LayoutMismatch, PagesInvalid, RoomAborted
from pd_common.handoff.chunk import PoolBuffers, TransferKVChunk, check_pages, group_concurrent_contiguous, plan_puts
from pd_common.handoff.destination import Destination
from pd_common.handoff.digest import PageDigest
from pd_common.handoff.metadata import HandoffMetadata, MetadataBuffers, Slot
from pd_common.handoff.state import Progress
from pd_common.transport.base import Puts, WriteReceipt
from pd_common.types import BootstrapRoom


class KVSender:
    """Writes one room into its destination (I1: there is no sender without one).

    Sends are accepted in chunk order and go out one at a time in that order. The source pages and `slot` stay the
    caller's and must stay as they are until `quiet` (I3). `digest`, if any, is a fresh one that reads the source pool.
    """

    def __init__(
        self,
        room: BootstrapRoom,
        source: PoolBuffers,
        destination: Destination,
        metadata: MetadataBuffers,
        slot: Slot,
        digest: PageDigest | None,
    ) -> None:
        _require_same_layout(source, destination.pool.buffers)
        self._room = room
        self._source = source
        self._destination = destination
        self._pages = np.array(destination.offer.pages, dtype=np.int64)
        self._metadata = metadata
        self._slot = slot
        self._digest = digest
        self._progress = Progress()
        self._next_chunk = 0
        self._pages_accepted = 0
        self._last_accepted = False
        self._stopped: Exception | None = None
        self._turn = asyncio.Lock()
        self._sends: set[asyncio.Task[WriteReceipt]] = set()

    @property
    def quiet(self) -> bool:
        """Nothing that was accepted still reads local memory or may still write remote memory."""
        return not self._sends

    @property
    def progress(self) -> Progress:
        """What the destination holds by now; the metadata row counts as bytes, not as a page."""
        return self._progress

    async def send_kv_chunk(self, chunk: TransferKVChunk) -> WriteReceipt:
        """Writes the pages of a chunk that is not the last; returns when they are visible remotely.

        Cancelling the caller does not stop the write: `abort` does.

        Raises:
            RoomAborted: the room was aborted before this chunk's turn; nothing of it was written.
            PagesInvalid: source pages outside the pool, or more pages than the destination has.
            TransferFailed, PeerLost: from the channel; every later send raises the same.

        """
        self._accept(chunk, is_last=False)
        return await self._in_turn(chunk, None)

    async def finish(self, chunk: TransferKVChunk, metadata: HandoffMetadata) -> WriteReceipt:
        """Writes the last pages, if any are left, then the row's body, then its seal, each visible before the next.

        What it comes to, the digest over all of it too, is added to `metadata` here. Raises as `send_kv_chunk`.
        """
        self._accept(chunk, is_last=True)
        return await self._in_turn(chunk, metadata)

    async def abort(self) -> None:
        """Stops posting and returns when all that was posted has ended: after that nothing of this room is written.

        May be called at any time, again, and by several callers; a cancelled caller may call it again.
        """
        if self._stopped is None:
            self._stopped = RoomAborted(f"Room {self._room} was aborted", room=self._room)
        while self._sends:
            await asyncio.wait(self._sends)

    def _accept(self, chunk: TransferKVChunk, *, is_last: bool) -> None:
        self._refuse_if_stopped()
        expected = (self._room, self._next_chunk, self._pages_accepted, is_last)
        if self._last_accepted or (chunk.room, chunk.index, chunk.dst_offset_pages, chunk.is_last) != expected:
            raise InternalError("A chunk out of order", room=self._room, index=chunk.index, expected=self._next_chunk)
        end = self._pages_accepted + len(chunk.src_pages)
        if end > len(self._pages) or (is_last and end != len(self._pages)):
            raise PagesInvalid("The chunk does not fit the destination", end=end, destination_pages=len(self._pages))
        check_pages(chunk.src_pages.tolist(), self._source.num_pages, len(chunk.src_pages))
        self._next_chunk += 1
        self._pages_accepted = end
        self._last_accepted = is_last

    def _refuse_if_stopped(self) -> None:
        if self._stopped is not None:
            raise self._stopped

    async def _in_turn(self, chunk: TransferKVChunk, metadata: HandoffMetadata | None) -> WriteReceipt:
        send = asyncio.create_task(self._send(chunk, metadata))
        self._sends.add(send)
        send.add_done_callback(self._ended)
        return await asyncio.shield(send)

    def _ended(self, send: asyncio.Task[WriteReceipt]) -> None:
        self._sends.discard(send)
        if not send.cancelled():
            send.exception()  # noted in _stopped already; the caller may be gone

    async def _send(self, chunk: TransferKVChunk, metadata: HandoffMetadata | None) -> WriteReceipt:
        async with self._turn:
            self._refuse_if_stopped()
            try:
                receipt = await self._write(chunk, metadata)
            except Exception as error:
                self._stopped = self._stopped or error
                raise
        self._progress = Progress(
            self._progress.chunks_done + 1,
            self._progress.pages_done + len(chunk.src_pages),
            self._progress.bytes_done + receipt.bytes,
        )
        return receipt

    async def _write(self, chunk: TransferKVChunk, metadata: HandoffMetadata | None) -> WriteReceipt:
        """Hashes the chunk while it travels; the row, which holds the digest, comes after both."""
        channel, puts = self._destination.channel, self._page_puts(chunk)
        marks = (self._mark_puts(),) if metadata is not None and puts else ()
        hashing = asyncio.create_task(self._hash(chunk))
        try:
            receipt = (await channel.write(*puts, *marks)).without(marks)
        finally:
            await hashing
        if metadata is None:
            return receipt
        self._refuse_if_stopped()
        return receipt + await channel.write(*self._row_puts(metadata))

    async def _hash(self, chunk: TransferKVChunk) -> None:
        if self._digest is not None and len(chunk.src_pages):
            await asyncio.to_thread(self._digest.update, chunk.src_pages)

    def _page_puts(self, chunk: TransferKVChunk) -> tuple[Puts, ...]:
        count, offset = len(chunk.src_pages), chunk.dst_offset_pages
        if not count:
            return ()
        runs = group_concurrent_contiguous(chunk.src_pages, self._pages[offset : offset + count])
        return (plan_puts(runs, self._source.bases, self._destination.pool.buffers.bases, self._source.item_lens),)

    def _mark_puts(self) -> Puts:
        """Tells decode, which waits for it, that the pages are there: it hashes them while the row is made."""
        remote = self._destination.offer.slot
        self._metadata.set_mark(self._slot, remote.generation, len(self._pages))
        return self._metadata.mark_put(self._slot, self._destination.pool.metadata_base, remote.index)

    def _row_puts(self, metadata: HandoffMetadata) -> tuple[Puts, Puts]:
        digest = None if self._digest is None else self._digest.digest()
        metadata = replace(metadata, digest=digest, chunks_done=self._next_chunk)
        remote = self._destination.offer.slot
        self._metadata.set_buf(self._slot, self._room, remote.generation, metadata)
        return self._metadata.row_puts(self._slot, self._destination.pool.metadata_base, remote.index)


def _require_same_layout(source: PoolBuffers, remote: PoolBuffers) -> None:
    for field in ("item_lens", "page_size"):
        mine, theirs = getattr(source, field), getattr(remote, field)
        if mine != theirs:
            raise LayoutMismatch(f"The pools differ in {field}", field=field, mine=mine, theirs=theirs)
