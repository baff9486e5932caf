"""Transport over UCX: one-sided PUT between processes, on whatever carrier UCX finds (RDMA, CMA, tcp).

Translates between the seam's values and the progress thread; makes no UCX call itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from pd_common.errors import InternalError, PdError, PeerLost, TransferFailed
from pd_common.transport.base import MemoryRegion, Puts, TransportInfo, WriteReceipt
from pd_common.transport.handover import repeated
from pd_common.transport.regions import Addresses, RegionTable, locate
from pd_common.transport.ucx.address import PortAddress
from pd_common.transport.ucx.binding import UCXContext
from pd_common.transport.ucx.inbound import Inbound
from pd_common.transport.ucx.interface import UNKNOWN_CARRIER, Binding, MemoryHandle, UCXError, pd_error
from pd_common.transport.ucx.library import WHEEL, load_library
from pd_common.transport.ucx.outbound import Outbound
from pd_common.transport.ucx.progress import ProgressThread
from pd_common.transport.ucx.settings import devices_of, network_devices, open_context, options_for, shown
from pd_common.transport.ucx.sgl import worth_a_probe
from pd_common.transport.ucx.write import Posting, Write

_log = logging.getLogger(__name__)
T = TypeVar("T")

_PROBE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class _Registered:
    """The regions known so far: replaced as a whole when one is added, so that any thread may look."""

    table: RegionTable
    memories: tuple[MemoryHandle, ...]
    put_params: tuple[Any, ...]


class UcxTransport:
    """One UCX context and one thread.

    `ucx_library`: `wheel`, `system` or the path of a libucp.so. `ib_device`: the network devices to use, separated by
    commas; None leaves the choice to UCX. `binding`: who calls UCX.
    """

    def __init__(self, ucx_library: str = WHEEL, ib_device: str | None = None, binding: Binding = UCXContext) -> None:
        devices = devices_of(ib_device)
        wanted = options_for(devices, os.environ)
        library = load_library(ucx_library)
        self._thread = ProgressThread("ucx-progress")
        self._probe_memory = np.zeros(_PROBE_BYTES, dtype=np.uint8)
        self._probe = MemoryRegion(self._probe_memory.ctypes.data, _PROBE_BYTES)
        self._registered = _Registered(RegionTable(()), (), ())
        try:
            opening = self._thread.submit(lambda: open_context(binding, library, devices, wanted))
            self._context, options = opening.result()
            self.register(self._probe)
        except PdError:
            self._thread.stop()
            raise
        resources = self._thread.submit(lambda: self._context.resources).result()
        self.info = TransportInfo(
            backend="ucx",
            library=library.path,
            version=library.version,
            transports=tuple(sorted({each.transport for each in resources})),
            devices=network_devices(resources),
            settings=shown(options, os.environ),
        )

    def register(self, region: MemoryRegion) -> None:
        known = self._registered
        if known.table.holds(region):
            return
        table = RegionTable((*known.table.regions, region))
        memory = self._call(lambda: self._context.map(region.base, region.length))
        memories = list(known.memories)
        memories.insert(table.regions.index(region), memory)
        self._registered = _Registered(table, tuple(memories), tuple(each.put_params for each in memories))

    def listen(self, regions: Sequence[MemoryRegion]) -> UcxPort:
        offer = (self._probe, *RegionTable(regions).regions)
        known = self._registered
        found = known.table.find(*_as_ranges(offer))
        if found is None:
            raise InternalError("a region that is not registered cannot be offered")
        memories = [known.memories[index] for index in found.tolist()]
        inbound, packed = self._call(lambda: Inbound.open(self._thread, self._context, offer, memories))
        return UcxPort(self._thread, inbound, packed)

    async def connect(self, address: bytes) -> UcxChannel:
        port = PortAddress.parse(address)
        table = RegionTable([each.region for each in port.offered])
        opening = self._thread.submit(lambda: Outbound.open(self._thread, self._context, port))
        try:
            outbound = await asyncio.shield(asyncio.wrap_future(opening))
            channel = UcxChannel(self._thread, outbound, table, self._snapshot)
            await channel.try_out(self._probe_posting(port, 1))
            channel.gathers = self._context.gathers and worth_a_probe(channel.carrier) and await self._gathers(port)
        except BaseException as error:
            self._thread.submit(lambda: _drop(opening))
            if isinstance(error, UCXError | PeerLost):
                raise TransferFailed(f"the port cannot be reached: {error}") from error
            raise
        return channel

    async def _gathers(self, port: PortAddress) -> bool:
        """Whether gathered puts reach this port: tried on a connection of their own, which they may break."""
        opening = self._thread.submit(lambda: Outbound.open(self._thread, self._context, port))
        try:
            outbound = await asyncio.shield(asyncio.wrap_future(opening))
            trial = UcxChannel(self._thread, outbound, RegionTable(()), self._snapshot, gathers=True)
            await trial.try_out(self._probe_posting(port, 2))
        except (UCXError, PeerLost, TransferFailed) as error:
            _log.info("gathered puts do not reach this peer, one call per put does: %s", error)
            return False
        finally:
            self._thread.submit(lambda: _drop(opening))
        return True

    async def watch(self) -> None:
        await self._thread.watch()

    async def close(self) -> None:
        if self._thread.closed:
            return
        closings = self._thread.submit(lambda: [driven.close() for driven in self._thread.driven])
        for closing in await asyncio.wrap_future(closings):
            await asyncio.wrap_future(closing)
        await asyncio.wrap_future(self._thread.submit(self._release))
        self._thread.stop()

    def _release(self) -> None:
        memories, self._registered = self._registered.memories, _Registered(RegionTable(()), (), ())
        for memory in memories:
            memory.unmap()
        if memories:
            self._context.close()

    def _snapshot(self) -> _Registered:
        return self._registered

    def _call(self, command: Callable[[], T]) -> T:
        """Runs a command on the thread and waits: for the rare calls of the seam that are not coroutines."""
        try:
            return self._thread.submit(command).result()
        except UCXError as error:
            raise pd_error(error) from error

    def _probe_posting(self, port: PortAddress, pieces: int) -> Posting:
        """A write of the peer's range for probes, in so many puts."""
        index = self._registered.table.regions.index(self._probe)
        params = self._registered.memories[index].traced_put_params
        size = min(self._probe.length, port.probe.region.length) // pieces
        steps, zeros = np.arange(pieces, dtype=np.int64) * size, np.zeros(pieces, dtype=np.int64)
        puts = Puts(steps + self._probe.base, steps + port.probe.region.base, zeros + size)
        return Posting.of(puts, zeros, zeros, (params,))


