"""Log lines of a process, on standard error: text for people, or one JSON object a line for machines.

A line's fields are given to the logger by `extra=fields(...)`. What others have said, a request's id for one, can
neither pass for a line of its own nor colour one.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import time
from datetime import UTC, datetime
from enum import StrEnum
from types import TracebackType

from pd_common.telemetry.spans import ROOM
from pd_common.types import BootstrapRoom, Role

Field = str | int | float | bool | tuple[int, ...]

_log = logging.getLogger(__name__)
_prompts = logging.getLogger("pd.prompts")
_SILENT = logging.CRITICAL + 1
_prompts.setLevel(_SILENT)  # unless somebody asks for prompts; `disabled` would be undone by any `dictConfig`

_OWN = ("pd_common", "services")
"""Loggers that the chosen level is for; libraries speak from warnings on."""
_WITH_HANDLERS_OF_ITS_OWN = ("transformers",)
_PLAIN_VALUE = re.compile(r'[^\s"=]+')
_SET_OFF = "\n    "
_encode = json.JSONEncoder(separators=(",", ":")).encode


class LogFormat(StrEnum):
    """How lines are written."""

    TEXT = "text"
    JSON = "json"


def fields(room: BootstrapRoom | None = None, **others: Field | None) -> dict[str, dict[str, Field]]:
    """For `extra` of a log call: the room first, as a string, as spans have it; what is None is left out."""
    found: dict[str, Field] = {} if room is None else {ROOM: str(room)}
    found.update((name, value) for name, value in others.items() if value is not None)
    return {"fields": found}


def note_prompt(room: BootstrapRoom, rid: str, prompt: tuple[int, ...], text: str | None = None) -> None:
    """The only line that may hold a prompt; `text` where it came as text. Nothing unless prompts are asked for."""
    _prompts.info("prompt", extra=fields(room, rid=rid, prompt_token_ids=prompt, prompt_text=text))


def configure(role: Role, level: str, form: LogFormat, *, prompts: bool) -> None:
    """Sets up all logging of this process, with its warnings and uncaught exceptions.

    Does nothing where logging is set up already: then this is a part of another program.
    """
    root = logging.getLogger()
    if root.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(role) if form is LogFormat.JSON else TextFormatter(role))
    root.addHandler(handler)
    least = logging.getLevelNamesMapping()[level.upper()]
    root.setLevel(max(least, logging.WARNING))
    for name in _OWN:
        logging.getLogger(name).setLevel(least)
    for name in _WITH_HANDLERS_OF_ITS_OWN:
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True
    _prompts.setLevel(logging.INFO if prompts else _SILENT)
    logging.captureWarnings(capture=True)
    sys.excepthook, threading.excepthook = _log_death, _log_thread_death


def identify(instance_id: str) -> None:
    """Says which life of the process this is; in JSON each line from now on does."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, JsonFormatter):
            handler.formatter.instance_id = instance_id
    _log.info("this process is %s", instance_id)


class JsonFormatter(logging.Formatter):
    """One object a line, in ASCII: no reader takes a character inside of it for the end of the line."""

    def __init__(self, role: Role) -> None:
        super().__init__()
        self.instance_id: str | None = None
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Field] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "role": self._role.value,
        }
        if self.instance_id is not None:
            line["instance_id"] = self.instance_id
        line |= _fields_of(record)
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return _encode(line)


class TextFormatter(logging.Formatter):
    """Local time, the level's first letter, role, logger and message, then the fields as key=value."""

    def __init__(self, role: Role) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        clock = f"{time.strftime('%H:%M:%S', time.localtime(record.created))}.{int(record.msecs):03d}"
        said = _printable(record.getMessage())
        pairs = "".join(f" {name}={_shown(value)}" for name, value in _fields_of(record).items())
        line = f"{clock} {record.levelname[0]} {self._role.value} {record.name}: {said}{pairs and ' ' + pairs}"
        return f"{line}{_SET_OFF}{_printable(self.formatException(record.exc_info))}" if record.exc_info else line


def _fields_of(record: logging.LogRecord) -> dict[str, Field]:
    found: dict[str, Field] = getattr(record, "fields", {})
    return found


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _shown(value: Field) -> str:
    text = value if isinstance(value, str) else _encode(value)
    return text if text.isprintable() and _PLAIN_VALUE.fullmatch(text) else _encode(value)


def _printable(text: str) -> str:
    """The text without what moves the cursor or colours; lines after the first are set off, so that none passes for
    a line of the log.
    """
    if text.isprintable():
        return text
    return "".join(_SET_OFF if each == "\n" else each if each.isprintable() else _escaped(each) for each in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def _log_death(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    _log.critical("the process dies of an error", exc_info=(kind, error, traceback))


def _log_thread_death(death: threading.ExceptHookArgs) -> None:
    if death.exc_value is None:
        return
    name = "a thread" if death.thread is None else f"thread {death.thread.name}"
    cause = (death.exc_type, death.exc_value, death.exc_traceback)
    _log.critical("%s dies of an error", name, exc_info=cause)
