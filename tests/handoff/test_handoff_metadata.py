from __future__ import annotations

import ctypes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_common.errors import DigestMismatch, InternalError, MetadataInvalid
from pd_common.generation import MAX_TOP_LOGPROBS, TokenLogprob
from pd_common.handoff import metadata as layout
from pd_common.handoff.digest import digest_row
from pd_common.handoff.metadata import (
    METADATA_SCHEMA,
    ROW_BYTES,
    CachedTokens,
    HandoffMetadata,
    MetadataBuffers,
    Seal,
    Slot,
    check_seal,
)
from pd_common.transport.base import Puts
from tests.handoff.memory import owned, room

int32s = st.integers(-(2**31), 2**31 - 1)
doubles = st.floats(allow_nan=False)
logprobs = st.builds(
    TokenLogprob,
    int32s,
    doubles,
    st.lists(st.builds(TokenLogprob, int32s, doubles), max_size=MAX_TOP_LOGPROBS).map(tuple),
)
metadatas = st.builds(
    HandoffMetadata,
    first_token=int32s,
    covered_tokens=int32s,
    cached_tokens=st.builds(CachedTokens, *[int32s] * 7),
    logprob=st.none() | logprobs,
    digest=st.none() | st.binary(min_size=16, max_size=16),
)


def apply(puts: Puts) -> None:
    ctypes.memmove(int(puts.remote[0]), int(puts.local[0]), int(puts.lengths[0]))


def test_the_layout_of_schema_3_is_what_other_processes_know() -> None:
    """A change here is a new METADATA_SCHEMA."""
    fields = layout._ROW.fields
    assert fields is not None
    assert METADATA_SCHEMA == 3
    assert {name: field[1] for name, field in fields.items()} == {
        "schema": 0,
        "output_ids": 64,
        "chunks_done": 128,
        "cached_tokens": 192,
        "covered_tokens": 256,
        "output_token_logprobs_len": 320,
        "output_token_logprobs_val": 384,
        "output_token_logprobs_idx": 448,
        "output_top_logprobs_len": 512,
        "output_top_logprobs_val": 576,
        "output_top_logprobs_idx": 768,
        "digest_len": 896,
        "digest": 960,
        "mark": 1024,
        "row_digest": 1088,
        "seal": 1200,
    }
    assert ROW_BYTES == 1216


@given(metadatas, metadatas)
def test_a_row_gives_back_what_was_put_in_and_nothing_of_the_owner_before(
    before: HandoffMetadata, after: HandoffMetadata
) -> None:
    rows = MetadataBuffers(1)
    slot = owned(rows)
    rows.set_buf(slot, room(1), 1, before)
    rows.set_buf(slot, room(2**64 - 1), 5, after)
    assert rows.get_buf(slot) == after
    assert rows.get_seal(slot) == Seal(2**64 - 1, 5, after.covered_tokens)


def test_the_seal_goes_after_the_body() -> None:
    ours, theirs = MetadataBuffers(2), MetadataBuffers(3)
    local, remote = owned(ours), [owned(theirs) for _ in range(3)][2]
    expected = HandoffMetadata(first_token=5, covered_tokens=9)
    ours.set_buf(local, room(7), remote.generation, expected)
    body, seal = ours.row_puts(local, theirs.region.base, remote.index)
    assert body.total_bytes + seal.total_bytes == ROW_BYTES
    apply(body)
    assert theirs.get_seal(remote) == Seal(0, 0, 9)
    apply(seal)
    assert theirs.get_seal(remote) == Seal(7, remote.generation, 9)
    assert theirs.get_buf(remote) == expected


def test_a_mark_speaks_of_the_present_owners_pages_alone() -> None:
    ours, theirs = MetadataBuffers(1), MetadataBuffers(2)
    local, remote = owned(ours), [owned(theirs) for _ in range(2)][1]
    ours.set_mark(local, remote.generation, 5)
    mark = ours.mark_put(local, theirs.region.base, remote.index)
    assert (theirs.get_mark(remote), theirs.written_slots()) == (0, [])
    apply(mark)
    assert (theirs.get_mark(remote), theirs.written_slots()) == (5, [remote.index])
    theirs.free(remote)
    later = owned(theirs)
    assert (later.index, theirs.get_mark(later), theirs.written_slots()) == (remote.index, 0, [])
    apply(mark)  # comes too late
    assert theirs.get_mark(later) == 0


