"""pdctl watch: a line for each change of each room."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import aclosing
from datetime import datetime
from typing import Any

import click
from pd.v1 import types_pb2
from rich.console import Console
from rich.text import Text

from pd_common import config
from pd_common.cli import render
from pd_common.cli.connect import connect_options, inspect
from pd_common.inspection.inspector import Inspector
from pd_common.inspection.views import FINAL, ProcessView
from pd_common.planning.units import show_bytes


@click.command(context_settings=config.CONTEXT)
@connect_options
def watch(**connection: Any) -> None:
    """Print every change of every room as it happens.

    All prefills and decodes at once, from now on, until Ctrl-C. A process that is lost is tried again every second.
    """
    console = render.console()
    inspect(connection, lambda inspector: _watch(inspector, console))


async def _watch(inspector: Inspector, console: Console) -> None:
    (await inspector.cluster()).require_answers()
    news = _News()
    async with aclosing(inspector.watch()) as changes:
        async for view, transfer in changes:
            for time_ns, said in news.of(view, transfer):
                moment = datetime.fromtimestamp(time_ns / 1e9).astimezone()
                name = render.process_name(view.role, view.address)
                console.print(Text(f"{moment:%H:%M:%S.%f}"[:-3]), name, said, soft_wrap=True)


class _News:
    """Which steps of which room have been shown: a quick one takes several in one change."""

    def __init__(self) -> None:
        self._shown: dict[tuple[str, int], int] = {}

    def of(self, view: ProcessView, transfer: types_pb2.Transfer | None) -> Iterator[tuple[int, Text]]:
        """Lines with their times, in nanoseconds since 1970 by our clock."""
        if transfer is None:
            lost = Text(f"is lost: {view.why_silent}", "red")
            yield time.time_ns(), lost if view.trouble else Text("is watched from now on", "dim")
            return
        room = view.address, transfer.bootstrap_room
        shown = self._shown.get(room, 0)
        for step in (step for step in transfer.timeline if step.sequence > shown):
            yield view.ours_ns(step.time), _line(transfer, step)
        if transfer.chunks_done > transfer.timeline[-1].chunks_done:
            yield time.time_ns(), _line(transfer, transfer)
        self._shown[room] = transfer.sequence
        if transfer.state in FINAL:
            del self._shown[room]


def _line(transfer: types_pb2.Transfer, now: types_pb2.TransferTransition | types_pb2.Transfer) -> Text:
    done = ""
    if now.chunks_done:
        chunks, pages = render.count(now.chunks_done, "chunk"), render.count(now.pages_done, "page")
        done = f"  {chunks}, {pages}, {show_bytes(now.bytes_done)}"
    failed = now.state == types_pb2.TRANSFER_STATE_FAILED
    why = f"  {render.failure_words(transfer.failure)}" if failed else ""
    return Text.assemble(f"room {transfer.bootstrap_room}  ", render.state_text(now.state), done, (why, "red"))
