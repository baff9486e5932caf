"""A network namespace joined to this one by veth pairs, made and removed by whoever needs it (root only)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Namespace:
    """`near` and `far` are the devices of each pair, here and there."""

    name: str
    near: tuple[str, ...]
    far: tuple[str, ...]

    @property
    def run_by(self) -> tuple[str, ...]:
        """What has to stand before a command that runs there."""
        return ("ip", "netns", "exec", self.name)

    def sent_bytes(self) -> list[int]:
        """What each near device has sent so far."""
        return [int(Path(f"/sys/class/net/{device}/statistics/tx_bytes").read_text()) for device in self.near]


@contextmanager
def namespace(pairs: int) -> Iterator[Namespace]:
    """A namespace with so many pairs, each a subnet of its own (198.18.0.0/15 is set aside for such uses)."""
    name = f"pd{os.getpid()}"
    numbers = range(pairs)
    made = Namespace(name, tuple(f"{name}n{each}" for each in numbers), tuple(f"{name}f{each}" for each in numbers))
    with ExitStack() as stack:
        _ip("netns", "add", name)
        stack.callback(_ip, "netns", "del", name)
        _ip("-n", name, "link", "set", "lo", "up")
        for number, (near, far) in enumerate(zip(made.near, made.far, strict=True)):
            subnet = f"198.{18 + number}.{os.getpid() % 250}"
            _ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
            stack.callback(_ip, "link", "del", near)
            _ip("addr", "add", f"{subnet}.1/24", "dev", near)
            _ip("link", "set", near, "up")
            _ip("-n", name, "addr", "add", f"{subnet}.2/24", "dev", far)
            _ip("-n", name, "link", "set", far, "up")
        yield made


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)
