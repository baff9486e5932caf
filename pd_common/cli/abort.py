"""pdctl abort: ends one room, and says what it was and what is left of it."""

from __future__ import annotations

import base64
import binascii
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from pd_common import config
from pd_common.cli import render
from pd_common.cli.connect import ROOM, connect_options, inspect
from pd_common.control.tickets import TicketKeys
from pd_common.errors import InvalidRequest, PermissionDenied
from pd_common.inspection.inspector import Inspector
from pd_common.inspection.views import RoomView, held_by, is_open
from pd_common.types import BootstrapRoom

_TICKET_S = 600


@click.command(context_settings=config.CONTEXT)
@click.argument("number", metavar="ROOM", type=ROOM)
@connect_options
@click.option("--message", default="aborted by hand", help="Why, for the client and for whoever looks at the room.")
@click.option("--ticket", help="The room's ticket in base64, as `pdctl ticket` prints it.  [default: none]")
@click.option(
    "--ticket-key-file",
    type=click.Path(path_type=Path),
    help="Keys of the processes: signs a ticket for this room.  [default: none]",
)
def abort(*, number: int, message: str, ticket: str | None, ticket_key_file: Path | None, **connection: Any) -> None:
    """End one room on all sides.

    At the router if it is open there, which needs no ticket; else at prefill and decode, which need one where the
    processes share keys. It returns when nothing of the room will be written any more: exit code 0, else 1.
    """
    room, console = BootstrapRoom(number), render.console()
    signed = _ticket(room, ticket, ticket_key_file)

    async def ended(inspector: Inspector) -> RoomView:
        before = await inspector.room(room)
        _show(before, console, "found at")
        try:
            return await inspector.abort(room, message, signed)
        except PermissionDenied as error:
            raise click.ClickException(f"{error.message}; give --ticket-key-file or --ticket") from error

    after = inspect(connection, ended)
    _show(after, console, "now at")
    if not _is_quiet(after, console):
        raise click.exceptions.Exit(1)


def _ticket(room: BootstrapRoom, given: str | None, keys: Path | None) -> bytes:
    if given is not None and keys is not None:
        raise click.UsageError("--ticket and --ticket-key-file say the same: give one of them")
    try:
        if keys is not None:
            return TicketKeys.read(keys).sign(room, time.time() + _TICKET_S)
        return base64.b64decode(given or "", validate=True)
    except binascii.Error as error:
        raise click.UsageError("--ticket is not base64, as `pdctl ticket` prints it") from error
    except InvalidRequest as error:
        raise click.UsageError(error.message) from error


def _show(view: RoomView, console: Console, where: str) -> None:
    for side in view.sides:
        line = Text.assemble(f"{where:<9}", render.process_name(side.role, side.address), "  ")
        if side.transfer is not None:
            answer = render.answering(side)
            line.append_text(render.state_text(side.transfer.state)).append("; " if answer else "").append_text(answer)
            if side.transfer.HasField("failure"):
                line.append(f": {render.failure_words(side.transfer.failure)}", "red")
        else:
            line.append("open" if is_open(side) else "over")
        console.print(line)


def _is_quiet(view: RoomView, console: Console) -> bool:
    """Says what is left, too."""
    running = [side for side in view.sides if is_open(side)]
    for side in running:
        console.print(Text(f"{side.role} {side.address} has not ended it", "red"))
    kept = [(side, held) for side in view.sides if (held := held_by(view, side)) is not None]
    for side, held in kept:
        console.print(Text(render.kept(side, held), "yellow"))
    for line in render.silent(view.cluster):
        console.print(line)
    if not running and not kept:
        console.print(f"room {view.number} is quiet: nothing of it is written any more")
    return not running and not kept
