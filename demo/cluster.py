"""One prefill, one decode and a router as three processes on loopback: started, watched until ready, stopped again."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

LOOPBACK = "127.0.0.1"
READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0


class ClusterError(Exception):
    """A process did not come up; the message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class Ports:
    """Where the three listen."""

    prefill: int
    decode: int
    http: int
    grpc: int

    @classmethod
    def free(cls) -> Ports:
        """Four ports that nobody uses at the moment."""
        sockets = [socket.socket() for _ in range(4)]
        for each in sockets:
            each.bind((LOOPBACK, 0))
        ports = cls(*(each.getsockname()[1] for each in sockets))
        for each in sockets:
            each.close()
        return ports


class Process:
    """One child process with its log; it can be killed and started again with the same command."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self._command = list(command)
        self._environment = {**os.environ, **environment}
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as this object
        self._child: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Starts the command (again)."""
        self._child = subprocess.Popen(
            self._command, env=self._environment, stdout=self._log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )

    @property
    def pid(self) -> int:
        return self._running.pid

    @property
    def is_alive(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def log(self) -> str:
        """Everything it has printed."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def wait_for_log(self, text: str, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Returns when it has printed this.

        Raises:
            ClusterError: it ended, or the time is over.
        """
        give_up = time.monotonic() + timeout_s
        while text not in (printed := self.log()):
            if not self.is_alive or time.monotonic() > give_up:
                raise ClusterError(f"{self.name} did not print {text!r}:\n{_tail(printed)}")
            time.sleep(0.05)

    def send(self, number: signal.Signals) -> None:
        self._running.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and waits for the end."""
        self._running.kill()
        self._running.wait()

    def stop(self) -> int:
        """SIGTERM, and waits for the end; gives the exit code."""
        if self.is_alive:
            self.send(signal.SIGTERM)
        try:
            return self._running.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._running.returncode

    def close(self) -> None:
        """Stops it and forgets its log."""
        self.stop()
        self._log.close()

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            raise ClusterError(f"{self.name} was never started")
        return self._child


@dataclass(frozen=True, slots=True)
class Cluster:
    """The three processes."""

    ports: Ports
    prefill: Process
    decode: Process
    router: Process

    @property
    def processes(self) -> tuple[Process, ...]:
        return self.router, self.prefill, self.decode

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Returns when the router has sent a real room through the pair.

        Raises:
            ClusterError: a process ended, or the time is over.
        """
        give_up = time.monotonic() + timeout_s
        while (answer := self.health()) != "ok":
            for process in self.processes:
                if not process.is_alive:
                    raise ClusterError(f"{process.name} has ended:\n{_tail(process.log())}")
            if time.monotonic() > give_up:
                raise ClusterError(f"not ready after {timeout_s:.0f} s: {answer}\n{_tail(self.router.log())}")
            time.sleep(0.05)

    def health(self) -> str:
        """`ok`, or why not."""
        connection = http.client.HTTPConnection(LOOPBACK, self.ports.http, timeout=5)
        try:
            connection.request("GET", "/health")
            response = connection.getresponse()
            body = response.read().decode(errors="replace")
            return "ok" if response.status == http.client.OK else body
        except OSError as error:
            return str(error)
        finally:
            connection.close()

    def close(self) -> None:
        """Stops all, the router first, so that nobody is cut off."""
        for process in self.processes:
            process.close()


@contextmanager
def cluster(
    model: Path,
    ports: Ports,
    *,
    engine_flags: Sequence[str] = (),
    prefill_flags: Sequence[str] = (),
    decode_flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Cluster]:
    """The three processes, not necessarily ready yet; whatever happens they are stopped at the end."""
    environment = dict(environment or {})
    shared = ["--model", str(model), "--host", LOOPBACK, *engine_flags]
    prefill = _service("prefill", [*shared, "--port", str(ports.prefill), *prefill_flags], environment)
    decode = _service("decode", [*shared, "--port", str(ports.decode), *decode_flags], environment)
    router_flags = [
        *("--prefill", f"{LOOPBACK}:{ports.prefill}", "--decode", f"{LOOPBACK}:{ports.decode}"),
        *("--host", LOOPBACK, "--http-port", str(ports.http), "--grpc-port", str(ports.grpc)),
    ]
    running = Cluster(ports, prefill, decode, _service("router", router_flags, environment))
    try:
        yield running
    finally:
        running.close()


def _service(name: str, flags: Sequence[str], environment: Mapping[str, str]) -> Process:
    return Process(f"pd-{name}", [sys.executable, "-m", f"services.{name}", *flags], environment)


def _tail(log: str, lines: int = 25) -> str:
    return "\n".join(log.splitlines()[-lines:])
