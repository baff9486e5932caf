"""What commands that look into a running system draw in the same way."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.rpc import status_pb2
from pd.v1 import transfer_status_pb2, types_pb2
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pd_common.control.status import from_status
from pd_common.inspection.views import ClusterView, ProcessView, RoomSide, RoomView, is_open
from pd_common.types import Role

STATES: dict[str, types_pb2.TransferState] = {
    "bootstrapping": types_pb2.TRANSFER_STATE_BOOTSTRAPPING,
    "waiting": types_pb2.TRANSFER_STATE_WAITING_FOR_INPUT,
    "transferring": types_pb2.TRANSFER_STATE_TRANSFERRING,
    "success": types_pb2.TRANSFER_STATE_SUCCESS,
    "failed": types_pb2.TRANSFER_STATE_FAILED,
}
"""States as a person reads and types them."""

COLOURS = {Role.ROUTER: "cyan", Role.PREFILL: "green", Role.DECODE: "magenta"}

_WORD_OF = {state: word for word, state in STATES.items()}
_STATE_COLOUR = {"success": "green", "failed": "red", "transferring": "cyan"}
_PIPED_COLUMNS = 140


def console() -> Console:
    """Where answers are printed: as wide as the terminal; a pipe gets no colours, and room for what it carries."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PIPED_COLUMNS
    return Console(highlight=False, width=width)


def table(*columns: str, right: Collection[str] = (), cut: Collection[str] = ()) -> Table:
    """Numbers stand to the `right`; where there is no place the ends of `cut` are left out, all else stays whole."""
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for name in columns:
        drawn.add_column(name, justify="right" if name in right else "left", no_wrap=name not in cut)
    return drawn


def short(text: str, style: str = "") -> Text:
    """A cell of a column that is `cut`."""
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def state_word(state: types_pb2.TransferState) -> str:
    return _WORD_OF.get(state, "?")


def state_text(state: types_pb2.TransferState) -> Text:
    """The state in its colour."""
    word = state_word(state)
    return Text(word, _STATE_COLOUR.get(word, "yellow"))


def failure_words(failure: status_pb2.Status) -> str:
    """The reason for a program, then the words for a person."""
    error = from_status(failure)
    return f"{error.reason.value}: {error.message}"


def count(number: int, thing: str) -> str:
    """As in 1 page, 2 pages."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def age(seconds: float) -> str:
    """In two or three characters and a unit."""
    for limit_s, divisor, unit in (100.0, 1.0, "s"), (6000.0, 60.0, "min"), (360_000.0, 3600.0, "h"):
        if seconds < limit_s:
            return f"{max(seconds, 0.0) / divisor:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def process_name(role: Role, address: str) -> Text:
    return Text(f"{role:<7} {address}", COLOURS[role])


def heading(view: RoomView) -> Iterator[Text]:
    """Which room, and the way that a router has sent it."""
    rid = next((side.transfer.rid for side in view.sides if side.transfer and side.transfer.rid), "")
    yield Text.assemble((f"room {view.number}", "bold"), f"  rid {rid}" if rid else "")
    for side in view.of_role(Role.ROUTER):
        for leg in side.legs:
            said = leg.root.attributes
            way = " > ".join(said[role] for role in (Role.PREFILL, Role.DECODE) if role in said)
            why = f", because {said['pd.route_reason']}" if "pd.route_reason" in said else ""
            line = process_name(side.role, side.address).append(f"  sent it to {way}{why}", "default")
            yield line.append(f"; it ended with {leg.root.failure}", "red") if leg.root.failure else line


def kept(side: RoomSide, held: transfer_status_pb2.QuarantinedRoom) -> str:
    """What a failed room keeps from reuse, and what is waited for."""
    return f"{side.role} {side.address} keeps {count(len(held.page_ids), 'page')} from reuse: {held.description}"


def answering(side: RoomSide) -> Text:
    """What becomes of the answer once decode has the KV: states do not say it."""
    if side.role is not Role.DECODE or side.transfer is None or side.transfer.state != STATES["success"]:
        return Text()
    failure = next((leg.root.failure for leg in side.legs if leg.root.failure), "")
    if failure:
        return Text(f"its answer ended with {failure}", "red")
    return Text("it writes the answer" if is_open(side) else "")


def silent(cluster: ClusterView) -> list[Text]:
    """A line for each process that does not answer."""
    return [Text(view.silence, "red") for view in cluster.processes if view.trouble is not None]


def as_json(message: Message | None) -> dict[str, Any] | None:
    """As grpcurl prints it: 64-bit numbers are strings."""
    return None if message is None else MessageToDict(message, preserving_proto_field_name=True)


def process_json(view: ProcessView) -> dict[str, Any]:
    """Where a process is and whether it answers."""
    trouble = None if view.trouble is None else {"reason": view.trouble.reason.value, "message": view.trouble.message}
    return {"address": view.address, "role": view.role.value, "trouble": trouble}
