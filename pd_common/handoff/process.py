"""Whether a process of this host has ended, told from its pid and start time (Linux, /proc)."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from pd_common.types import ProcessProof

# Places in /proc/PID/stat counted from the field after the command's name, which may itself hold blanks and brackets.
_STATE, _NUM_THREADS, _START_TICKS = 0, 17, 19


def own_process_proof() -> ProcessProof:
    """How others on this host can see that this process has ended."""
    return ProcessProof(host_id(), os.getpid(), int(_stat_fields(os.getpid())[_START_TICKS]))


@cache
def host_id() -> str:
    """Names this boot of this machine and the pid namespace: where it is the same, pids mean the same."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot_id}/{Path('/proc/self/ns/pid').readlink()}"


def process_is_gone(proof: ProcessProof) -> bool:
    """True only if the process has certainly ended. A process of another host never counts as gone."""
    if proof.host_id != host_id() or proof.pid <= 0:
        return False
    try:
        os.kill(proof.pid, 0)
        fields = _stat_fields(proof.pid)
    except ProcessLookupError:
        return True
    except (PermissionError, FileNotFoundError):
        # Alive under another user, or /proc does not show it: nothing is proven.
        return False
    ended = fields[_STATE] in ("Z", "X") and int(fields[_NUM_THREADS]) <= 1
    return ended or int(fields[_START_TICKS]) != proof.start_ticks


def _stat_fields(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
