"""Transport over NIXL: one-sided WRITE between processes through the UCX that the `nixl-cu12` wheel carries.

Translates between the seam's values and the NIXL thread; makes no NIXL call itself.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import numpy as np

from pd_common.errors import InternalError, PeerLost, TransferFailed, TransportUnavailable
from pd_common.transport.base import MemoryRegion, Puts, TransportInfo, WriteReceipt
from pd_common.transport.frame import Frame
from pd_common.transport.handover import repeated
from pd_common.transport.nixl.binding import NixlAgent, NixlError, pd_error
from pd_common.transport.nixl.library import load_library, plugin_parameters, rdma_devices, without_unused_efa
from pd_common.transport.nixl.outbound import Outbound
from pd_common.transport.nixl.thread import NixlThread
from pd_common.transport.nixl.write import Write
from pd_common.transport.offer import KeylessOffer
from pd_common.transport.regions import RegionTable, locate
from pd_common.transport.ucx.settings import options_for, shown

T = TypeVar("T")

FRAME = Frame(b"PDNX", 1, "NIXL port")
"""Round NIXL's metadata as it is: it holds the keys for the regions and is never looked into."""
_PROBE_BYTES = 64 * 1024
_CARRIER = "ucx"
"""NIXL tells nobody which of UCX's transports carries a write."""


class NixlTransport:
    """One thread, and one NIXL agent for each port and each channel. `ib_device`: RDMA devices, with commas."""

    def __init__(self, ib_device: str | None = None) -> None:
        devices = rdma_devices(ib_device)
        options = options_for((), os.environ)  # it is UCX all the same
        self._library = load_library()
        self._parameters = plugin_parameters(devices, options)
        self.info = TransportInfo(
            "nixl", self._library.path, self._library.version, (_CARRIER,), devices, shown(options, os.environ)
        )
        self._probe_memory = np.zeros(_PROBE_BYTES, dtype=np.uint8)
        self._probe = MemoryRegion(self._probe_memory.ctypes.data, _PROBE_BYTES)
        self._registered = RegionTable(())
        self._ports: list[NixlAgent] = []
        self._thread = NixlThread("nixl")
        try:
            with without_unused_efa():
                self._thread.submit(self._try_out).result()
        except NixlError as error:
            self._thread.stop()
            raise TransportUnavailable(f"NIXL does not start: {error}") from error

    def register(self, region: MemoryRegion) -> None:
        if not self._registered.holds(region):
            table = RegionTable((*self._registered.regions, region))
            self._call(lambda: self._register(region, table))

    def listen(self, regions: Sequence[MemoryRegion]) -> NixlPort:
        offered = RegionTable(regions).regions
        if not all(self._registered.holds(region) for region in offered):
            raise InternalError("a region that is not registered cannot be offered")
        agent, address = self._call(lambda: self._listen(offered))
        return NixlPort(self._thread, lambda: self._close_port(agent), address)

    async def connect(self, address: bytes) -> NixlChannel:
        port = KeylessOffer.parse(address, FRAME)
        opening = self._thread.submit(lambda: Outbound.open(self._thread, self._sending_agent, port.peer))
        try:
            outbound = await asyncio.shield(asyncio.wrap_future(opening))
            channel = NixlChannel(self._thread, outbound, RegionTable(port.offered), self._snapshot)
            await channel.try_out(self._probe_puts(port))
        except BaseException as error:
            self._thread.submit(lambda: _drop(opening))
            if isinstance(error, NixlError | PeerLost):
                raise TransferFailed(f"the port cannot be reached: {error}") from error
            raise
        return channel

    async def watch(self) -> None:
        await self._thread.watch()

    async def close(self) -> None:
        if not self._thread.closed:
            await asyncio.wrap_future(self._thread.submit(self._release))
            self._thread.stop()

    def _snapshot(self) -> RegionTable:
        return self._registered

    def _probe_puts(self, port: KeylessOffer) -> Puts:
        size = min(self._probe.length, port.probe.length)
        return Puts(*(np.array([value]) for value in (self._probe.base, port.probe.base, size)))

    def _call(self, command: Callable[[], T]) -> T:
        """Runs a command on the thread and waits: for the rare calls of the seam that are not coroutines."""
        try:
            return self._thread.submit(command).result()
        except NixlError as error:
            raise pd_error(error) from error

    # --- the NIXL thread --------------------------------------------------------------------------------------------

    def _try_out(self) -> None:
        NixlAgent(self._library, self._parameters, receives=False).close()

    def _register(self, region: MemoryRegion, table: RegionTable) -> None:
        for driven in self._thread.driven:
            driven.register(region)
        self._registered = table

    def _sending_agent(self) -> NixlAgent:
        return self._agent((self._probe, *self._registered.regions), receives=False)

    def _listen(self, offered: Sequence[MemoryRegion]) -> tuple[NixlAgent, bytes]:
        agent = self._agent((self._probe, *offered), receives=True)
        self._ports.append(agent)
        return agent, KeylessOffer(agent.metadata(), self._probe, tuple(offered)).pack(FRAME)

    def _agent(self, regions: Sequence[MemoryRegion], *, receives: bool) -> NixlAgent:
        agent = NixlAgent(self._library, self._parameters, receives=receives)
        try:
            for region in regions:
                agent.register(region)
        except NixlError:
            agent.close()
            raise
        return agent

    def _close_port(self, agent: NixlAgent) -> None:
        if agent in self._ports:
            self._ports.remove(agent)
            agent.close()

    def _release(self) -> None:
        for driven in self._thread.driven:
            driven.break_off(TransferFailed("the transport was closed"))
        for agent in tuple(self._ports):
            self._close_port(agent)


class NixlPort:
    """An agent of its own for one peer."""

    def __init__(self, thread: NixlThread, close: Callable[[], None], address: bytes) -> None:
        self.address = address
        self._thread = thread
        self._close = close

    async def fence(self) -> None:
        if not self._thread.closed:
            await asyncio.shield(asyncio.wrap_future(self._thread.submit(self._close)))


class NixlChannel:
    """One connection, and the table of what its peer has offered."""

    def __init__(
        self, thread: NixlThread, outbound: Outbound, offered: RegionTable, registered: Callable[[], RegionTable]
    ) -> None:
        self._thread = thread
        self._outbound = outbound
        self._offered = offered
        self._registered = registered

    @property
    def carrier(self) -> str:
        return _CARRIER

    async def write(self, *groups: Puts) -> WriteReceipt:
        started = time.perf_counter()
        if self._outbound.error is not None:
            raise repeated(self._outbound.error)
        for puts in groups:
            locate(puts, self._registered(), self._offered)
        return await self._written(groups, started)

    async def try_out(self, probe: Puts) -> None:
        """Writes where it does not matter, which shows whether the peer answers."""
        await self._written((probe,), time.perf_counter())

    async def close(self) -> None:
        if not self._thread.closed:
            await asyncio.shield(asyncio.wrap_future(self._thread.submit(self._outbound.close)))

    async def _written(self, groups: Sequence[Puts], started: float) -> WriteReceipt:
        done: asyncio.Future[WriteReceipt] = asyncio.get_running_loop().create_future()
        write = Write(groups, started, done)
        if write.finished:
            return write.receipt()
        self._thread.submit(lambda: self._outbound.write(write))
        return await done


def _drop(opening: Future[Outbound]) -> None:
    """Runs on the thread after `opening` did: nobody wants the connection any more."""
    if opening.exception() is None:
        opening.result().close()
