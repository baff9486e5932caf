"""Log lines: one a line whatever they hold, the same facts in both formats, one for each step of a room."""

from __future__ import annotations

import json
import logging
import logging.config
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_common.control import room_log
from pd_common.errors import (
    ClientCancelled,
    DeadlineExceeded,
    InvalidRequest,
    PdError,
    PeerLost,
    RoomAborted,
)
from pd_common.handoff.deadlines import Timeouts
from pd_common.handoff.state import Progress, TransferState
from pd_common.handoff.table import TransferTable
from pd_common.telemetry import logs, spans
from pd_common.telemetry.logs import JsonFormatter, TextFormatter, fields
from pd_common.telemetry.spans import ROOM, SpanName
from pd_common.telemetry.tracing import RoomTrace, Tracing
from pd_common.types import BootstrapRoom, Instance, Role

HOSTILE = "chat-7\n12:00:00.000 C router pd: all is lost\r\x1b[31m\x9b2J\u2028\u202e\x00"
ROOM_7 = BootstrapRoom(7)


def record(message: str = "said", extra: dict[str, Any] | None = None, **more: Any) -> logging.LogRecord:
    made = logging.LogRecord("pd.test", logging.WARNING, "file.py", 1, message, (), more.get("exc_info"))
    vars(made).update(extra or {})
    return made


def failed_deep_down() -> Any:
    try:
        int(HOSTILE)
    except ValueError as error:
        return type(error), ValueError(HOSTILE), error.__traceback__


# --- both formats ---


@given(st.text())
def test_a_json_line_is_one_line_and_gives_back_what_was_said(said: str) -> None:
    line = JsonFormatter(Role.DECODE).format(record(said.replace("%", ""), fields(rid=said)))
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line)["rid"] == said


@given(st.text())
def test_nothing_that_is_said_passes_for_a_line_of_text_or_moves_the_cursor(said: str) -> None:
    line, *rest = TextFormatter(Role.DECODE).format(record(said, fields(rid=said))).split("\n")
    assert all(each.isprintable() for each in (line, *rest))
    assert all(each.startswith("    ") for each in rest)


def test_a_field_never_goes_on_in_the_next_line() -> None:
    line = TextFormatter(Role.DECODE).format(record("said", fields(rid=HOSTILE)))
    assert line.isprintable()
    assert line.endswith(f" rid={json.dumps(HOSTILE)}")


def test_json_has_time_level_logger_process_and_fields() -> None:
    form = JsonFormatter(Role.PREFILL)
    form.instance_id = "prefill-host-1-ab"
    said = record("pages sent", fields(BootstrapRoom(2**64 - 1), rid="chat-7", took_ms=1.5, peer=None))
    line = json.loads(form.format(said))
    assert datetime.fromisoformat(line.pop("time")) == datetime.fromtimestamp(said.created, UTC)
    assert line == {
        "level": "warning",
        "logger": "pd.test",
        "message": "pages sent",
        "role": "prefill",
        "instance_id": "prefill-host-1-ab",
        ROOM: "18446744073709551615",
        "rid": "chat-7",
        "took_ms": 1.5,
    }


def test_text_has_the_fields_at_its_end() -> None:
    said = record("pages sent", fields(ROOM_7, rid="chat 7", took_ms=1.5, alone=True, why='a="b"'))
    line = TextFormatter(Role.PREFILL).format(said)
    assert line.partition("W ")[2] == (
        'prefill pd.test: pages sent  pd.bootstrap_room=7 rid="chat 7" took_ms=1.5 alone=true why="a=\\"b\\""'
    )


def test_a_traceback_is_one_field_of_json() -> None:
    line = JsonFormatter(Role.DECODE).format(record(exc_info=failed_deep_down()))
    assert line.isprintable()
    assert "in failed_deep_down" in json.loads(line)["traceback"]


def test_no_line_of_a_traceback_in_text_looks_like_a_log_line() -> None:
    _, *traceback = TextFormatter(Role.DECODE).format(record(exc_info=failed_deep_down())).splitlines()
    assert any("in failed_deep_down" in line for line in traceback)
    assert all(line.startswith("    ") and line.isprintable() for line in traceback)


_EVERYTHING = """
import asyncio, logging, sys, threading, warnings
from pd_common.telemetry import logs
from pd_common.types import Role

logs.configure(Role.ROUTER, "info", logs.LogFormat.JSON, prompts=len(sys.argv) > 1)
logs.identify("router-1")
logging.getLogger("uvicorn.error").warning("from uvicorn")
logging.getLogger("uvicorn.error").info("too much from uvicorn")
logging.getLogger("services.router").info("from us")
logs.note_prompt(7, "chat-7", (101, 102), "secret words")
warnings.warn("from a library")
thread = threading.Thread(target=lambda: 1 // 0, name="worker")
thread.start()
thread.join()
async def main():
    asyncio.get_running_loop().call_soon(lambda: [].pop())
    await asyncio.sleep(0)
asyncio.run(main())
raise RuntimeError("the end")
"""