class UcxPort:
    """A worker of its own for one peer."""

    def __init__(self, thread: ProgressThread, inbound: Inbound, address: bytes) -> None:
        self.address = address
        self._thread = thread
        self._inbound = inbound

    async def fence(self) -> None:
        if not self._thread.closed:
            await asyncio.shield(asyncio.wrap_future(self._thread.submit(self._inbound.close)))


class UcxChannel:
    """One endpoint, and the table of what its peer has offered."""

    def __init__(
        self,
        thread: ProgressThread,
        outbound: Outbound,
        offered: RegionTable,
        registered: Callable[[], _Registered],
        *,
        gathers: bool = False,
    ) -> None:
        self.gathers = gathers
        """Many puts may go in one call."""
        self._thread = thread
        self._outbound = outbound
        self._offered = offered
        self._registered = registered

    @property
    def carrier(self) -> str:
        return self._outbound.carrier or UNKNOWN_CARRIER

    async def write(self, *groups: Puts) -> WriteReceipt:
        started = time.perf_counter()
        if self._outbound.error is not None:
            raise repeated(self._outbound.error)
        registered = self._registered()
        postings = tuple(self._resolve(puts, registered) for puts in groups if len(puts))
        if not postings:
            return WriteReceipt(bytes=0, descriptors=0, posting_seconds=0.0, seconds=time.perf_counter() - started)
        return await self._written(postings, started)

    async def try_out(self, probe: Posting) -> None:
        """Waits until the peer answers, then writes where it does not matter, which also shows what carries a write."""
        empty = np.empty(0, dtype=np.int64)
        greeting = Posting.of(Puts(empty, empty, empty), empty, empty, ())
        await self._written((greeting, probe), time.perf_counter())

    async def close(self) -> None:
        if not self._thread.closed:
            closing = self._thread.submit(self._outbound.close)
            closed = await asyncio.shield(asyncio.wrap_future(closing))
            await asyncio.shield(asyncio.wrap_future(closed))

    async def _written(self, postings: tuple[Posting, ...], started: float) -> WriteReceipt:
        done: asyncio.Future[WriteReceipt] = asyncio.get_running_loop().create_future()
        self._thread.submit(lambda: self._outbound.write(Write(postings, started, done, self.gathers)))
        return await done

    def _resolve(self, puts: Puts, registered: _Registered) -> Posting:
        sources, targets = locate(puts, registered.table, self._offered)
        return Posting.of(puts, targets + 1, sources, registered.put_params)


def _as_ranges(regions: Sequence[MemoryRegion]) -> tuple[Addresses, Addresses]:
    return (
        np.array([region.base for region in regions], dtype=np.int64),
        np.array([region.length for region in regions], dtype=np.int64),
    )


def _drop(opening: Future[Outbound]) -> None:
    """Runs on the thread after `opening` did: nobody wants the connection any more."""
    if opening.exception() is None:
        opening.result().close()
