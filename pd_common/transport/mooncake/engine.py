"""One Mooncake engine: its own sockets, its own threads, its own list of memory. Knows no asyncio.

All calls block; those that move or wait let other threads run Python.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pd_common.errors import PdError, PeerLost, TransferFailed
from pd_common.transport.base import MemoryRegion
from pd_common.transport.mooncake.library import MooncakeLibrary
from pd_common.transport.mooncake.ports import changing, hold, listening_ports

_KNOCK_S = 0.01
_REACH_S = 0.5


class MooncakeError(Exception):
    """A call failed; Mooncake tells why only in its log."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What every engine of a process is started with. `device` is empty for tcp."""

    library: MooncakeLibrary
    host: str
    protocol: str
    device: str


def pd_error(error: MooncakeError, target: str) -> PdError:
    """The one place where Mooncake's failures become this project's. Whether the peer is there, its port tells."""
    kind = TransferFailed if _can_connect(target) else PeerLost
    return kind(f"Mooncake: {error}", target=target)


class Engine:
    """Invariant: what it has registered can be written by peers until `close` has returned, and no longer."""

    def __init__(self, settings: Settings, regions: Iterable[MemoryRegion]) -> None:
        """Starts an engine that offers `regions` to whoever connects.

        Raises:
            MooncakeError: it does not start, or a region cannot be registered.
        """
        self._library = settings.library
        self._engine = settings.library.new_engine()
        self._registered: set[MemoryRegion] = set()
        self._closing = threading.Lock()
        self._closed = False
        self.target = ""
        """host:port for peers."""
        with changing:
            before = listening_ports()
            status = self._engine.initialize(settings.host, "P2PHANDSHAKE", settings.protocol, settings.device)
            self._ports = listening_ports() - before
        if status:
            raise MooncakeError(f"an engine does not start ({status})")
        self.target = f"{settings.host}:{self._engine.get_rpc_port()}"
        try:
            self.register(regions)
        except MooncakeError:
            self.close()
            raise

    def register(self, regions: Iterable[MemoryRegion]) -> None:
        """Makes regions known; those that are known already are left alone.

        Raises:
            MooncakeError: one cannot be registered.
        """
        for region in regions:
            if region in self._registered:
                continue
            status = self._engine.register_memory(region.base, region.length)
            if status:
                raise MooncakeError(f"{region.length} bytes cannot be registered ({status})")
            self._registered.add(region)

    def write(self, target: str, local: list[int], remote: list[int], lengths: list[int]) -> None:
        """Writes to a peer's memory; returns when the peer has it.

        Raises:
            MooncakeError: a part of it did not arrive; other parts may still be on their way until `close`.
        """
        status = self._engine.batch_transfer_sync_write(target, local, remote, lengths)
        if status:
            raise MooncakeError(f"a write of {len(lengths)} ranges failed ({status})")

    def fence(self) -> None:
        """As `close`, and peers of this engine never reach a later one in its place."""
        with changing:
            self.close()
            hold(self._ports)
            self._ports = frozenset()

    def close(self) -> None:
        """Returns when nothing can come in or go out by this engine any more. May be repeated, by any thread."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            if self._library.free_engine is not None:
                with _knocking(self.target):
                    self._library.free_engine(self._engine.get_engine_ptr())
            self._engine = None


@contextlib.contextmanager
def _knocking(target: str) -> Iterator[None]:
    """Connects again and again: whether to end, the engine's thread looks only after a connection, or a second."""
    done = threading.Event()

    def knock() -> None:
        while not done.is_set() and _can_connect(target):
            done.wait(_KNOCK_S)

    thread = threading.Thread(target=knock, name="mooncake-knock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _can_connect(target: str) -> bool:
    host, _, port = target.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _REACH_S).close()
    except OSError:
        return False
    return True
