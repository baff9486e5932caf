"""The metadata slot: one fixed row per request that tells decode where to go on, and the seal that says whose it is.

Owns the rows and their slots (I6). The row is packed, versioned and little-endian; each field but the seal begins on a
64-byte line. Before the row itself comes its mark: the pages are there.
"""

from __future__ import annotations

import mmap
from collections import deque
from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from pd_common.errors import DigestMismatch, InternalError, MetadataInvalid
from pd_common.generation import MAX_TOP_LOGPROBS, TokenLogprob
from pd_common.handoff.digest import DIGEST_BYTES, digest_row
from pd_common.transport.base import MemoryRegion, Puts
from pd_common.types import BootstrapRoom

METADATA_SCHEMA = 3

_LINE_BYTES = 64
_SEAL_BYTES = 16
_CACHED_COUNTERS = 7

# Everything up to the seal's line is the body; that line is written after it, and ends with the seal, so that nothing
# is written any more when the seal is there. `row_digest` is over all other bytes of the row, the seal and the padding
# too: nothing is sent that it does not cover, but for the mark, which the body wipes.
_BODY: tuple[tuple[str, str, int], ...] = (
    ("schema", "<u4", 1),
    ("output_ids", "<i4", 1),
    ("chunks_done", "<i4", 1),
    ("cached_tokens", "<i4", _CACHED_COUNTERS),
    ("covered_tokens", "<i4", 1),
    ("output_token_logprobs_len", "<i4", 1),
    ("output_token_logprobs_val", "<f8", 1),
    ("output_token_logprobs_idx", "<i4", 1),
    ("output_top_logprobs_len", "<i4", 1),
    ("output_top_logprobs_val", "<f8", MAX_TOP_LOGPROBS),
    ("output_top_logprobs_idx", "<i4", MAX_TOP_LOGPROBS),
    ("digest_len", "<i4", 1),
    ("digest", "u1", DIGEST_BYTES),
    ("mark", "<u8", 2),
    ("row_digest", "u1", DIGEST_BYTES),
)
_SEAL: tuple[tuple[str, str, int], ...] = (("seal", "<u8", 2),)


