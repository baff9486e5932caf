"""The measured processes: started as a user starts them, and ended in every case."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from pd_common.errors import PeerLost

LOOPBACK = "127.0.0.1"
_SERVES = re.compile(rf"(?:serves .*|listens for HTTP) on {re.escape(LOOPBACK)}:(\d+)")
_START_S, _STOP_S = 120.0, 20.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_FREE_PORTS = {"router": ("--http-port", "0", "--grpc-port", "0")}
_FREE_PORT = ("--port", "0")


class Service:
    """One pd-prefill, pd-decode or pd-router on free ports of the loopback interface."""

    def __init__(
        self,
        role: str,
        flags: Sequence[str],
        cores: frozenset[int] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`cores` are those that it may use (None: as this process); `environment` is what it has beside this one's."""
        self.role = role
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        ports = _FREE_PORTS.get(role, _FREE_PORT)
        command = [sys.executable, "-m", f"services.{role}", "--host", LOOPBACK, *ports, *flags]
        with on_cores(cores or os.sched_getaffinity(0)):  # a child has its parent's
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
            )

    def wait_until_it_serves(self) -> int:
        """Gives the port; a router's is that of HTTP.

        Raises:
            PeerLost: it ended, or does not come up.

        """
        give_up = time.monotonic() + _START_S
        while (serves := _SERVES.search(self._printed())) is None:
            if not self.is_alive or time.monotonic() > give_up:
                raise self.trouble("does not serve")
            time.sleep(0.05)
        return int(serves.group(1))

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def trouble(self, what: str) -> PeerLost:
        """An error that quotes the end of what it has printed."""
        return PeerLost(f"pd-{self.role} {what}: {self._printed().strip()[-500:]}")

    @property
    def cpu_s(self) -> float:
        """Processor time that it has used, in its own code and in the kernel."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S

    @property
    def resident_bytes(self) -> int:
        """Memory that it has now."""
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def ask_to_end(self) -> None:
        """SIGTERM, without waiting for what it does."""
        self._process.terminate()

    def end(self) -> None:
        """SIGTERM; SIGKILL if that does not help."""
        self.ask_to_end()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _printed(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")


@contextmanager
def on_cores(cores: set[int] | frozenset[int]) -> Iterator[None]:
    """Within this block the calling thread, and what it starts, may use these cores and no others."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def running(flags: Sequence[str]) -> Iterator[tuple[Service, Service]]:
    """A prefill and a decode with the same flags, starting."""
    services: list[Service] = []
    try:
        prefill = Service("prefill", flags)
        services.append(prefill)
        decode = Service("decode", flags)
        services.append(decode)
        yield prefill, decode
    finally:
        end_all(services)


def end_all(services: Sequence[Service]) -> None:
    """All at once, as they need a moment each."""
    for service in services:
        service.ask_to_end()
    for service in services:
        service.end()