def test_the_body_wipes_the_mark() -> None:
    ours, theirs = MetadataBuffers(1), MetadataBuffers(1)
    local, remote = owned(ours), owned(theirs)
    ours.set_mark(local, remote.generation, 4)
    apply(ours.mark_put(local, theirs.region.base, remote.index))
    ours.set_buf(local, room(7), remote.generation, HandoffMetadata(first_token=5, covered_tokens=9))
    for put in ours.row_puts(local, theirs.region.base, remote.index):
        apply(put)
    assert theirs.get_mark(remote) == 0
    assert theirs.written_slots() == [remote.index]
    assert theirs.get_buf(remote).first_token == 5


@pytest.mark.parametrize(
    ("seal", "field"),
    [
        (Seal(0, 3, 10), "room"),
        (Seal(8, 3, 10), "room"),
        (Seal(7, 2, 10), "generation"),
        (Seal(7, 3, 9), "covered_tokens"),
    ],
)
def test_the_gate_names_what_differs(seal: Seal, field: str) -> None:
    with pytest.raises(MetadataInvalid) as caught:
        check_seal(seal, room=room(7), generation=3, prompt_tokens=10)
    assert caught.value.metadata["field"] == field


def test_the_gate_lets_the_right_row_pass() -> None:
    check_seal(Seal(7, 3, 10), room=room(7), generation=3, prompt_tokens=10)


def test_a_freed_row_is_nobodys_and_its_next_owner_has_a_new_generation() -> None:
    rows = MetadataBuffers(1)
    first = owned(rows)
    rows.set_buf(first, room(7), first.generation, HandoffMetadata(1, 1))
    assert rows.alloc() is None
    rows.free(first)
    second = owned(rows)
    assert second == Slot(first.index, first.generation + 1)
    assert rows.get_seal(second).room == 0


@pytest.mark.parametrize("slot", [Slot(0, 1), Slot(0, 3), Slot(1, 1), Slot(-1, 2)])
def test_only_the_present_owner_reaches_a_row(slot: Slot) -> None:
    rows = MetadataBuffers(2)
    rows.free(owned(rows))
    rows.free(owned(rows))
    assert owned(rows) == Slot(0, 2)
    for use in (
        rows.free,
        rows.get_seal,
        rows.get_buf,
        lambda slot: rows.set_buf(slot, room(1), 1, HandoffMetadata(1, 1)),
        lambda slot: rows.row_puts(slot, 0, 0),
    ):
        with pytest.raises(InternalError):
            use(slot)
    assert rows.free_slots == 1


@pytest.mark.parametrize(
    "metadata",
    [
        HandoffMetadata(1, 1, logprob=TokenLogprob(1, 0.0, (TokenLogprob(1, 0.0),) * (MAX_TOP_LOGPROBS + 1))),
        HandoffMetadata(1, 1, digest=b"short"),
    ],
)
def test_what_does_not_fit_is_refused_not_cut(metadata: HandoffMetadata) -> None:
    rows = MetadataBuffers(1)
    with pytest.raises(MetadataInvalid):
        rows.set_buf(owned(rows), room(1), 1, metadata)


@given(st.binary(min_size=ROW_BYTES, max_size=ROW_BYTES), st.booleans(), st.booleans())
def test_any_bytes_in_a_row_are_read_or_refused(data: bytes, right_schema: bool, right_digest: bool) -> None:
    """A sender may mean ill and make a right digest of an impossible row (I11)."""
    rows = MetadataBuffers(1)
    slot = owned(rows)
    data = METADATA_SCHEMA.to_bytes(4, "little") + data[4:] if right_schema else data
    if right_digest:
        data = data[:960] + digest_row(data[:960] + data[976:]) + data[976:]
    ctypes.memmove(rows.region.base, data, ROW_BYTES)
    rows.get_seal(slot)
    try:
        metadata = rows.get_buf(slot)
    except (MetadataInvalid, DigestMismatch):
        return
    assert right_digest
    assert metadata.logprob is None or len(metadata.logprob.top) <= MAX_TOP_LOGPROBS


def test_rows_begin_on_an_os_page() -> None:
    region = MetadataBuffers(3).region
    assert region.base % 4096 == 0
    assert region.length == 3 * ROW_BYTES
