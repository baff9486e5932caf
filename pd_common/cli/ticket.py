"""pdctl ticket: the ticket of one room, for a person who calls a process with grpcurl."""

from __future__ import annotations

import base64
import time
from pathlib import Path

import click

from pd_common.control.tickets import TicketKeys
from pd_common.errors import InvalidRequest
from pd_common.types import BootstrapRoom


@click.command()
@click.argument("room", type=click.IntRange(1, 2**64 - 1))
@click.option(
    "--ticket-key-file", required=True, type=click.Path(path_type=Path), envvar="PD_TICKET_KEY_FILE",
    help="The file that the processes have.",
)  # fmt: skip
@click.option("--for", "seconds", default=600.0, type=click.FloatRange(min=1), help="Seconds until it is over.")
def ticket(room: int, ticket_key_file: Path, seconds: float) -> None:
    """Print the ticket of ROOM in base64, as grpcurl wants bytes.

    \b
    TICKET=$(pdctl ticket 42 --ticket-key-file keys)
    REQUEST='{"bootstrap_room": "42", "ticket": "'$TICKET'"}'
    grpcurl -plaintext -d "$REQUEST" HOST:8998 pd.v1.Abort/AbortRoom
    """  # noqa: D301  click's mark for lines that stay as they are
    try:
        keys = TicketKeys.read(ticket_key_file)
    except InvalidRequest as error:
        raise click.ClickException(error.message) from error
    click.echo(base64.b64encode(keys.sign(BootstrapRoom(room), time.time() + seconds)).decode())
