"""One life of a prefill and of a decode process, wired as in production but for engine and transport."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

from pd_common.control.abort_servicer import AbortServicer
from pd_common.control.bootstrap_servicer import BootstrapServicer
from pd_common.control.connection import dial_plain
from pd_common.control.generation_servicer import EngineGenerationServicer
from pd_common.control.outputs import OutputHub
from pd_common.control.registry import Registry
from pd_common.control.status_servicer import TransferStatusServicer
from pd_common.control.waiting import WaitingLimits
from pd_common.engine.engine import Engine
from pd_common.engine.request import Sequence
from pd_common.generation import GenerationRequest, SamplingParams
from pd_common.handoff.canary import CanaryMemory
from pd_common.handoff.deadlines import Timeouts
from pd_common.handoff.metadata import MetadataBuffers
from pd_common.handoff.table import TransferTable
from pd_common.kv.prefix import PrefixCache
from pd_common.telemetry.tracing import Tracing
from pd_common.transport.base import Transport
from pd_common.transport.loopback import Faults, LoopbackNetwork, LoopbackTransport
from pd_common.types import BootstrapRoom, Instance, Role
from services.decode.answering import Answering
from services.decode.drain import Drain
from services.decode.handoff import Handoff
from services.decode.host_copies import HostCopies
from services.decode.lookout import Lookout
from services.decode.memory import DecodeMemory
from services.decode.pairing import OwnMemory
from services.decode.prefills import Prefills
from services.decode.queues import PreallocQueue
from services.decode.refetch import Refetch
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
NO_LIMITS = WaitingLimits(max_queued=0, queue_timeout_s=300.0)

_epochs = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Growth:
    """How a decode lets answers grow, and what may wait."""

    reserved_tokens: int = 512
    host_pages: int = 1024
    chunk_tokens: int = 8
    retract_every: int = 0
    keeps_prefixes: bool = True
    limits: WaitingLimits = NO_LIMITS


USUAL = Growth()


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
        self.scheduler = PrefillScheduler(engine, self.prefixes, chunk_tokens, max_running=slots, audited=True)
        self.service = PrefillService(
            self.instance,
            engine,
            self.scheduler,
            self.engine.pool.buffers,
            self.metadata,
            self.transfers,
            self.hub,
            NO_LIMITS,
            Tracing(),
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

    def fill(self) -> Callable[[], None]:
        """Takes all pages that can be had; gives what gives them back."""
        pages = self.prefixes.alloc(self.prefixes.num_available)
        assert pages is not None

        def give_back() -> None:
            self.prefixes.free(pages)
            self.scheduler._blocked = None
            self.scheduler._work.set()

        return give_back

    def assert_untouched(self) -> None:
        """Every counter is where it was at the start: nothing is held, nothing is remembered as running."""
        status, service, scheduler = self.service.pool_status(), self.service, self.scheduler
        assert_nothing(
            pages=status.pages_total - status.pages_free - status.pages_cached,
            slots=status.slots_total - status.slots_free,
            places=status.slots_total - service._handovers._free_slots._value,
            canaries=self.canaries.num_pages - self.canaries._free.qsize(),
            rooms=service._rooms,
            offers=service._offered,
            tasks=unfinished(service._tasks),
            jobs=(*scheduler._waiting, *scheduler._running, *scheduler._prefix_of, *scheduler._stepping),
            **_remembered(self.transfers, self.hub),
        )
        self.prefixes.check_integrity(owned=(), held=())

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
        growth: Growth = USUAL,
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
        page_size = self.engine.pool.page_size
        self.prefixes = PrefixCache(self.engine.pages, page_size, keeps=growth.keeps_prefixes)
        self.memory = DecodeMemory(self.prefixes, self.metadata, page_size)
        self.queue = PreallocQueue(self.memory, rows=slots, reserved_tokens=growth.reserved_tokens)
        self.copies = HostCopies(engine, growth.host_pages)
        self.scheduler = DecodeScheduler(
            engine,
            self.memory,
            self.hub,
            self.copies,
            max_running=slots,
            chunk_tokens=growth.chunk_tokens,
            retract_every=growth.retract_every,
            audit=self.memory.check_integrity,
        )
        self.lookout = Lookout(self.metadata)
        self.handoff = Handoff(
            self.instance,
            engine,
            self.queue,
            self.engine.pool.buffers,
            self.metadata,
            self.lookout,
            self.transfers,
            new_digest=self.engine.pool.new_digest,
        )
        self.answering = Answering(engine, self.scheduler, self.memory, self.queue, self.copies, self.hub)
        self.drain = Drain(self.queue.take_back, dial_plain)
        self.service = DecodeService(
            self.instance,
            engine,
            self.memory,
            self.queue,
            self.handoff,
            self.answering,
            self.drain,
            self.copies,
            self.transfers,
            self.hub,
            growth.limits,
            Tracing(),
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
        self.refetch = Refetch(self.service, self.handoff, self.prefills, None)
        self.answering.use(self.refetch.again)

    def works(self) -> tuple[Coroutine[Any, Any, None], ...]:
        return self.scheduler.run(), self.service.reap(), self.lookout.run()

    def fill(self) -> Callable[[], None]:
        """Takes all pages that can be had; gives what gives them back."""
        tokens = self.memory.pages_available * self.memory.page_size
        sampling = SamplingParams(max_new_tokens=1)
        request = GenerationRequest("filler", BootstrapRoom(1), None, (0,) * tokens, sampling)
        allocation = self.memory.allocate(Sequence(request), 0, slot=False)
        assert allocation is not None
        return lambda: self.queue.release(allocation)

    def assert_untouched(self) -> None:
        """Every counter is where it was at the start: nothing is held, nothing is remembered as running."""
        status, service, scheduler = self.service.pool_status(), self.service, self.scheduler
        assert_nothing(
            pages=status.pages_total - status.pages_free - status.pages_cached,
            slots=status.slots_total - status.slots_free,
            quarantine=self.drain.quarantine.held,
            canaries=self.canaries.num_pages - self.canaries._free.qsize(),
            copies=self.copies._held,
            allocations=self.memory._held,
            written=self.memory._written,
            line=self.queue._line,
            answers=(*scheduler._answers._answers, *scheduler._in_use),
            rooms=service._rooms,
            watched=self.lookout._watched,
            questions=service._inquiry._asking,
            tasks=self.unfinished(),
            **_remembered(self.transfers, self.hub),
        )
        self.memory.check_integrity()

    def unfinished(self) -> list[asyncio.Task[Any]]:
        """What goes on for rooms, perhaps after their end."""
        tasks = unfinished(self.service._tasks), unfinished(self.drain._tasks), unfinished(self.refetch._legs)
        return [*chain.from_iterable(tasks), *unfinished(self.prefills._meetings.values())]

    async def close(self) -> None:
        await self.refetch.close()
        await self.prefills.close()
        await self.drain.close()
        await self.transport.close()


Life = PrefillLife | DecodeLife


def assert_nothing(**left: Any) -> None:
    """Names what there is."""
    found = {name: what for name, what in left.items() if what}
    assert not found, f"left behind: {found}"


def unfinished(tasks: Iterable[asyncio.Task[Any]]) -> list[asyncio.Task[Any]]:
    return [task for task in tasks if not task.done()]


def _remembered(transfers: TransferTable, hub: OutputHub) -> dict[str, Any]:
    """Of rooms that have not ended, or have been forgotten."""
    heard = transfers._heard.keys() - transfers._by_change.keys()
    return {"records": transfers.live(), "heard": heard, "owners": hub._owner}
