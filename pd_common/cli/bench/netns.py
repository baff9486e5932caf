"""Two ends in two network namespaces, joined by a veth pair.

The far namespace has no name: it lives as long as one process in it, which ends with the bench, even when that is
killed; and the pair goes with the namespace.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pd_common.errors import TransportUnavailable

_COMMAND_S = 10.0
_HOLD = "mount -t sysfs sysfs /sys && echo && exec cat"
"""UCX looks for network devices in /sys, which shows those of the namespace that mounted it."""
_BENCHMARK_NET = "198.18"
"""RFC 2544 keeps 198.18.0.0/15 free for benchmarks."""


@dataclass(frozen=True, slots=True)
class VethPair:
    """Device and address on the near and on the far side, and the words that start a command on the far side."""

    near_device: str
    near_host: str
    far_device: str
    far_host: str
    far_prefix: tuple[str, ...]


@contextmanager
def veth_pair() -> Iterator[VethPair]:
    """Makes the namespace and the pair, and takes them away again.

    Raises:
        TransportUnavailable: this process may not, or a tool is missing; the message says which.

    """
    if os.geteuid() != 0:
        raise TransportUnavailable("network namespaces need root")
    try:
        holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "sh", "-c", _HOLD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise TransportUnavailable(f"no network namespace can be made: {error}") from error
    with holder:
        try:
            yield _connected(holder)
        finally:
            # The kernel would do it too, but only some time after the last process there has ended.
            subprocess.run(["ip", "link", "delete", _near_device()], capture_output=True, check=False)
            holder.kill()


def _connected(holder: subprocess.Popen[bytes]) -> VethPair:
    assert holder.stdout is not None and holder.stderr is not None  # noqa: S101, PT018 - made with pipes
    if not holder.stdout.readline():
        reason = holder.stderr.read().decode(errors="replace").strip()
        raise TransportUnavailable(f"no network namespace can be made: {reason}")
    subnet = f"{_BENCHMARK_NET}.{os.getpid() % 256}"
    pair = VethPair(
        near_device=_near_device(),
        near_host=f"{subnet}.1",
        far_device=f"pdb{os.getpid()}f",
        far_host=f"{subnet}.2",
        far_prefix=("nsenter", "--target", str(holder.pid), "--net", "--mount", f"--wd={Path.cwd()}"),
    )
    far = (*pair.far_prefix, "ip")
    _run(
        "ip", "link", "add", pair.near_device, "type", "veth", "peer", "name", pair.far_device, "netns", str(holder.pid)
    )
    _run("ip", "address", "add", f"{pair.near_host}/30", "dev", pair.near_device)
    _run(*far, "address", "add", f"{pair.far_host}/30", "dev", pair.far_device)
    _run(*far, "link", "set", "lo", "up")
    _run(*far, "link", "set", pair.far_device, "up")
    _run("ip", "link", "set", pair.near_device, "up")
    return pair


def _near_device() -> str:
    return f"pdb{os.getpid()}n"


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TransportUnavailable(f"no network namespace can be made: {error}") from error
    if done.returncode != 0:
        raise TransportUnavailable(f"no network namespace can be made: {done.stderr.strip()}")
