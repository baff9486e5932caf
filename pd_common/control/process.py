"""What every process does around its wiring: logs, errors at start, its name, what it prints."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from importlib import metadata
from types import FrameType
from typing import Any

import click

from pd_common.config import LogConfig
from pd_common.errors import PdError
from pd_common.telemetry import logs
from pd_common.transport.base import TransportInfo
from pd_common.types import Instance, Role

_log = logging.getLogger(__name__)

SOFTWARE_VERSION = metadata.version("pd-handoff")


def run(role: Role, main: Callable[[], Coroutine[Any, Any, None]], log: LogConfig) -> None:
    """Runs a process to its end; an error that a person can mend becomes a message and exit code 1."""
    form = logs.LogFormat(log.log_format)
    logs.configure(role, log.log_level, form, prompts=log.log_prompts)
    signal.signal(signal.SIGTERM, _end_at_once)
    try:
        asyncio.run(main())
    except PdError as error:
        if form is logs.LogFormat.JSON:
            _log.critical("%s", error.message)
            raise SystemExit(1) from error
        raise click.ClickException(error.message) from error


def _end_at_once(number: int, _frame: FrameType | None) -> None:
    """Until there is something to drain. In a container the kernel drops a signal that process 1 does not handle, and a
    model may take minutes to load.
    """
    raise SystemExit(128 + number)


def share_interpreter() -> None:
    """Lets the data plane's thread run soon after it asks for the interpreter lock.

    With Python's default of 5 ms a busy event loop cuts the rate of small writes to a third.
    """
    sys.setswitchinterval(0.0005)


def spare_collector() -> None:
    """Keeps what is there by now, code and model, out of the collector's sight: none of it is garbage.

    Otherwise every full collection goes through it all and stops the event loop for a quarter of a second.
    """
    gc.collect()
    gc.freeze()


def new_instance(kind: str) -> Instance:
    """The identity of this life of this process; `kind` is what it does."""
    name = f"{kind}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    return Instance(name, time.time_ns() // 1000)


def announce(what: str, data_plane: TransportInfo | None = None) -> None:
    """The lines that a person waits for at start."""
    if data_plane is not None:
        plane = data_plane
        _log.info("data plane: %s %s from %s", plane.backend, plane.version, plane.library)
        for what_there_is, names in (
            ("transports", plane.transports),
            ("network devices", plane.devices),
            ("settings", plane.settings),
        ):
            _log.info("data plane: %s %s", what_there_is, " ".join(names) or "none")
    _log.info("%s", what)
