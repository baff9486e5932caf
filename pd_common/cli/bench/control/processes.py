"""The measured processes: started as a user starts them, and ended in every case."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pd_common.errors import PeerLost

LOOPBACK = "127.0.0.1"
_SERVES = re.compile(rf"serves .* on {re.escape(LOOPBACK)}:(\d+)")
_START_S, _STOP_S = 120.0, 20.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Service:
    """One pd-prefill or pd-decode on a free port of the loopback interface."""

    def __init__(self, role: str, flags: Sequence[str]) -> None:
        self.role = role
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        command = [sys.executable, "-m", f"services.{role}", "--host", LOOPBACK, "--port", "0", *flags]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log)

    def wait_until_it_serves(self) -> int:
        """Gives the port.

        Raises:
            PeerLost: it ended, or does not come up.

        """
        give_up = time.monotonic() + _START_S
        while (serves := _SERVES.search(self._printed())) is None:
            if self._process.poll() is not None or time.monotonic() > give_up:
                raise PeerLost(f"pd-{self.role} does not serve: {self._printed().strip()[-500:]}")
            time.sleep(0.05)
        return int(serves.group(1))

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

    def end(self) -> None:
        """SIGTERM; SIGKILL if that does not help."""
        self._process.terminate()
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
        for service in services:
            service.end()
