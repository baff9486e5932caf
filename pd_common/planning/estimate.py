"""What one handoff sends, worked out before anything runs: sends, pages, bytes, copies, and how many requests fit.

Arithmetic over counts alone; knows no pool, no channel and no clock. Where it follows the services, the tests hold
it to what they really do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pd_common.errors import InvalidRequest
from pd_common.planning.kv_shape import KvShape


@dataclass(frozen=True, slots=True)
class Cuts:
    """How prompts are cut: pages of `page_size` tokens, steps of at most `chunk_tokens` tokens.

    The last of several steps has at most `last_chunk_tokens`; None: as many as are left.
    """

    page_size: int
    chunk_tokens: int
    last_chunk_tokens: int | None = None

    def pages(self, tokens: int) -> int:
        """Pages that hold so many tokens, the last one perhaps not full."""
        return -(-tokens // self.page_size)

    def whole_pages(self, tokens: int) -> int:
        """Pages that so many tokens fill."""
        return tokens // self.page_size


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of `tokens` tokens, of which decode has the first `decode_hit` already and prefill `prefill_hit`.

    Only whole pages of a hit count, and prefill computes the last token in any case.

    Raises:
        InvalidRequest: no token, or a hit that is longer than the prompt.

    """

    tokens: int
    decode_hit: int = 0
    prefill_hit: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise InvalidRequest("a prompt has at least one token", field="tokens")
        for side, hit in ("decode", self.decode_hit), ("prefill", self.prefill_hit):
            if not 0 <= hit <= self.tokens:
                raise InvalidRequest(
                    f"{side} cannot have {hit:,} tokens of a prompt that has {self.tokens:,}", field=f"{side}_hit"
                )


def send_pages(prompt: Prompt, cuts: Cuts) -> tuple[int, ...]:
    """Pages of each send, in order; the last also carries the metadata row, and may have no page.

    Whole pages of a finished step are sent, a page that is begun waits for the next. What prefill had is sent first.
    """
    sent = cuts.whole_pages(prompt.decode_hit)
    pages = []
    for end in _step_ends(prompt, cuts):
        is_last = end == prompt.tokens
        complete = cuts.pages(end) if is_last else cuts.whole_pages(end)
        if complete > sent or is_last:
            pages.append(complete - sent)
            sent = complete
    return tuple(pages)


def _step_ends(prompt: Prompt, cuts: Cuts) -> Iterator[int]:
    """Tokens that are computed when prefill has looked into its cache, and after each step."""
    computed = min(cuts.whole_pages(prompt.prefill_hit), cuts.whole_pages(prompt.tokens - 1)) * cuts.page_size
    if computed:
        yield computed
    last_chunk = cuts.last_chunk_tokens or cuts.chunk_tokens
    while left := prompt.tokens - computed:
        step = min(left, cuts.chunk_tokens)
        if computed and last_chunk < left <= cuts.chunk_tokens:
            step = left - min(last_chunk, left // 2)
        computed += step
        yield computed


@dataclass(frozen=True, slots=True)
class Ranks:
    """Tensor-parallel ranks on both sides, each with its share of the KV heads of every token."""

    prefill: int = 1
    decode: int = 1

    @property
    def writers(self) -> int:
        """Pairs of a prefill rank and a decode rank between which anything is sent."""
        return max(self.prefill, self.decode)

    @property
    def slices_heads(self) -> bool:
        """The two sides keep different numbers of heads, so that no page of one is a page of the other."""
        return self.prefill != self.decode

    def check(self, kv_heads: int) -> None:
        """Raises InvalidRequest when the heads do not divide evenly, or the ranks do not pair."""
        for side, ranks in ("prefill", self.prefill), ("decode", self.decode):
            if kv_heads % ranks:
                raise InvalidRequest(
                    f"{kv_heads} KV heads cannot be shared out among {ranks} {side} ranks; how engines copy heads "
                    f"then is not worked out here: give a --{side}-tp that divides {kv_heads}",
                    field=f"{side}_tp",
                )
        if self.writers % min(self.prefill, self.decode):
            raise InvalidRequest(
                f"{self.prefill} prefill ranks do not pair with {self.decode} decode ranks: one of --prefill-tp and "
                "--decode-tp must be a multiple of the other",
                field="decode_tp",
            )


@dataclass(frozen=True, slots=True)
class Copies:
    """How often somebody writes one stretch of memory, and the bytes of the largest one."""

    count: int
    largest_bytes: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """One handoff. Bytes are those of whole pages: the unused end of the last page travels too."""

    shape: KvShape
    cuts: Cuts
    prompt: Prompt
    ranks: Ranks
    send_pages: tuple[int, ...]

    @classmethod
    def of(cls, shape: KvShape, cuts: Cuts, prompt: Prompt, ranks: Ranks) -> Estimate:
        """Raises InvalidRequest when the heads do not divide among the ranks."""
        ranks.check(shape.kv_heads)
        return cls(shape, cuts, prompt, ranks, send_pages(prompt, cuts))

    @property
    def item_bytes(self) -> int:
        """One page of the keys, or of the values, of one layer, over all ranks."""
        return self.shape.item_bytes(self.cuts.page_size)

    @property
    def page_bytes(self) -> int:
        """One page of all layers, over all ranks (B_page)."""
        return self.shape.page_bytes(self.cuts.page_size)

    @property
    def pages(self) -> int:
        """Pages that are sent."""
        return sum(self.send_pages)

    @property
    def bytes(self) -> int:
        """Bytes of them; the metadata row comes on top."""
        return self.pages * self.page_bytes

    @property
    def last_bytes(self) -> int:
        """Bytes of the pages of the last send, while which nothing is left to compute."""
        return self.send_pages[-1] * self.page_bytes

    def copies(self, buffers: int, *, contiguous: bool) -> Copies:
        """For pools whose pages lie in so many buffers, with page ids that step by one on both sides or nowhere."""
        if self.ranks.slices_heads:
            # The heads of one token that both ranks have lie together; those of the next are one stride away.
            heads = self.shape.kv_heads // self.ranks.writers
            tokens = self.pages * self.cuts.page_size
            count = tokens * self.shape.planes * self.ranks.writers
            return Copies(count, heads * self.shape.head_bytes if count else 0)
        runs = sum(pages > 0 for pages in self.send_pages) if contiguous else self.pages
        longest = max(self.send_pages) if contiguous else min(self.pages, 1)
        share = buffers * self.ranks.writers
        return Copies(runs * share, longest * self.page_bytes // share)

    def pages_in(self, rank_memory_bytes: int) -> int:
        """Pages of a pool that takes so much memory on each decode rank."""
        return rank_memory_bytes * self.ranks.decode // self.page_bytes

    def pages_held(self, output_tokens: int) -> int:
        """Pages that a request holds at its end; nobody needs the KV of an answer's last token."""
        return self.cuts.pages(self.prompt.tokens + output_tokens - 1)
