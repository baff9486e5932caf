"""The commit: nothing that differs from what was sent becomes text, however the pages were cut for hashing."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from functools import cache

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_common.control.status import CODE_OF_REASON
from pd_common.errors import DigestMismatch, MetadataInvalid, PagesInvalid, PdError
from pd_common.generation import TokenLogprob
from pd_common.handoff.chunk import Int64s, TransferKVChunk
from pd_common.handoff.digest import PageDigest
from pd_common.handoff.metadata import ROW_BYTES, CachedTokens, HandoffMetadata, MetadataBuffers
from pd_common.handoff.receiver import KVReceiver
from pd_common.handoff.sender import KVSender
from tests.handoff.memory import GatedChannel, MemoryPool, make_destination, make_offer, owned, room

ITEM_LENS = (24, 40)
PAGES, OFFERED = 8, (6, 1, 2, 7)
PAGE_BYTES = sum(ITEM_LENS)
ROOM, PROMPT = room(7), 14
SENT = HandoffMetadata(
    first_token=11,
    covered_tokens=PROMPT,
    cached_tokens=CachedTokens(total=3, device=3),
    logprob=TokenLogprob(11, -0.5, (TokenLogprob(11, -0.5), TokenLogprob(4, -2.5))),
)


class Arrived:
    """A room of 4 pages whose data has all arrived, row and seal too."""

    def __init__(self, *, with_digest: bool = True) -> None:
        self.pool, self.rows = MemoryPool(ITEM_LENS, PAGES, 4), MetadataBuffers(1)
        self.offer = make_offer(OFFERED, PROMPT, slot=owned(self.rows))
        self.digest = self.pool.new_digest() if with_digest else None
        asyncio.run(self._send(with_digest=with_digest))
        self.receiver = KVReceiver(ROOM, self.offer, self.pool.buffers, self.rows, self.digest)

    async def _send(self, *, with_digest: bool) -> None:
        source, rows = MemoryPool(ITEM_LENS, PAGES, 4, seed=5), MetadataBuffers(1)
        destination = make_destination(self.offer, self.pool, self.rows, GatedChannel())
        digest = source.new_digest() if with_digest else None
        sender = KVSender(ROOM, source.buffers, destination, rows, owned(rows), digest)
        src_pages = np.arange(len(OFFERED), dtype=np.int64)
        await sender.finish(TransferKVChunk(ROOM, 0, src_pages, 0, is_last=True), SENT)

    def flip_row(self, at: int, mask: int) -> None:
        ctypes.c_ubyte.from_address(self.rows.region.base + at).value ^= mask

    def flip_page(self, at: int, mask: int) -> None:
        """Counted over the offered pages, in the order of the offer."""
        place, byte = divmod(at, PAGE_BYTES)
        buffer, offset = (0, byte) if byte < ITEM_LENS[0] else (1, byte - ITEM_LENS[0])
        self.pool.arrays[buffer][OFFERED[place], offset] ^= mask


@cache
def arrived(*, with_digest: bool) -> Arrived:
    return Arrived(with_digest=with_digest)


def refused(receiver: KVReceiver) -> PdError:
    """Why the commit failed; it must have, and with the status for data that is not what it should be."""
    with pytest.raises((DigestMismatch, MetadataInvalid)) as caught:
        asyncio.run(receiver.commit())
    assert isinstance(caught.value, PdError)
    assert CODE_OF_REASON[caught.value.reason] is grpc.StatusCode.DATA_LOSS
    return caught.value


def fresh(given: Arrived) -> KVReceiver:
    digest = None if given.digest is None else given.pool.new_digest()
    return KVReceiver(ROOM, given.offer, given.pool.buffers, given.rows, digest)


@pytest.mark.parametrize("with_digest", [True, False])
def test_what_arrived_whole_is_committed(with_digest: bool) -> None:
    metadata = asyncio.run(fresh(arrived(with_digest=with_digest)).commit())
    assert (metadata.first_token, metadata.logprob) == (SENT.first_token, SENT.logprob)
    assert (metadata.digest is not None) == with_digest


@pytest.mark.parametrize("with_digest", [True, False])
def test_any_byte_of_the_row_that_differs_fails_the_room(with_digest: bool) -> None:
    """Every byte that is sent: body, padding, both digests, seal. The row's own digest is there without any option."""
    room_data = arrived(with_digest=with_digest)
    for at in range(ROW_BYTES):
        room_data.flip_row(at, 1 << at % 8)
        refused(fresh(room_data))
        room_data.flip_row(at, 1 << at % 8)


def test_any_byte_of_the_pages_that_differs_fails_the_room() -> None:
    """Also behind the prompt's last token: the whole page is sent."""
    room_data = arrived(with_digest=True)
    for at in range(len(OFFERED) * PAGE_BYTES):
        room_data.flip_page(at, 1 << at % 8)
        assert isinstance(refused(fresh(room_data)), DigestMismatch)
        room_data.flip_page(at, 1 << at % 8)


