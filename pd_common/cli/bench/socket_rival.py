"""A plain TCP socket between two Python processes: gathers on one side, scatters on the other, a byte says "done"."""

from __future__ import annotations

import asyncio
import ctypes
import platform
import socket
import time
from collections.abc import Callable

from pd_common.cli.bench.ends import EndSettings, Moved, Regions
from pd_common.errors import InternalError, TransferFailed
from pd_common.handoff.chunk import Int64s
from pd_common.transport.base import MemoryRegion, Puts

_RANGES_PER_CALL = 16
_DONE = b"k"
_ACCEPT_S = 60.0


class SocketSender:
    """The connecting side."""

    carrier = "tcp"

    def __init__(self, settings: EndSettings, regions: Regions) -> None:  # noqa: ARG002 - as all ends are made
        self._memory = _Memory(regions[0])
        self._socket: socket.socket | None = None
        self.library = f"Python {platform.python_version()} socket"

    async def connect(self, address: bytes) -> None:
        host, _, port = address.decode().rpartition(":")
        self._socket = socket.create_connection((host, int(port)))

    async def write(self, puts: Puts) -> Moved:
        if self._socket is None:
            raise InternalError("the sending end is not connected")
        return await asyncio.to_thread(self._write, self._socket, puts)

    def _write(self, connection: socket.socket, puts: Puts) -> Moved:
        started = time.perf_counter()
        _pass_all(connection.sendmsg, self._memory.views(puts.local, puts.lengths))
        posted = time.perf_counter()
        if connection.recv(1) != _DONE:
            raise TransferFailed("the receiving end closed the connection")
        return Moved(posted - started, time.perf_counter() - started)


class SocketReceiver:
    """The listening side; a thread puts the bytes of each announced write where they belong."""

    def __init__(self, settings: EndSettings, regions: Regions) -> None:
        self._memory = _Memory(regions[0])
        self._listener = socket.create_server((settings.host, 0))
        self._listener.settimeout(_ACCEPT_S)
        self._connection: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None
        self.address = f"{settings.host}:{self._listener.getsockname()[1]}".encode()

    async def expect(self, puts: Puts) -> None:
        if self._task is not None:
            await self._task  # it has ended, and raises here if it failed
        self._task = asyncio.create_task(asyncio.to_thread(self._receive, puts))

    def _receive(self, puts: Puts) -> None:
        if self._connection is None:
            self._connection, _ = self._listener.accept()
        connection = self._connection
        _pass_all(lambda views: connection.recvmsg_into(views)[0], self._memory.views(puts.remote, puts.lengths))
        connection.sendall(_DONE)


class _Memory:
    """A region as something to cut ranges from."""

    def __init__(self, region: MemoryRegion) -> None:
        self._base = region.base
        self._all = memoryview((ctypes.c_char * region.length).from_address(region.base)).cast("B")

    def views(self, addresses: Int64s, lengths: Int64s) -> list[memoryview]:
        starts = addresses - self._base
        ranges = zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
        return [self._all[start:end] for start, end in ranges]


def _pass_all(call: Callable[[list[memoryview]], int], views: list[memoryview]) -> None:
    """Hands a few ranges at a time to a call that may take only part of them.

    Raises:
        TransferFailed: the other side closed the connection.

    """
    for first in range(0, len(views), _RANGES_PER_CALL):
        left = views[first : first + _RANGES_PER_CALL]
        while left:
            taken = call(left)
            if taken == 0:
                raise TransferFailed("the connection was closed in the middle of a transfer")
            left = _rest(left, taken)


def _rest(views: list[memoryview], taken: int) -> list[memoryview]:
    for index, view in enumerate(views):
        if taken < len(view):
            return [view[taken:], *views[index + 1 :]]
        taken -= len(view)
    return []
