"""One life of a prefill and of a decode process, wired as in production but for engine and transport."""

from __future__ import annotations

import itertools
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, cast

from pd_common.control.abort_servicer import AbortServicer
from pd_common.control.bootstrap_servicer import BootstrapServicer
from pd_common.control.connection import dial_plain
from pd_common.control.generation_servicer import EngineGenerationServicer
from pd_common.control.outputs import OutputHub
from pd_common.control.registry import Registry
from pd_common.control.status_servicer import TransferStatusServicer
from pd_common.engine.engine import Engine
from pd_common.handoff.canary import CanaryMemory
from pd_common.handoff.deadlines import Timeouts
from pd_common.handoff.metadata import MetadataBuffers
from pd_common.handoff.table import TransferTable
from pd_common.kv.prefix import PrefixCache
from pd_common.transport.base import Transport
from pd_common.transport.loopback import Faults, LoopbackNetwork, LoopbackTransport
from pd_common.types import Instance, Role
from services.decode.drain import Drain
from services.decode.pairing import OwnMemory
from services.decode.prefills import Prefills
from services.decode.queues import PreallocQueue
from services.decode.scheduler import DecodeScheduler
from services.decode.service import DecodeService
from services.prefill.receivers import Receivers
from services.prefill.scheduler import PrefillScheduler
from services.prefill.service import PrefillService
from services.prefill.servicers import PageAllocationServicer
from tests.control.fake_rooms import FakeModel
from tests.services.byte_engine import ByteEngine
from tests.services.two_ways import TwoWays

GENEROUS = Timeouts(bootstrap_s=300.0, waiting_s=300.0)

_epochs = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Real:
    """For a life that is a process of its own: its name, its data plane, and 64-bit marks per token and buffer."""

    instance: Instance
    transport: Transport
    width: int


class PrefillLife:
    """One life of a prefill process, as services/prefill/__main__.py wires it."""

    def __init__(
        self,
        network: LoopbackNetwork,
        pages: int,
        slots: int,
        chunk_tokens: int,
        retention_s: float,
        real: Real | None = None,
        timeouts: Timeouts = GENEROUS,
    ) -> None:
        self.instance = Instance(f"prefill-{(epoch := next(_epochs))}", epoch) if real is None else real.instance
        self.engine = ByteEngine(pages, 1 if real is None else real.width)
        engine = cast("Engine", self.engine)
        self.metadata = MetadataBuffers(slots)
        self.canaries = CanaryMemory(self.engine.layout.page_bytes)
        self.faults, self.canary_faults = Faults(), Faults()
        loopback = TwoWays(network, self.faults, self.canary_faults, self.canaries.region)
        self.transport: Transport = loopback if real is None else real.transport
        for region in (*self.engine.pool.regions, self.metadata.region, self.canaries.region):
            self.transport.register(region)
        self.hub = OutputHub()
        self.transfers = TransferTable(Role.PREFILL, retention_s, 1000, timeouts)
        self.prefixes = PrefixCache(self.engine.pages, self.engine.pool.page_size)
        self.scheduler = PrefillScheduler(engine, self.prefixes, chunk_tokens, max_running=slots)
        self.service = PrefillService(
            self.instance,
            engine,
            self.scheduler,
            self.engine.pool.buffers,
            self.metadata,
            self.transfers,
            self.hub,
            new_digest=self.engine.pool.new_digest,
        )
        self.receivers = Receivers(
            self.engine.layout, self.transport, self.canaries, self.service.receiver_lost, dial_plain
        )
        self.service.use(self.receivers)
        self.servicers: dict[str, Any] = {
            "bootstrap": BootstrapServicer(Registry(Role.PREFILL, self.instance.epoch)),
            "page_allocation": PageAllocationServicer(self.service, self.receivers),
            "transfer_status": TransferStatusServicer(self.service),
            "abort": AbortServicer(self.service),
            "generation": EngineGenerationServicer(self.service, self.hub, FakeModel()),
        }

    def works(self) -> tuple[Coroutine[Any, Any, None], ...]:
        return self.scheduler.run(), self.service.reap()

    def assert_untouched(self) -> None:
        """Nothing is held, nothing is remembered as running; what is cached can be had."""
        status = self.service.pool_status()
        whole = (status.pages_free + status.pages_cached, status.slots_free, status.live_rooms)
        assert whole == (status.pages_total, status.slots_total, 0)
        assert self.service._free_slots._value == status.slots_total
        assert (list(self.scheduler._waiting), self.scheduler._running) == ([], [])
        assert (self.transfers.live(), self.hub._owner) == ([], {})
        self.prefixes.check_integrity()

    async def close(self) -> None:
        await self.receivers.close()
        await self.transport.close()


class DecodeLife:
    """One life of a decode process, as services/decode/__main__.py wires it."""

    def __init__(
        self,
        network: LoopbackNetwork,
        pages: int,
        slots: int,
        retention_s: float,
        real: Real | None = None,
        timeouts: Timeouts = GENEROUS,
    ) -> None:
        self.instance = Instance(f"decode-{(epoch := next(_epochs))}", epoch) if real is None else real.instance
        self.engine = ByteEngine(pages, 1 if real is None else real.width)
        engine = cast("Engine", self.engine)
        self.metadata = MetadataBuffers(slots)
        self.transport: Transport = LoopbackTransport(network) if real is None else real.transport
        self.canaries = CanaryMemory(self.engine.layout.page_bytes)
        self.regions = (*self.engine.pool.regions, self.metadata.region, self.canaries.region)
        for region in self.regions:
            self.transport.register(region)
        self.hub = OutputHub()
        self.transfers = TransferTable(Role.DECODE, retention_s, 1000, timeouts)
        self.prealloc = PreallocQueue(self.engine.pages, self.metadata)
        self.scheduler = DecodeScheduler(engine, self.hub, max_running=slots)
        self.drain = Drain(self.prealloc.release, dial_plain)
        self.service = DecodeService(
            self.instance,
            engine,
            self.scheduler,
            self.prealloc,
            self.drain,
            self.engine.pool.buffers,
            self.metadata,
            self.transfers,
            self.hub,
            new_digest=self.engine.pool.new_digest,
        )
        self.servicers: dict[str, Any] = {
            "transfer_status": TransferStatusServicer(self.service),
            "abort": AbortServicer(self.service),
            "generation": EngineGenerationServicer(self.service, self.hub, FakeModel()),
        }

    def wire(self, address: str) -> None:
        """Once it is known where this process is reached."""
        pool = self.engine.pool.buffers
        own = OwnMemory(self.instance, address, self.engine.layout, pool, self.regions, self.metadata, self.canaries)
        self.prefills = Prefills(own, self.transport, self.service.prefill_lost, self.service.proven, dial_plain)
        self.service.use(self.prefills)

    def works(self) -> tuple[Coroutine[Any, Any, None], ...]:
        return self.scheduler.run(), self.service.reap()

    def assert_untouched(self) -> None:
        """Nothing is held, nothing is remembered as running."""
        status = self.service.pool_status()
        assert (status.pages_quarantined, status.slots_quarantined) == (0, 0)
        assert (status.pages_free, status.slots_free, status.live_rooms) == (status.pages_total, status.slots_total, 0)
        assert [turn for _, turn in self.prealloc._waiting if not turn.cancelled()] == []
        assert (self.scheduler._answers, self.transfers.live(), self.hub._owner) == ([], [], {})
        self.engine.pages.check_integrity()

    async def close(self) -> None:
        await self.prefills.close()
        await self.drain.close()
        await self.transport.close()


Life = PrefillLife | DecodeLife