@given(st.integers(0, ROW_BYTES - 1), st.integers(1, 255), st.integers(0, len(OFFERED) * PAGE_BYTES - 1))
def test_several_bytes_that_differ_fail_the_room_too(row_at: int, mask: int, page_at: int) -> None:
    room_data = arrived(with_digest=True)
    room_data.flip_row(row_at, mask)
    room_data.flip_page(page_at, mask)
    refused(fresh(room_data))
    room_data.flip_row(row_at, mask)
    room_data.flip_page(page_at, mask)


class CountingDigest(PageDigest):
    """Remembers which pages were hashed, in which piece; waits in its thread until `go_on` is set."""

    def __init__(self, digest: PageDigest) -> None:
        super().__init__(digest._readers)
        self.pieces: list[list[int]] = []
        self.go_on = threading.Event()
        self.go_on.set()

    def update(self, pages: Int64s) -> None:
        self.pieces.append(pages.tolist())
        self.go_on.wait()
        super().update(pages)


def counted(room_data: Arrived) -> tuple[KVReceiver, CountingDigest]:
    digest = CountingDigest(room_data.pool.new_digest())
    return KVReceiver(ROOM, room_data.offer, room_data.pool.buffers, room_data.rows, digest), digest


@given(st.lists(st.tuples(st.integers(0, len(OFFERED)), st.booleans()), max_size=6))
def test_however_reports_cut_the_pages_the_digest_is_the_same(reports: list[tuple[int, bool]]) -> None:
    """Reports may be late, repeated, or come while the pages of the one before are still hashed."""
    receiver, digest = counted(arrived(with_digest=True))

    async def receive() -> HandoffMetadata:
        for pages_done, wait in reports:
            receiver.pages_complete(pages_done)
            if wait:
                await receiver.quiet()
        return await receiver.commit()

    assert asyncio.run(receive()).first_token == SENT.first_token
    assert [page for piece in digest.pieces for page in piece] == list(OFFERED)


async def test_a_page_is_hashed_when_it_is_reported_and_not_before() -> None:
    receiver, digest = counted(await asyncio.to_thread(Arrived))
    receiver.pages_complete(0)
    await receiver.quiet()
    assert digest.pieces == []
    receiver.pages_complete(3)
    await receiver.quiet()
    assert digest.pieces == [[6, 1, 2]]
    await receiver.commit()
    assert digest.pieces == [[6, 1, 2], [7]]


async def test_it_finds_by_itself_what_has_come() -> None:
    room_data = await asyncio.to_thread(Arrived)
    receiver, digest = counted(room_data)
    row = (ctypes.c_ubyte * ROW_BYTES).from_address(room_data.rows.region.base)
    sealed = list(row)
    row[:] = [0] * ROW_BYTES
    assert not receiver.look()
    ours = MetadataBuffers(1)
    local = owned(ours)
    ours.set_mark(local, room_data.offer.slot.generation, len(OFFERED))
    mark = ours.mark_put(local, room_data.rows.region.base, 0)
    ctypes.memmove(int(mark.remote[0]), int(mark.local[0]), int(mark.lengths[0]))
    assert not receiver.look()
    await receiver.quiet()
    assert digest.pieces == [list(OFFERED)]
    row[:] = sealed
    assert receiver.look()
    assert (await receiver.commit()).first_token == SENT.first_token


@pytest.mark.parametrize("pages", [len(OFFERED) + 1, 2**63], ids=["one too many", "nonsense"])
async def test_a_mark_that_lies_harms_nobody(pages: int) -> None:
    room_data = await asyncio.to_thread(Arrived)
    receiver, _ = counted(room_data)
    room_data.rows.set_mark(room_data.offer.slot, room_data.offer.slot.generation, pages)
    assert receiver.look()
    with pytest.raises(DigestMismatch):
        await receiver.commit()


async def test_it_is_quiet_only_when_no_page_is_read_any_more() -> None:
    receiver, digest = counted(await asyncio.to_thread(Arrived))
    digest.go_on.clear()
    receiver.pages_complete(2)
    quiet = asyncio.ensure_future(receiver.quiet())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not quiet.done()
    digest.go_on.set()
    await quiet


async def test_a_report_that_comes_too_early_is_found_out() -> None:
    room_data = await asyncio.to_thread(Arrived)
    receiver, _ = counted(room_data)
    room_data.flip_page(0, 1)
    receiver.pages_complete(1)
    await receiver.quiet()
    room_data.flip_page(0, 1)
    with pytest.raises(DigestMismatch):
        await receiver.commit()


async def test_more_pages_than_were_offered_cannot_be_complete() -> None:
    receiver, digest = counted(await asyncio.to_thread(Arrived))
    with pytest.raises(PagesInvalid):
        receiver.pages_complete(len(OFFERED) + 1)
    assert digest.pieces == []


async def test_a_late_body_of_an_earlier_owner_under_this_owners_seal_is_found() -> None:
    """I6: the seal is right and the body is whole, but they do not belong together."""
    late, new = await asyncio.to_thread(Arrived), await asyncio.to_thread(Arrived)
    rows = new.rows
    old = HandoffMetadata(first_token=99, covered_tokens=PROMPT, digest=late.pool.digest_of(OFFERED))
    late.rows.set_buf(late.offer.slot, room(6), 1, old)
    ctypes.memmove(rows.region.base, late.rows.region.base, ROW_BYTES - 64)
    with pytest.raises(DigestMismatch):
        await new.receiver.commit()
