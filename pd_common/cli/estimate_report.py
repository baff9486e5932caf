"""An estimate as a person reads it, and as a program does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from pd_common.handoff.metadata import ROW_BYTES
from pd_common.planning.estimate import Copies, Estimate
from pd_common.planning.units import show_bytes, show_seconds


@dataclass(frozen=True, slots=True)
class Memory:
    """A pool of decode, and how long the answers are."""

    num_pages: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Report:
    """One handoff; the speed of the link and decode's pool only if somebody asked about them."""

    handoff: Estimate
    bytes_per_s: float | None
    memory: Memory | None

    def as_json(self) -> dict[str, Any]:
        """Sizes in bytes, times in seconds; None where nobody asked."""
        handoff = self.handoff
        return {
            "model": asdict(handoff.shape),
            "prompt": asdict(handoff.prompt),
            "cuts": asdict(handoff.cuts),
            "ranks": asdict(handoff.ranks),
            "item_bytes": handoff.item_bytes,
            "page_bytes": handoff.page_bytes,
            "prompt_pages": handoff.cuts.pages(handoff.prompt.tokens),
            "sends": len(handoff.send_pages),
            "send_pages": handoff.send_pages,
            "pages": handoff.pages,
            "pages_bytes": handoff.bytes,
            "metadata_bytes": ROW_BYTES,
            "total_bytes": handoff.bytes + ROW_BYTES,
            "copies": [_copies_json(handoff, buffers) for buffers in _buffers(handoff).values()],
            "link": None if self.bytes_per_s is None else _link_json(handoff, self.bytes_per_s),
            "decode": None if self.memory is None else _memory_json(handoff, self.memory),
        }

    def show(self, console: Console) -> None:
        """Prints the tables, and below them what else was asked for."""
        console.print(_page_table(self.handoff))
        console.print(_sends_table(self.handoff, self.bytes_per_s))
        console.print(_copies_table(self.handoff))
        if self.memory is not None:
            console.print(_memory_table(self.handoff, self.memory))
        for note in _notes(self):
            console.print(note)


def _buffers(handoff: Estimate) -> dict[str, int]:
    """Buffers in which a pool keeps its pages: here, and in most other engines."""
    return {"this project's": 1, "K and V per layer": handoff.shape.planes}


# --- for programs ---


def _copies_json(handoff: Estimate, buffers: int) -> dict[str, Any]:
    return {
        "buffers": buffers,
        "contiguous": asdict(handoff.copies(buffers, contiguous=True)),
        "scattered": asdict(handoff.copies(buffers, contiguous=False)),
    }


def _link_json(handoff: Estimate, bytes_per_s: float) -> dict[str, float]:
    return {
        "bytes_per_s": bytes_per_s,
        "total_s": (handoff.bytes + ROW_BYTES) / bytes_per_s,
        "last_send_s": (handoff.last_bytes + ROW_BYTES) / bytes_per_s,
    }


def _memory_json(handoff: Estimate, memory: Memory) -> dict[str, int]:
    pages = handoff.pages_held(memory.output_tokens)
    return asdict(memory) | {"pages_per_request": pages, "requests": memory.num_pages // pages}


# --- for people ---


def _page_table(handoff: Estimate) -> Table:
    shape = handoff.shape
    table = _table(f"one page of {handoff.cuts.page_size:,} tokens", ("", ""), ("",))
    table.show_header = False
    one = f"{shape.kv_heads} KV heads x {shape.head_dim} x {shape.dtype}"
    table.add_row("K, or V, of one layer", one, show_bytes(handoff.item_bytes))
    table.add_row("all layers", f"K and V x {shape.layers} layers", show_bytes(handoff.page_bytes))
    return table


def _sends_table(handoff: Estimate, bytes_per_s: float | None) -> Table:
    prompt, cuts = handoff.prompt, handoff.cuts
    there = cuts.whole_pages(prompt.decode_hit)
    title = f"sends of a prompt of {prompt.tokens:,} tokens, {cuts.pages(prompt.tokens):,} pages"
    numbers = ("pages", "size", *(() if bytes_per_s is None else (f"at {bytes_per_s / 1e9:,.4g} GB/s",)))
    table = _table(f"{title}, {there:,} of them there already" if there else title, ("send",), numbers)
    for name, pages in _groups(handoff.send_pages).items():
        sizes = [each * handoff.page_bytes for each in pages]
        times = () if bytes_per_s is None else (_span([show_seconds(size / bytes_per_s) for size in sizes]),)
        table.add_row(name, _span([f"{each:,}" for each in pages]), _span([show_bytes(size) for size in sizes]), *times)
    times = () if bytes_per_s is None else (show_seconds(ROW_BYTES / bytes_per_s),)
    table.add_row("metadata row, with the last", "", f"{ROW_BYTES:,} B", *times)
    return table


def _groups(send_pages: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Least and most pages of the sends before the last, if there are any; then the last, then all."""
    *before, last = send_pages
    groups: dict[str, tuple[int, ...]] = {}
    if before:
        name = f"1 to {len(before):,}, each" if len(before) > 1 else "1"
        groups[name] = (min(before), max(before))
    return groups | {f"{len(send_pages):,}, the last": (last,), "all pages": (sum(send_pages),)}


def _span(values: Sequence[str]) -> str:
    return " to ".join(dict.fromkeys(values))


def _copies_table(handoff: Estimate) -> Table:
    numbers = ("buffers", "contiguous", "largest", "scattered", "each")
    table = _table("copies, if pages are contiguous on both sides or scattered", ("pool",), numbers)
    for name, buffers in _buffers(handoff).items():
        contiguous, scattered = (handoff.copies(buffers, contiguous=each) for each in (True, False))
        table.add_row(name, f"{buffers:,}", *_cells(contiguous), *_cells(scattered))
    return table


def _cells(copies: Copies) -> tuple[str, str]:
    return f"{copies.count:,}", show_bytes(copies.largest_bytes)


def _memory_table(handoff: Estimate, memory: Memory) -> Table:
    pages = handoff.pages_held(memory.output_tokens)
    title = f"requests that fit on decode, {memory.output_tokens:,} output tokens each"
    table = _table(title, (), ("pages", "of one at its end", "requests at a time"))
    table.add_row(f"{memory.num_pages:,}", f"{pages:,}", f"{memory.num_pages // pages:,}")
    return table


def _notes(report: Report) -> list[str]:
    handoff, ranks, notes = report.handoff, report.handoff.ranks, []
    if report.bytes_per_s is not None:
        notes.append(
            "While the last send travels nothing is left to compute: its time shows, that of the others may not."
        )
    if ranks.writers > 1:
        how = "the heads of every token go alone" if ranks.slices_heads else "each rank writes its share of a page"
        notes.append(
            f"Prefill TP {ranks.prefill}, decode TP {ranks.decode}: {how}. Sizes of pages and sends are those of all "
            "ranks together. This is for other engines: pd-prefill and pd-decode have TP 1 only."
        )
    if len(handoff.send_pages) > 1 and handoff.cuts.last_chunk_tokens is None:
        notes.append("A plain cut; pd-prefill may cut its last step shorter: give its --last-chunk-tokens as well.")
    return notes


def _table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        min_width=len(title),
    )
    for name in words:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table