def _row_dtype() -> np.dtype[np.void]:
    offset = 0
    offsets = []
    for _, code, count in _BODY + _SEAL:
        offsets.append(offset)
        offset += -(-np.dtype(code).itemsize * count // _LINE_BYTES) * _LINE_BYTES
    offsets[-1] = offset - _SEAL_BYTES
    names = [name for name, _, _ in _BODY + _SEAL]
    formats = [(code, (count,)) for _, code, count in _BODY + _SEAL]
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": offset})


_ROW = _row_dtype()
ROW_BYTES = _ROW.itemsize
_SEAL_OFFSET = ROW_BYTES - _LINE_BYTES
_ROW_DIGEST_OFFSET = _SEAL_OFFSET - _LINE_BYTES
_MARK_OFFSET = _ROW_DIGEST_OFFSET - _LINE_BYTES


@dataclass(frozen=True, slots=True)
class Slot:
    """One owner's claim on one row: a reused index has a higher generation."""

    index: int
    generation: int


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Prompt tokens that prefill did not have to compute, by tier, and prompt tokens by medium; in row order."""

    total: int = 0
    device: int = 0
    host: int = 0
    storage: int = 0
    image: int = 0
    audio: int = 0
    video: int = 0


@dataclass(frozen=True, slots=True)
class HandoffMetadata:
    """What decode needs besides KV.

    `covered_tokens` is how many prompt tokens the pages hold KV for; `digest` is that of the pages; `chunks_done` is in
    how many sends they came. The sender adds the last two.
    """

    first_token: int
    covered_tokens: int
    cached_tokens: CachedTokens = CachedTokens()
    logprob: TokenLogprob | None = None
    digest: bytes | None = None
    chunks_done: int = 0


@dataclass(frozen=True, slots=True)
class Seal:
    """What the gate reads of a row: whose it is (room 0: nobody's) and how much of a prompt its pages cover."""

    room: int
    generation: int
    covered_tokens: int


def check_seal(seal: Seal, *, room: BootstrapRoom, generation: int, prompt_tokens: int) -> None:
    """The gate: this room AND this generation AND the whole prompt.

    Raises:
        MetadataInvalid: names the first thing that differs.

    """
    facts = (
        ("room", room, seal.room),
        ("generation", generation, seal.generation),
        ("covered_tokens", prompt_tokens, seal.covered_tokens),
    )
    for field, expected, got in facts:
        if expected != got:
            message = f"The metadata slot holds {field} {got}, not {expected}"
            raise MetadataInvalid(message, field=field, expected=expected, got=got)


class MetadataBuffers:
    """Rows in page-aligned host memory, zeroed at first. A slot whose owner has changed never reaches a row."""

    def __init__(self, num_slots: int) -> None:
        self._memory = mmap.mmap(-1, num_slots * ROW_BYTES)
        self._rows: NDArray[np.void] = np.frombuffer(self._memory, dtype=_ROW, count=num_slots)
        self._generations = [0] * num_slots
        self._live: set[Slot] = set()
        self._free = deque(range(num_slots))

    @property
    def region(self) -> MemoryRegion:
        """All rows, to be registered with the transport; row `i` lies at `base + i * ROW_BYTES`."""
        return MemoryRegion(self._rows.ctypes.data, self._rows.nbytes)

    @property
    def num_slots(self) -> int:
        """Rows in all."""
        return len(self._rows)

    @property
    def free_slots(self) -> int:
        """Rows without an owner."""
        return len(self._free)

    def alloc(self) -> Slot | None:
        """The row that has been free for longest, under a new generation; None when every row has an owner."""
        if not self._free:
            return None
        index = self._free.popleft()
        self._generations[index] += 1
        slot = Slot(index, self._generations[index])
        self._live.add(slot)
        return slot

    def free(self, slot: Slot) -> None:
        """Wipes seal and mark, then lets the index go. Nobody may write the row any more (I2)."""
        row = self._row(slot)
        row["seal"] = row["mark"] = 0
        self._live.remove(slot)
        self._free.append(slot.index)

    def set_buf(self, slot: Slot, room: BootstrapRoom, remote_generation: int, metadata: HandoffMetadata) -> None:
        """Fills the row as the remote slot of `room` is to hold it; nothing of an earlier owner is left.

        Raises:
            MetadataInvalid: more alternatives or another digest length than the row has room for.

        """
        logprob, digest = metadata.logprob, metadata.digest or b""
        if logprob is not None and len(logprob.top) > MAX_TOP_LOGPROBS:
            raise MetadataInvalid("Too many top logprobs for the row", limit=MAX_TOP_LOGPROBS, got=len(logprob.top))
        if len(digest) not in (0, DIGEST_BYTES):
            raise MetadataInvalid("The row has no room for this digest", expected=DIGEST_BYTES, got=len(digest))
        row = self._row(slot)
        row.fill(np.zeros((), dtype=_ROW)[()])
        row["schema"] = METADATA_SCHEMA
        row["output_ids"] = metadata.first_token
        row["cached_tokens"] = astuple(metadata.cached_tokens)
        row["covered_tokens"] = metadata.covered_tokens
        row["chunks_done"] = metadata.chunks_done
        row["digest_len"] = len(digest)
        row["digest"][: len(digest)] = np.frombuffer(digest, dtype=np.uint8)
        if logprob is not None:
            _set_logprob(row, logprob)
        row["seal"] = (room, remote_generation)
        row["row_digest"] = np.frombuffer(_digest_of(row), dtype=np.uint8)

    def set_mark(self, slot: Slot, remote_generation: int, pages: int) -> None:
        """Makes the mark that says that all `pages` of the remote slot's room are there."""
        self._row(slot)["mark"] = (remote_generation, pages)

    def get_mark(self, slot: Slot) -> int:
        """How many pages of the slot's room are there, if its mark has come; readable at any time."""
        generation, pages = self._row(slot)["mark"].tolist()
        return int(pages) if generation == slot.generation else 0

    def written_slots(self) -> list[int]:
        """Rows that have a mark or a seal, whoever's, by index; cheap enough to be asked for all the time."""
        written = self._rows["seal"][:, 0] | self._rows["mark"][:, 0]
        found: list[int] = written.nonzero()[0].tolist()
        return found

    def get_seal(self, slot: Slot) -> Seal:
        """Whose row it is; readable at any time."""
        row = self._row(slot)
        room, generation = row["seal"].tolist()
        return Seal(room, generation, int(row["covered_tokens"][0]))

    def get_buf(self, slot: Slot) -> HandoffMetadata:
        """The body, to be read after `check_seal` has passed.

        Raises:
            MetadataInvalid: another schema, or lengths that the row cannot have (I11).
            DigestMismatch: a byte of the row is not what was sent.

        """
        row: NDArray[np.void] = np.frombuffer(self._row(slot).tobytes(), dtype=_ROW).reshape(())
        schema, digest_len = int(row["schema"][0]), int(row["digest_len"][0])
        if schema != METADATA_SCHEMA:
            raise MetadataInvalid("The row has another schema", field="schema", expected=METADATA_SCHEMA, got=schema)
        _check_row_digest(row)
        if digest_len not in (0, DIGEST_BYTES):
            raise MetadataInvalid("The row has an impossible length", field="digest_len", got=digest_len)
        return HandoffMetadata(
            first_token=int(row["output_ids"][0]),
            covered_tokens=int(row["covered_tokens"][0]),
            cached_tokens=CachedTokens(*row["cached_tokens"].tolist()),
            logprob=_get_logprob(row),
            digest=row["digest"].tobytes() if digest_len else None,
            chunks_done=int(row["chunks_done"][0]),
        )

    def row_puts(self, local_slot: Slot, remote_base: int, remote_index: int) -> tuple[Puts, Puts]:
        """The writes of one row as (body, seal): the seal goes as a group of its own, visible after the body."""
        body = self._part_put(local_slot, remote_base, remote_index, 0, _SEAL_OFFSET)
        return body, self._part_put(local_slot, remote_base, remote_index, _SEAL_OFFSET, _LINE_BYTES)

    def mark_put(self, local_slot: Slot, remote_base: int, remote_index: int) -> Puts:
        """The write of the mark, to be visible after the pages that it speaks of."""
        return self._part_put(local_slot, remote_base, remote_index, _MARK_OFFSET, _LINE_BYTES)

    def _part_put(self, local_slot: Slot, remote_base: int, remote_index: int, offset: int, length: int) -> Puts:
        self._row(local_slot)  # only its owner writes from it
        local = self.region.base + local_slot.index * ROW_BYTES + offset
        remote = remote_base + remote_index * ROW_BYTES + offset
        return Puts(*(np.array([value], dtype=np.int64) for value in (local, remote, length)))

    def _row(self, slot: Slot) -> NDArray[np.void]:
        if slot not in self._live:
            raise InternalError("The slot has no owner or another one", index=slot.index, generation=slot.generation)
        return self._rows[slot.index : slot.index + 1].reshape(())


def _digest_of(row: NDArray[np.void]) -> bytes:
    """Over the row without the place of the digest itself."""
    data = row.tobytes()
    return digest_row(data[:_ROW_DIGEST_OFFSET] + data[_ROW_DIGEST_OFFSET + DIGEST_BYTES :])


def _check_row_digest(row: NDArray[np.void]) -> None:
    expected, got = row["row_digest"].tobytes(), _digest_of(row)
    if expected != got:
        message = "The metadata row that arrived is not the row that was sent"
        raise DigestMismatch(message, expected=expected.hex(), got=got.hex())


def _set_logprob(row: NDArray[np.void], logprob: TokenLogprob) -> None:
    row["output_token_logprobs_len"] = 1
    row["output_token_logprobs_val"] = logprob.logprob
    row["output_token_logprobs_idx"] = logprob.token_id
    row["output_top_logprobs_len"] = len(logprob.top)
    for place, top in enumerate(logprob.top):
        row["output_top_logprobs_idx"][place] = top.token_id
        row["output_top_logprobs_val"][place] = top.logprob


def _get_logprob(row: NDArray[np.void]) -> TokenLogprob | None:
    present, top_len = int(row["output_token_logprobs_len"][0]), int(row["output_top_logprobs_len"][0])
    if present not in (0, 1) or not 0 <= top_len <= MAX_TOP_LOGPROBS:
        raise MetadataInvalid("The row has an impossible length", field="output_top_logprobs_len", got=top_len)
    if not present:
        return None
    top_ids, top_values = row["output_top_logprobs_idx"][:top_len], row["output_top_logprobs_val"][:top_len]
    return TokenLogprob(
        token_id=int(row["output_token_logprobs_idx"][0]),
        logprob=float(row["output_token_logprobs_val"][0]),
        top=tuple(map(TokenLogprob, top_ids.tolist(), top_values.tolist())),
    )
