"""pdctl try: one prompt through the router, and what both sides say of its room afterwards."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import click
from pd.v1 import generation_pb2, generation_pb2_grpc
from rich.console import Console
from rich.text import Text

from pd_common import config
from pd_common.cli import render
from pd_common.cli.certificate import certificate_options
from pd_common.cli.connect import USUAL_ROUTER, dial_of, run
from pd_common.control import convert, convert_generation
from pd_common.control.connection import Connection, Dial
from pd_common.errors import DeadlineExceeded, InternalError
from pd_common.generation import Usage
from pd_common.inspection.inspector import Inspector
from pd_common.inspection.views import RoomSide, RoomView
from pd_common.planning.units import show_bytes
from pd_common.types import BootstrapAddress, BootstrapRoom, Role

_PROMPT = "To be, or not to be, that is the question:"


@dataclass(frozen=True, slots=True)
class Trial:
    """What is asked. `rid` is its name on every process."""

    prompt: str
    max_new_tokens: int
    timeout_s: float
    rid: str


@dataclass(frozen=True, slots=True)
class Tried:
    """A whole answer, and its room when all sides have ended it."""

    usage: Usage
    room: RoomView


@click.command("try", context_settings=config.CONTEXT)
@click.argument("prompt", default=_PROMPT)
@click.option("--router", type=config.ADDRESS, default=USUAL_ROUTER.target, help="gRPC address of the router.")
@click.option("--max-new-tokens", default=16, type=click.IntRange(min=1), help="Most tokens of the answer.")
@click.option(
    "--timeout", "timeout_s", default=60.0, type=click.FloatRange(min=0, min_open=True), help="Seconds for all of it."
)
@certificate_options
def try_prompt(
    *, prompt: str, router: BootstrapAddress, max_new_tokens: int, timeout_s: float, **certificate: Any
) -> None:
    """Send one prompt through the router, and see what became of its room.

    Prints the answer as it comes, then the room as prefill and decode have it on record. Exit code 0 when the answer is
    whole and every side that the router has sent it to says success, else 1.
    """
    trial = Trial(prompt, max_new_tokens, timeout_s, f"try-{uuid.uuid4().hex[:8]}")
    tried = run(_within(trial, router.target, dial_of(certificate)))
    troubles = show(trial, tried, render.console())
    if troubles:
        raise click.ClickException("\n".join(troubles))


def show(trial: Trial, tried: Tried, console: Console) -> list[str]:
    """Prints it for a person; gives what is not as it should be."""
    view, usage = tried.room, tried.usage
    console.print(
        Text(f"room {view.number}", "bold"),
        Text(
            f" rid {trial.rid}  {render.count(usage.prompt_tokens, 'prompt token')}, "
            f"{render.count(usage.completion_tokens, 'answer token')}"
        ),
    )
    for side in view.sides:
        if side.role is not Role.ROUTER:
            console.print(_line(side))
    for line in render.silent(view.cluster):
        console.print(line)
    way = _way(view)
    if way and Role.PREFILL not in way:
        console.print("no prefill had to do with it: decode has computed the prompt itself")
    return list(_troubles(view, way))


def _way(view: RoomView) -> dict[Role, str]:
    """Where the router says that it has sent the room."""
    said = [leg.root.attributes for side in view.of_role(Role.ROUTER) for leg in side.legs]
    return {role: each[role] for each in said for role in (Role.PREFILL, Role.DECODE) if role in each}


def _line(side: RoomSide) -> Text:
    line = render.process_name(side.role, side.address).append("  ", "default")
    if side.transfer is None:
        return line.append("has forgotten its states", "red")
    line.append_text(render.state_text(side.transfer.state))
    if side.transfer.pages_done:
        line.append(f"  {render.count(side.transfer.pages_done, 'page')}, {show_bytes(side.transfer.bytes_done)}")
    return line


def _troubles(view: RoomView, way: dict[Role, str]) -> Iterator[str]:
    if Role.DECODE not in way:
        yield f"no router says where it has sent room {view.number}"
    for role, address in way.items():
        states = [side.transfer.state for side in view.of_role(role) if side.transfer is not None]
        if not states:
            yield f"{role} {address} does not say what became of room {view.number}"
    for side in view.sides:
        transfer = side.transfer
        if transfer is None or transfer.state == render.STATES["success"]:
            continue
        why = f": {render.failure_words(transfer.failure)}" if transfer.HasField("failure") else ""
        yield f"room {view.number} is {render.state_word(transfer.state)} on {side.role} {side.address}{why}"


async def _within(trial: Trial, router: str, dial: Dial) -> Tried:
    try:
        async with asyncio.timeout(trial.timeout_s):
            return await _tried(trial, router, dial)
    except TimeoutError as error:
        raise DeadlineExceeded(f"{trial.rid} was not over within {trial.timeout_s:g} s") from error


async def _tried(trial: Trial, router: str, dial: Dial) -> Tried:
    inspector = Inspector([(router, Role.ROUTER)], dial)
    connection = dial(router, Role.ROUTER)
    try:
        room, usage = await _answer(trial, connection)
        return Tried(usage, await inspector.ended(room))
    finally:
        await connection.close()
        await inspector.close()


async def _answer(trial: Trial, connection: Connection) -> tuple[BootstrapRoom, Usage]:
    """Prints it as it comes."""
    stub: Any = generation_pb2_grpc.GenerationStub(connection.channel)
    request = generation_pb2.GenerateRequest(
        rid=trial.rid,
        text=trial.prompt,
        sampling_params=generation_pb2.SamplingParams(max_new_tokens=trial.max_new_tokens, temperature=0.0),
        timeout=convert.duration_to(trial.timeout_s),
    )
    try:
        async with aclosing(connection.stream(stub.Generate, request)) as pieces:
            async for piece in pieces:
                output = convert_generation.output_from(piece.output)
                click.echo(output.text, nl=False)
                if output.finish is not None and output.usage is not None:
                    return output.room, output.usage
    finally:
        click.echo()
    raise InternalError(f"the answer to {trial.rid} stopped without a finish reason")
