"""A room's spans as a person reads them: a waterfall over the three processes, and what the transfer came to."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pd_common.telemetry.collector import RecordedSpan
from pd_common.telemetry.spans import SpanName

_BAR = 20

_WHAT: dict[str, str] = {
    SpanName.ROUTE: "whole request",
    SpanName.RECEIVE: "read the request",
    SpanName.DISPATCH: "sent to both sides",
    SpanName.FIRST_TOKEN_WAIT: "wait for the first token",
    SpanName.STREAM: "pass the answer on",
    SpanName.DECODE: "decode's part",
    SpanName.PEERING: "find and pair with prefill",
    SpanName.PREALLOC_WAIT: "wait for memory",
    SpanName.ALLOCATE: "set pages aside, offer them",
    SpanName.TRANSFER_WAIT: "wait for prefill's KV",
    SpanName.GATE: "check slot and digest",
    SpanName.FIRST_TOKEN: "first token out",
    SpanName.DECODE_STEPS: "write the rest",
    SpanName.PROMPT_COMPUTE: "compute the prompt alone",
    SpanName.RESTORE: "bring lost pages back",
    SpanName.REFETCH: "lost pages, by way of prefill",
    SpanName.PREFILL: "prefill's part",
    SpanName.BOOTSTRAP_WAIT: "wait for decode's pages",
    SpanName.COMPUTE_WAIT: "queue and compute",
    SpanName.CHUNK_COMPUTE: "compute chunk",
    SpanName.CHUNK_TRANSFER: "write chunk",
    SpanName.COMMIT: "last write and commit",
    SpanName.ABORT: "come to rest",
    SpanName.QUARANTINE: "pages in quarantine",
}

_COLOUR = {"pd-router": "cyan", "pd-prefill": "green", "pd-decode": "magenta"}

EXPECTED = frozenset({SpanName.ROUTE, SpanName.PREFILL, SpanName.DECODE})
"""When these have ended, the room's trace is complete."""


def show(spans: Sequence[RecordedSpan], console: Console) -> None:
    """Prints the waterfall and the summary."""
    begin, end = min(span.start_ns for span in spans), max(span.end_ns for span in spans)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("process", min_width=7)
    table.add_column("stage", min_width=27)
    table.add_column("at ms", justify="right", min_width=7)
    table.add_column("took ms", justify="right", min_width=7)
    table.add_column("", min_width=_BAR)
    table.add_column("")
    for span in sorted(spans, key=lambda s: (s.start_ns, -s.end_ns)):
        colour = _COLOUR.get(span.service, "white")
        table.add_row(
            Text(span.service.removeprefix("pd-"), style=colour),
            _WHAT.get(span.name, span.name),
            f"{(span.start_ns - begin) / 1e6:.1f}",
            f"{span.milliseconds:.1f}",
            _bar(span, begin, end, colour),
            _details(span),
        )
    console.print(table, _summary(spans))


def _bar(span: RecordedSpan, begin: int, end: int, colour: str) -> Text:
    scale = _BAR / max(end - begin, 1)
    first = min(int((span.start_ns - begin) * scale), _BAR - 1)
    length = max(round((span.end_ns - span.start_ns) * scale), 1)
    return Text(" " * first + "━" * min(length, _BAR - first), style="red" if span.failed else colour)


def _details(span: RecordedSpan) -> str:
    a = span.attributes
    match span.name:
        case SpanName.CHUNK_COMPUTE:
            return f"{a['tokens']} tokens, to {a['end']}"
        case SpanName.CHUNK_TRANSFER:
            size, puts = float(a["bytes"]) / 1e6, "1 PUT" if a["descriptors"] == 1 else f"{a['descriptors']} PUTs"
            return f"{a['pages']} pages, {puts}, {size:.2f} MB, {a['gb_per_s']:.2f} GB/s"
        case SpanName.ALLOCATE:
            return f"{a['pages']} pages for the prompt, {a['cached_pages']} of them there already"
        case SpanName.DECODE_STEPS:
            return f"{a.get('tokens', '?')} tokens"
        case SpanName.ROUTE:
            return f"first token after {a.get('ttft_ms', 0):.1f} ms"
        case _:
            return str(a.get("error.type") or a.get("pd.waited_for", ""))


def _summary(spans: Sequence[RecordedSpan]) -> Text:
    writes = [span for span in spans if span.name == SpanName.CHUNK_TRANSFER]
    if not writes:
        return Text("nothing was transferred", style="red")
    pages = sum(int(span.attributes["pages"]) for span in writes)
    size = sum(int(span.attributes["bytes"]) for span in writes)
    seconds = sum(
        int(span.attributes["bytes"]) / 1e9 / max(float(span.attributes["gb_per_s"]), 1e-9) for span in writes
    )
    carriers = ", ".join(sorted({str(span.attributes["carrier"]) for span in writes}))
    trace = spans[0].trace_id
    return Text(
        f"KV handed over: {pages} pages, {size / 1e6:.2f} MB in {len(writes)} chunks, "
        f"{size / seconds / 1e9:.2f} GB/s while writing, carried by {carriers}\ntrace {trace}"
    )
