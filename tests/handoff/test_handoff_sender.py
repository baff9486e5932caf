from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable

import numpy as np
import pytest

from pd_common.errors import (
    DigestMismatch,
    InternalError,
    LayoutMismatch,
    MetadataInvalid,
    PagesInvalid,
    RoomAborted,
    TransferFailed,
)
from pd_common.generation import TokenLogprob
from pd_common.handoff.chunk import ChunkPlanner, Int64s, PoolBuffers, TransferKVChunk, pages_to_transfer
from pd_common.handoff.destination import Destination, RemotePool
from pd_common.handoff.digest import PageDigest
from pd_common.handoff.metadata import ROW_BYTES, CachedTokens, HandoffMetadata, MetadataBuffers, Slot
from pd_common.handoff.receiver import KVReceiver
from pd_common.handoff.sender import KVSender
from pd_common.handoff.state import Progress
from pd_common.transport.base import WriteReceipt
from tests.handoff.memory import GatedChannel, MemoryPool, make_destination, make_offer, owned, room

ITEM_LENS = (48, 16, 80)
PAGES = 40
ROOM = room(7)

LOGPROB = TokenLogprob(99, -0.1, (TokenLogprob(99, -0.1), TokenLogprob(4, -2.5)))


class Pair:
    """One room between two pools. Source pages go down from the top, destination pages are shuffled."""

    def __init__(
        self,
        prompt: int,
        *,
        page_size: int = 4,
        prefix: int = 0,
        source_digest: bool = True,
        target_digest: bool = True,
    ) -> None:
        self.page_size, self.prompt = page_size, prompt
        self.source = MemoryPool(ITEM_LENS, PAGES, page_size, seed=5)
        self.target = MemoryPool(ITEM_LENS, PAGES, page_size)
        self.source_rows, self.rows = MetadataBuffers(1), MetadataBuffers(2)
        self.channel = GatedChannel()
        self.source_rows.free(owned(self.source_rows))
        slot, self.source_slot = owned(self.rows), owned(self.source_rows)
        assert slot.generation != self.source_slot.generation
        count = pages_to_transfer(prompt, prefix, page_size)
        shuffled = np.random.default_rng(0).permutation(PAGES)[:count]
        self.offer = make_offer(shuffled.tolist(), prompt, slot=slot, decode_prefix_len=prefix)
        self.table = list(range(PAGES - 1, PAGES - 1 - -(-prompt // page_size), -1))
        self.planner = ChunkPlanner(ROOM, prompt, page_size, prefix)
        self.sender = KVSender(
            ROOM,
            self.source.buffers,
            make_destination(self.offer, self.target, self.rows, self.channel),
            self.source_rows,
            self.source_slot,
            self.source.new_digest() if source_digest else None,
        )
        target_hash = self.target.new_digest() if target_digest else None
        self.receiver = KVReceiver(ROOM, self.offer, self.target.buffers, self.rows, target_hash)

    def chunk(self, tokens: int) -> TransferKVChunk:
        chunk = self.planner.next_chunk(tokens, self.table, is_last=tokens == self.prompt)
        assert chunk is not None
        return chunk

    def send(self, tokens: int) -> asyncio.Task[WriteReceipt]:
        return asyncio.ensure_future(self.sender.send_kv_chunk(self.chunk(tokens)))

    def finish(self) -> asyncio.Task[WriteReceipt]:
        metadata = HandoffMetadata(first_token=11, covered_tokens=self.prompt)
        return asyncio.ensure_future(self.sender.finish(self.chunk(self.prompt), metadata))


async def settled(*tasks: asyncio.Task[WriteReceipt]) -> list[WriteReceipt | BaseException]:
    return await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(
    ("page_size", "prompt", "chunk_tokens"),
    [
        (size, prompt, chunk)
        for size in (1, 16, 64)
        for prompt in sorted({1, max(1, size - 1), size, size + 1, 5 * size + 3})
        for chunk in (7, 31, 1000)
    ],
)
@pytest.mark.parametrize("with_prefix", [False, True])
async def test_what_arrives_is_what_was_computed(
    page_size: int, prompt: int, chunk_tokens: int, with_prefix: bool
) -> None:
    prefix = prompt // page_size * page_size if with_prefix else 0
    pair = Pair(prompt, page_size=page_size, prefix=prefix)
    moved, chunks = 0, 1
    for tokens in range(chunk_tokens, prompt, chunk_tokens):
        chunk = pair.planner.next_chunk(tokens, pair.table, is_last=False)
        if chunk is not None:
            moved += (await pair.sender.send_kv_chunk(chunk)).bytes
            chunks += 1
    metadata = HandoffMetadata(99, prompt, CachedTokens(total=3), LOGPROB)
    moved += (await pair.sender.finish(pair.chunk(prompt), metadata)).bytes
    got = await pair.receiver.commit()
    assert (got.first_token, got.cached_tokens, got.logprob) == (99, metadata.cached_tokens, metadata.logprob)
    assert pair.target.pages(pair.offer.pages) == pair.source.pages(pair.table[prefix // page_size :])
    pages = len(pair.offer.pages)
    assert moved == pages * sum(ITEM_LENS) + ROW_BYTES
    assert pair.sender.progress == Progress(chunks, pages, moved)
    assert pair.sender.quiet


async def test_no_byte_outside_the_offered_pages_is_touched() -> None:
    pair = Pair(18)
    await pair.finish()
    others = [page for page in range(PAGES) if page not in pair.offer.pages]
    assert pair.target.pages(others) == bytes(len(others) * sum(ITEM_LENS))


async def test_the_row_is_written_after_the_pages_and_its_seal_after_its_body() -> None:
    pair = Pair(10)
    await pair.finish()
    (pages, mark), (body, seal) = pair.channel.writes
    rows = pair.rows.region.base
    sizes = [group.total_bytes for group in (pages, mark, body, seal)]
    assert sizes == [3 * sum(ITEM_LENS), 64, ROW_BYTES - 64, 64]
    assert [group.remote.tolist() for group in (body, seal)] == [[rows], [rows + ROW_BYTES - 64]]


async def test_only_the_last_pages_are_marked_and_none_is_where_there_are_no_pages() -> None:
    pair = Pair(12)
    await pair.send(4)
    await pair.finish()
    assert [len(groups) for groups in pair.channel.writes] == [1, 2, 2]
    without_pages = Pair(16, prefix=16)
    await without_pages.finish()
    assert [len(groups) for groups in without_pages.channel.writes] == [0, 2]


async def test_sends_that_are_handed_over_faster_go_out_one_at_a_time_in_order() -> None:
    pair = Pair(12)
    pair.channel.gate.clear()
    sends = [pair.send(4), pair.send(8), pair.finish()]
    await pair.channel.blocked.wait()
    assert len(pair.channel.writes) == 1
    pair.channel.gate.set()
    await asyncio.gather(*sends)
    first_pages = [int(groups[0].remote[0]) for groups in pair.channel.writes[:-1]]
    base, item_len = pair.target.buffers.bases[0], ITEM_LENS[0]
    assert first_pages == [base + page * item_len for page in pair.offer.pages]
    assert (await pair.receiver.commit()).first_token == 11


async def test_a_chunk_out_of_order_is_refused_and_changes_nothing() -> None:
    pair = Pair(12)
    first, second, last = pair.chunk(4), pair.chunk(8), pair.chunk(12)
    wrong: list[Awaitable[WriteReceipt]] = [
        pair.sender.send_kv_chunk(second),
        pair.sender.send_kv_chunk(last),
        pair.sender.finish(first, HandoffMetadata(1, 12)),
        pair.sender.send_kv_chunk(TransferKVChunk(room(8), 0, first.src_pages, 0, is_last=False)),
    ]
    for send in wrong:
        with pytest.raises(InternalError):
            await send
    assert pair.channel.writes == []
    await pair.sender.send_kv_chunk(first)
    with pytest.raises(InternalError):
        await pair.sender.send_kv_chunk(first)
    await pair.sender.send_kv_chunk(second)
    await pair.sender.finish(last, HandoffMetadata(1, 12))
    with pytest.raises(InternalError):
        await pair.sender.finish(last, HandoffMetadata(1, 12))


@pytest.mark.parametrize("pages", [[0, 1, 2, 3], [0, 1], [0, 1, PAGES], [0, 0, 1]])
async def test_source_pages_must_fit_the_destination_exactly(pages: list[int]) -> None:
    pair = Pair(12)
    chunk = TransferKVChunk(ROOM, 0, np.array(pages, dtype=np.int64), 0, is_last=True)
    with pytest.raises(PagesInvalid):
        await pair.sender.finish(chunk, HandoffMetadata(1, 12))
    assert pair.channel.writes == []


async def test_abort_waits_for_what_is_posted_and_posts_nothing_more() -> None:
    pair = Pair(12)
    pair.channel.gate.clear()
    posted, queued = pair.send(4), pair.send(8)
    await pair.channel.blocked.wait()
    aborts = [asyncio.ensure_future(pair.sender.abort()) for _ in range(2)]
    with pytest.raises(RoomAborted):
        await pair.finish()
    assert not any(abort.done() for abort in aborts)
    assert not pair.sender.quiet
    pair.channel.gate.set()
    await asyncio.gather(*aborts)
    assert pair.sender.quiet
    assert len(pair.channel.writes) == 1
    assert (await posted).bytes == sum(ITEM_LENS)
    with pytest.raises(RoomAborted):
        await queued
    await pair.sender.abort()


async def test_a_cancelled_caller_neither_stops_a_write_nor_hides_it_from_the_drain() -> None:
    pair = Pair(12)
    pair.channel.gate.clear()
    send = pair.send(4)
    await pair.channel.blocked.wait()
    send.cancel()
    with pytest.raises(asyncio.CancelledError):
        await send
    assert not pair.sender.quiet
    abort = asyncio.ensure_future(pair.sender.abort())
    await asyncio.sleep(0)
    abort.cancel()
    with pytest.raises(asyncio.CancelledError):
        await abort
    assert not pair.sender.quiet
    pair.channel.gate.set()
    await pair.sender.abort()
    assert pair.target.pages(pair.offer.pages[:1]) == pair.source.pages(pair.table[:1])


async def test_abort_before_any_send_is_quiet_at_once() -> None:
    pair = Pair(12)
    await pair.sender.abort()
    with pytest.raises(RoomAborted):
        await pair.finish()
    assert pair.channel.writes == []


async def test_a_failed_write_fails_everything_after_it() -> None:
    pair = Pair(12)
    pair.channel.gate.clear()
    pair.channel.fault = TransferFailed("link down")
    sends = [pair.send(4), pair.send(8)]
    await pair.channel.blocked.wait()
    pair.channel.gate.set()
    assert await settled(*sends) == [pair.channel.fault, pair.channel.fault]
    assert await settled(pair.finish()) == [pair.channel.fault]
    assert len(pair.channel.writes) == 1
    assert pair.sender.progress == Progress()
    await pair.sender.abort()
    assert pair.sender.quiet


class SlowHash:
    """Holds every digest update, in its thread, until `go_on` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on, self.reading = threading.Event(), threading.Event()
        real_update = PageDigest.update

        def update(digest: PageDigest, pages: Int64s) -> None:
            self.reading.set()
            self.go_on.wait()
            real_update(digest, pages)

        monkeypatch.setattr(PageDigest, "update", update)


@pytest.mark.parametrize("fault", [None, TransferFailed("link down")])
async def test_hashing_reads_the_pages_too(monkeypatch: pytest.MonkeyPatch, fault: TransferFailed | None) -> None:
    """The source pages must not be released while the digest is still being made (I3), even if the write has ended."""
    slow = SlowHash(monkeypatch)
    pair = Pair(12)
    pair.channel.fault = fault
    send = pair.send(4)
    await asyncio.to_thread(slow.reading.wait)
    abort = asyncio.ensure_future(pair.sender.abort())
    try:
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(pair.channel.writes) == 1
        assert not pair.sender.quiet
        assert not abort.done()
    finally:
        slow.go_on.set()
    await abort
    assert pair.sender.quiet
    await settled(send)


async def test_abort_while_the_last_pages_are_hashed_writes_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowHash(monkeypatch)
    pair = Pair(12)
    finish = pair.finish()
    await asyncio.to_thread(slow.reading.wait)
    abort = asyncio.ensure_future(pair.sender.abort())
    await asyncio.sleep(0)
    slow.go_on.set()
    await abort
    with pytest.raises(RoomAborted):
        await finish
    ((pages, _),) = pair.channel.writes
    assert pages.total_bytes == 3 * sum(ITEM_LENS)


async def test_without_a_digest_on_either_side_none_travels() -> None:
    pair = Pair(12, source_digest=False, target_digest=False)
    await pair.finish()
    assert (await pair.receiver.commit()).digest is None


async def test_a_receiver_that_wants_a_digest_takes_no_room_without() -> None:
    pair = Pair(12, source_digest=False)
    await pair.finish()
    with pytest.raises(DigestMismatch):
        await pair.receiver.commit()


async def test_source_bytes_that_change_after_they_were_hashed_are_found() -> None:
    pair = Pair(12)
    await pair.finish()
    pair.target.arrays[2][pair.offer.pages[2], 0] ^= 255
    with pytest.raises(DigestMismatch):
        await pair.receiver.commit()


async def test_nothing_is_committed_before_the_seal() -> None:
    pair = Pair(12)
    await pair.send(8)
    with pytest.raises(MetadataInvalid):
        await pair.receiver.commit()


def other_layout(buffers: PoolBuffers, **changes: object) -> PoolBuffers:
    fields = {
        "bases": buffers.bases,
        "item_lens": buffers.item_lens,
        "num_pages": PAGES,
        "page_size": buffers.page_size,
    }
    return PoolBuffers(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(("field", "value"), [("item_lens", (48, 16, 40)), ("page_size", 2)])
async def test_pools_that_differ_cannot_be_joined(field: str, value: object) -> None:
    pair = Pair(8)
    source = other_layout(pair.source.buffers, **{field: value})
    with pytest.raises(LayoutMismatch) as caught:
        KVSender(
            ROOM,
            source,
            make_destination(pair.offer, pair.target, pair.rows, pair.channel),
            pair.source_rows,
            Slot(0, 1),
            None,
        )
    assert caught.value.metadata["field"] == field


@pytest.mark.parametrize(
    ("pages", "prompt", "prefix", "slot"),
    [
        ((0, 1), 12, 0, 0),
        ((0, 1, 2, 3), 12, 0, 0),
        ((0, 1, PAGES), 12, 0, 0),
        ((0, 1, 1), 12, 0, 0),
        ((0, 1), 12, 3, 0),
        ((), 12, 16, 0),
        ((0, 1, 2), 12, 0, 2),
        ((0, 1, 2), 12, 0, -1),
    ],
)
async def test_an_invalid_offer_never_becomes_a_destination(
    pages: tuple[int, ...], prompt: int, prefix: int, slot: int
) -> None:
    target, rows = MemoryPool(ITEM_LENS, PAGES, 4), MetadataBuffers(2)
    offer = make_offer(pages, prompt, slot=Slot(slot, 1), decode_prefix_len=prefix)
    with pytest.raises(PagesInvalid):
        Destination(offer, RemotePool(target.buffers, rows.region.base, rows.num_slots), GatedChannel())


@pytest.mark.parametrize(("base", "slots"), [(-1, 1), (0, 0), (2**63 - ROW_BYTES + 1, 1)])
def test_remote_rows_stay_within_the_address_space(base: int, slots: int) -> None:
    with pytest.raises(PagesInvalid):
        RemotePool(MemoryPool(ITEM_LENS, 1, 4).buffers, base, slots)