def lines_of_a_process(*arguments: str) -> dict[str, dict[str, Any]]:
    """By message; raises when anything on standard error is not one JSON object a line."""
    done = subprocess.run(
        [sys.executable, "-c", _EVERYTHING, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert all(line["role"] == "router" for line in lines)
    assert all(line["instance_id"] == "router-1" for line in lines)
    return {line["message"]: line for line in lines}


def test_libraries_warnings_and_every_kind_of_death_come_out_in_the_same_format() -> None:
    lines = lines_of_a_process()
    assert {"from uvicorn", "from us"} <= set(lines)
    assert "too much from uvicorn" not in lines
    assert any("UserWarning: from a library" in message for message in lines)
    deaths = {line["traceback"].splitlines()[-1] for line in lines.values() if "traceback" in line}
    assert deaths == {
        "ZeroDivisionError: integer division or modulo by zero",
        "IndexError: pop from empty list",
        "RuntimeError: the end",
    }
    assert lines["thread worker dies of an error"]["level"] == "critical"
    assert not any("secret" in str(line) or "101" in str(line) for line in lines.values())


def test_prompts_are_logged_when_they_are_asked_for() -> None:
    line = lines_of_a_process("with prompts")["prompt"]
    assert (line[ROOM], line["rid"]) == ("7", "chat-7")
    assert (line["prompt_token_ids"], line["prompt_text"]) == ([101, 102], "secret words")


def test_prompts_are_off_where_nobody_has_set_logging_up(caplog: pytest.LogCaptureFixture) -> None:
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})  # as other programs do
    with caplog.at_level(logging.DEBUG):
        logs.note_prompt(ROOM_7, "chat-7", (1, 2), "secret")
    assert not caplog.records


# --- rooms ---


class Decode:
    """What a decode process has of rooms, followed by the log."""

    def __init__(self) -> None:
        self.tracing = Tracing()
        self.table = TransferTable(Role.DECODE, 300.0, 100, Timeouts(300.0, 300.0))
        room_log.follow_rooms(self.tracing, self.table)

    def open(self) -> RoomTrace:
        self.table.open(ROOM_7, rid="chat-7", prompt_digest=b"", deadline_s=90.0, now=1.0)
        return self.tracing.begin(SpanName.DECODE, ROOM_7, spans.of_room(ROOM_7), rid="chat-7")

    def to(self, state: TransferState, now: float, progress: Progress | None = None) -> None:
        self.table.advance(ROOM_7, state, now, progress=progress or Progress(), peer=Instance("prefill-1", 1))


@pytest.fixture
def decode() -> Decode:
    return Decode()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[tuple[str, dict[str, Any]]]]]:
    """Level and message of each line so far, and its fields."""

    def lines() -> list[tuple[str, dict[str, Any]]]:
        return [(f"{each.levelname} {each.getMessage()}", vars(each)["fields"]) for each in caplog.records]

    with caplog.at_level(logging.DEBUG, logger=room_log.__name__):
        yield lines


Said = Callable[[], list[tuple[str, dict[str, Any]]]]


def test_each_state_is_said_once_and_the_end_with_what_was_done(decode: Decode, said: Said) -> None:
    leg = decode.open()
    decode.to(TransferState.WAITING_FOR_INPUT, 1.1)
    for chunk in range(3):
        decode.to(TransferState.TRANSFERRING, 1.2, Progress(chunk, chunk, 100 * chunk))
    decode.to(TransferState.SUCCESS, 1.5, Progress(3, 25, 2500))
    leg.end(completion_tokens=9)
    assert [words for words, _ in said()] == [
        "DEBUG room opened",
        "DEBUG memory set aside",
        "DEBUG transfer begun",
        "INFO handoff done",
        "INFO answer done",
    ]
    assert all((known[ROOM], known["rid"]) == ("7", "chat-7") for _, known in said())
    assert all(known["trace_id"] == leg.trace_id for _, known in said()[1:])
    done = said()[3][1]
    assert (done["state"], done["took_ms"], done["peer"]) == ("SUCCESS", 500.0, "prefill-1")
    assert (done["pages"], done["bytes"]) == (25, 2500)
    assert said()[4][1]["completion_tokens"] == 9


def test_a_failure_on_the_way_is_said_once_with_its_reason(decode: Decode, said: Said) -> None:
    leg, lost = decode.open(), PeerLost("prefill is gone")
    decode.table.fail(ROOM_7, lost, 3.0)
    leg.end(lost)
    ((words, known),) = said()[1:]
    assert words == "WARNING room failed"
    assert (known["state"], known["reason"], known["error"]) == ("FAILED", "PEER_LOST", "prefill is gone")


def test_an_answer_that_fails_after_its_handoff_is_said_too(decode: Decode, said: Said) -> None:
    leg = decode.open()
    decode.to(TransferState.WAITING_FOR_INPUT, 1.1)
    decode.to(TransferState.SUCCESS, 1.5)
    leg.end(DeadlineExceeded("too late"))
    words, known = said()[-1]
    assert (words, known["reason"], known["error"]) == ("WARNING answer failed", "DEADLINE", "too late")


@pytest.mark.parametrize("kind", [ClientCancelled, RoomAborted, InvalidRequest])
def test_what_the_client_has_done_is_no_warning_and_its_words_are_not_repeated(
    decode: Decode, said: Said, kind: type[PdError]
) -> None:
    decode.open()
    decode.table.abort(ROOM_7, kind("my secret prompt"), 2.0)
    words, known = said()[-1]
    assert (words, known["reason"]) == ("INFO room failed", kind.reason.value)
    assert "secret" not in str(known)


def test_a_router_says_how_each_request_ended(said: Said) -> None:
    tracing = Tracing()
    room_log.follow_requests(tracing)
    leg = tracing.begin(SpanName.ROUTE, ROOM_7, spans.of_room(ROOM_7), rid="chat-7", decode="d:1")
    room_log.say(leg, "request accepted")
    leg.first_token()
    leg.end()
    (accepted, way), (done, known) = said()
    assert (accepted, done) == ("DEBUG request accepted", "INFO request done")
    assert (way[ROOM], way["rid"], way["decode"], way["trace_id"]) == ("7", "chat-7", "d:1", leg.trace_id)
    assert 0 <= known["ttft_ms"] <= known["took_ms"]
