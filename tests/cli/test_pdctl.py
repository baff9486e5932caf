"""pdctl as a person types it, against scripted processes: what it prints, and what it ends with."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from rich.console import Console, RenderableType

from pd_common.cli import room as room_command
from pd_common.cli import topology as topology_command
from pd_common.cli import trace as trace_command
from pd_common.cli.main import COMMANDS, main
from pd_common.cli.rooms import drawn
from pd_common.control import tickets
from pd_common.errors import DigestMismatch
from pd_common.inspection.inspector import Inspector
from pd_common.inspection.listing import list_rooms
from pd_common.inspection.process_client import RoomFilter
from pd_common.telemetry.spans import SpanName
from pd_common.types import MAX_ROOM, Role
from tests.cli.pdctl_runs import Ended, run_pdctl, start_pdctl
from tests.control.serving import LAYOUT
from tests.inspection.scripted_system import ScriptedProcess, ScriptedSystem


@pytest.fixture
async def system() -> ScriptedSystem:
    return ScriptedSystem()


@pytest.fixture(autouse=True)
async def inspector(system: ScriptedSystem) -> AsyncIterator[Inspector]:
    async with system.running() as inspector:
        yield inspector


def shown(drawn: RenderableType, columns: int) -> list[str]:
    """Its lines; none is longer than the terminal is wide."""
    console = Console(file=StringIO(), width=columns, highlight=False)
    console.print(drawn)
    return lines_of(console, columns)


def drawn_by(show: Callable[[Any, Console], None], view: Any, columns: int) -> list[str]:
    """As `shown`, of a command that prints by itself."""
    console = Console(file=StringIO(), width=columns, highlight=False)
    show(view, console)
    return lines_of(console, columns)


def lines_of(console: Console, columns: int) -> list[str]:
    assert isinstance(console.file, StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert max(map(len, lines)) <= columns
    return lines


def told(system: ScriptedSystem, columns: int) -> dict[str, str]:
    return {"PD_ROUTER": system.router.address, "COLUMNS": str(columns)}


async def pdctl(system: ScriptedSystem, *words: str, columns: int = 120) -> Ended:
    return await run_pdctl(told(system, columns), *words)


# --- the command itself ---


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['pdctl', '--help']\nfrom pd_common.cli.main import main\n"
        "try: main()\nexcept SystemExit: pass\nprint('LOADED', *sorted(sys.modules))"
    )
    ran = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True)
    loaded = ran.stdout.partition("LOADED")[2].split()
    assert not {"torch", "transformers", "grpc", "numpy", "rich"} & set(loaded)
    assert all(name in ran.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_what_help_says_of_a_command_is_what_the_command_says(name: str) -> None:
    command = COMMANDS[name].load(name)
    assert command.get_short_help_str(limit=200) == COMMANDS[name].help
    assert main.get_command(click.Context(main), name) is command


def test_a_command_that_is_not_there_is_a_usage_error() -> None:
    ended = CliRunner().invoke(main, ["romms"])
    assert (ended.exit_code, "No such command 'romms'" in ended.output) == (2, True)


@pytest.mark.parametrize("room", ["0", str(MAX_ROOM + 1), "-1", "x"])
@pytest.mark.parametrize("command", ["room", "trace", "abort"])
def test_what_is_no_room_number_is_a_usage_error(command: str, room: str) -> None:
    assert CliRunner().invoke(main, [command, "--", room]).exit_code == 2


async def test_an_unknown_room_is_one_line_that_says_where_it_was_looked_for(system: ScriptedSystem) -> None:
    for ended in await asyncio.gather(*(pdctl(system, command, "7") for command in ("room", "abort"))):
        assert (ended.code, ended.out) == (1, "")
        assert ended.err.startswith(f"Error: room 7 is not on record at router {system.router.address}, prefill ")
        assert "--room-retention" in ended.err
        assert ended.err.count("\n") == 1


async def test_nobody_there_is_said_and_is_no_traceback(system: ScriptedSystem) -> None:
    commands = (("rooms",), ("watch",), ("abort", "7"))
    for ended in await asyncio.gather(*(pdctl(system, *words, "--router", "127.0.0.1:1") for words in commands)):
        assert (ended.code, ended.out) == (1, "")
        assert ended.err == (
            "Error: router 127.0.0.1:1 does not answer: Failed to connect to remote host: Connection refused\n"
            "Is it running, and is that its gRPC address?\n"
        )


# --- what is drawn ---


@pytest.mark.parametrize("columns", [80, 120])
async def test_rooms_are_a_line_each_with_both_states(
    system: ScriptedSystem, inspector: Inspector, columns: int
) -> None:
    room = system.prefill.open(MAX_ROOM, peer=system.decode)
    system.decode.open(MAX_ROOM, peer=system.prefill)
    system.prefill.succeed(room)
    system.decode.fail(room, DigestMismatch("other bytes", room=room))
    listing = await list_rooms(inspector, await inspector.cluster(), RoomFilter(), 20)
    (line,) = [line for line in shown(drawn(listing, 20), columns) if str(MAX_ROOM) in line]
    assert line.split()[2:4] == ["success", "failed"]
    assert columns == 80 or line.endswith("DIGEST_MISMATCH")


async def test_a_room_is_shown_with_times_progress_and_why_it_failed(
    system: ScriptedSystem, inspector: Inspector
) -> None:
    room = system.prefill.open(5, peer=system.decode)
    system.decode.open(5, peer=system.prefill)
    system.prefill.progress(room, 12)
    system.decode.fail(room, DigestMismatch("other bytes", room=room))
    text = "\n".join(drawn_by(room_command.show, await inspector.room(room), 80))
    assert re.search(r"transferring +[\d.]+ +1 +12 +12 KiB", text)
    assert f"decode  {system.decode.address} failed: DIGEST_MISMATCH: other bytes" in text
    assert f"has met {system.decode.instance.instance_id}, at {system.decode.address}" in text
    assert "rid r5" in text


@pytest.mark.parametrize("columns", [80, 120])
async def test_a_trace_is_drawn_by_process_and_accounts_for_the_first_token(
    system: ScriptedSystem, inspector: Inspector, columns: int
) -> None:
    room = system.decode.open(5)
    router, decode = system.router.leg(room), system.decode.leg(room)
    decode.enter(SpanName.PREALLOC_WAIT, **{"pd.waited_for": "memory"})
    decode.enter(SpanName.TRANSFER_WAIT)
    router.first_token()
    lines = drawn_by(trace_command.show, await inspector.room(room), columns)
    decode.end()
    router.end()
    assert any(line.startswith(f"decode  {system.decode.address}") for line in lines)
    assert re.search(r"  prealloc wait .* ━+ .*waited for memory", "\n".join(lines))
    assert re.search(r"  transfer wait +[\d.]+ +[\d.]+\+ +━", "\n".join(lines))  # it lasts
    assert any(line.startswith("time to first token") for line in lines)


async def test_a_room_without_stages_says_so(system: ScriptedSystem, inspector: Inspector) -> None:
    view = await inspector.room(system.decode.open(5))
    assert "its stages are forgotten" in drawn_by(trace_command.show, view, 120)[0]


async def test_topology_shows_the_rest_when_a_process_is_gone(system: ScriptedSystem, inspector: Inspector) -> None:
    await system.decode.stop()
    lines = drawn_by(topology_command.show, await inspector.cluster(), 120)
    assert any(line.startswith(f"decode {system.decode.address} does not answer: ") for line in lines)
    assert any(system.prefill.instance.instance_id in line for line in lines)
    assert any(line.startswith(system.prefill.address) and " cma " in line for line in lines)


async def test_topology_says_what_differs(system: ScriptedSystem, inspector: Inspector) -> None:
    other = ScriptedProcess(Role.PREFILL, "1")
    await other.start()
    system.router.serves(other)
    other.registered(other, layout=replace(LAYOUT, page_size=64))
    system.decode.described.software_version = "9.9"
    lines = drawn_by(topology_command.show, await inspector.cluster(), 300)
    await other.stop()
    assert any(line.startswith("version differs: ") and f"{system.decode.address} has 9.9" in line for line in lines)
    assert f"page_size differs: prefill {system.prefill.address} has 16, prefill {other.address} has 64" in lines


async def test_topology_says_who_is_stopping(system: ScriptedSystem, inspector: Inspector) -> None:
    [_, decode] = system.router.described.workers
    decode.stopping, decode.open_rooms = True, 2
    lines = drawn_by(topology_command.show, await inspector.cluster(), 300)
    sender = f"router {system.router.address} sends it nothing new, and waits for 2 rooms"
    assert f"decode {system.decode.address} is stopping: {sender}" in lines


# --- what programs read ---


async def test_json_has_room_numbers_that_no_reader_rounds(system: ScriptedSystem) -> None:
    room = system.decode.open(MAX_ROOM, peer=system.prefill)
    leg = system.decode.leg(room)
    leg.first_token()
    leg.end()
    system.decode.open(6)
    commands = ("rooms", "--peer", system.prefill.address), ("room", str(room)), ("trace", str(room)), ("topology",)
    ran = await asyncio.gather(*(pdctl(system, *words, "--json") for words in commands))
    rooms, shown_room, trace, topology = (json.loads(ended.out) for ended in ran)
    assert [listed["bootstrap_room"] for listed in rooms["rooms"]] == [str(MAX_ROOM)]
    assert rooms["rooms"][0]["prefill"] is None
    assert shown_room["sides"][0]["transfer"]["bootstrap_room"] == str(MAX_ROOM)
    assert trace["sides"][0]["legs"][0]["root"]["name"] == "pd.decode"
    assert all(share["took_ms"] >= 0 for share in trace["first_token"])
    assert [process["role"] for process in topology] == ["router", "prefill", "decode"]


async def test_what_is_piped_has_no_colours_and_keeps_to_the_columns(system: ScriptedSystem) -> None:
    system.decode.open(5)
    ended = await pdctl(system, "rooms", columns=80)
    assert (ended.code, "\x1b" in ended.out) == (0, False)
    assert max(map(len, ended.out.splitlines())) <= 80


# --- watch ---


async def test_a_watch_prints_every_state_and_ends_cleanly(system: ScriptedSystem) -> None:
    process = await start_pdctl(told(system, 120), "watch")
    assert process.stdout is not None
    for _ in range(2):
        assert b"is watched from now on" in await process.stdout.readline()
    system.prefill.succeed(system.prefill.open(5))
    states = [(await process.stdout.readline()).decode().split("room 5")[1].split()[0] for _ in range(4)]
    assert states == ["bootstrapping", "waiting", "transferring", "success"]
    process.send_signal(signal.SIGINT)
    _, err = await process.communicate()
    assert (process.returncode, err) == (130, b"")


# --- abort ---


async def test_an_abort_says_what_it_found_and_that_it_is_quiet(system: ScriptedSystem) -> None:
    system.prefill.open(5)
    system.decode.open(5)
    ended = await pdctl(system, "abort", "5", "--message", "enough")
    assert ended.code == 0
    assert ended.out.count("ROOM_ABORTED: enough") == 2
    assert ended.out.endswith("room 5 is quiet: nothing of it is written any more\n")


async def test_an_abort_that_is_not_taken_is_an_error(system: ScriptedSystem) -> None:
    room = system.decode.open(5)
    leg = system.router.leg(room)  # the scripted router takes the abort, and does nothing
    ended = await pdctl(system, "abort", "5")
    assert ended.code == 1
    assert f"decode {system.decode.address} has not ended it" in ended.out
    leg.end()


async def test_a_ticket_is_given_or_signed_from_the_key_file(system: ScriptedSystem, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("k" * 40)
    file = ("--ticket-key-file", str(keys))
    ticket = base64.b64encode(tickets.sign(b"k" * 40, system.decode.open(6), 2**40)).decode()
    system.prefill.open(5)
    accepted = await asyncio.gather(pdctl(system, "abort", "5", *file), pdctl(system, "abort", "6", "--ticket", ticket))
    assert [ended.code for ended in accepted] == [0, 0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--ticket", "not base64!"), "is not base64"),
        (("--ticket-key-file", "/nowhere"), "/nowhere: No such file"),
        (("--ticket-key-file", "/nowhere", "--ticket", "AAAA"), "give one of them"),
    ],
)
def test_a_ticket_that_makes_no_sense_is_a_usage_error(words: tuple[str, ...], said: str) -> None:
    ended = CliRunner().invoke(main, ["abort", "5", *words])
    assert (ended.exit_code, said in ended.output) == (2, True)
