"""Facts about the machine that every figure depends on."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    """Where and with what was measured."""

    cpu: str
    cores: int
    """Cores that this process may use."""
    memory_gb: float
    kernel: str
    python: str
    load: float
    """Load average of the last minute before the bench began; figures of a busy machine are not worth much."""
    libraries: tuple[str, ...]
    """Name and version of each library that carried bytes."""

    @classmethod
    def here(cls, load: float, libraries: Iterable[str]) -> Machine:
        """The machine that runs this process."""
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return cls(
            cpu=_cpu(),
            cores=len(os.sched_getaffinity(0)),
            memory_gb=round(memory / 1e9, 1),
            kernel=platform.release(),
            python=platform.python_version(),
            load=load,
            libraries=tuple(sorted(set(libraries))),
        )

    def __str__(self) -> str:
        where = f"{self.cpu}, {self.cores} cores, {self.memory_gb} GB, Linux {self.kernel}, Python {self.python}"
        return ", ".join((where, f"load {self.load:.1f} before", *self.libraries))


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
