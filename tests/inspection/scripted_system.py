"""Processes as an inspection meets them: real servers, real tables and traces; what happens there a test says."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pd.v1 import inspection_pb2

from pd_common.control import convert, server
from pd_common.control.abort_servicer import AbortServicer
from pd_common.control.bootstrap_servicer import BootstrapServicer
from pd_common.control.connection import dial_plain
from pd_common.control.inspection_servicer import InspectionServicer, describe
from pd_common.control.outputs import OutputHub
from pd_common.control.peers import Peer
from pd_common.control.registry import Registry
from pd_common.control.server import ControlServer
from pd_common.control.status_servicer import TransferStatusServicer
from pd_common.errors import PdError
from pd_common.handoff.deadlines import Timeouts
from pd_common.handoff.destination import Offer
from pd_common.handoff.metadata import Slot
from pd_common.handoff.state import Progress, TransferState
from pd_common.handoff.table import TransferTable
from pd_common.inspection.inspector import Inspector
from pd_common.telemetry import spans
from pd_common.telemetry.spans import SpanName
from pd_common.telemetry.tracing import RoomTrace, Tracing
from pd_common.types import BootstrapRoom, Instance, KvLayout, RankInfo, RankPosition, Role
from tests.control.fake_rooms import FakeRooms
from tests.control.serving import DATA_PLANE, LAYOUT, LOOPBACK

_LEG = {Role.ROUTER: SpanName.ROUTE, Role.PREFILL: SpanName.PREFILL, Role.DECODE: SpanName.DECODE}


class ScriptedProcess:
    """One process; the router, too, has a table here, which nobody asks for."""

    def __init__(self, role: Role, name: str) -> None:
        self.role = role
        self.rooms = FakeRooms(OutputHub())
        self.rooms.instance = self.instance = Instance(f"{role}-{name}", time.time_ns() // 1000)
        self.rooms.transfers = self.table = TransferTable(
            role, 60.0, 10_000, Timeouts(300.0, 300.0), sequence=self.instance.epoch
        )
        self.tracing = Tracing()
        self.registry = Registry(Role.PREFILL, 1)
        self.described = describe(self.instance, role, "tiny")
        self.port = 0

    async def start(self) -> None:
        services = [
            server.abort(AbortServicer(self.rooms)),
            server.inspection(InspectionServicer(self._describe, self.tracing)),
            server.bootstrap(BootstrapServicer(self.registry)),
        ]
        if self.role is not Role.ROUTER:
            services.append(server.transfer_status(TransferStatusServicer(self.rooms)))
        self._control = ControlServer(services)
        self.port = await self._control.start(LOOPBACK, self.port)

    async def stop(self) -> None:
        """As if it were killed; it may be started again."""
        await self._control.stop(grace_s=0.0)

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.port}"

    def serves(self, worker: ScriptedProcess) -> None:
        """A router that has this worker."""
        self.described.workers.add(role=convert.role_to(worker.role), control_address=worker.address, live=True)

    def paired_with(self, peer: ScriptedProcess) -> None:
        pairing = Peer(peer.instance, peer.role, peer.address, "cma", time.monotonic(), None, 0)
        self.rooms.paired = (*self.rooms.paired, pairing)

    def registered(self, *ranks: ScriptedProcess, layout: KvLayout = LAYOUT) -> None:
        """A directory that knows them all."""
        for place, rank in enumerate(ranks):
            position = RankPosition(place, len(ranks))
            self.registry.register(
                RankInfo(rank.instance, rank.role, position, rank.address, layout, DATA_PLANE), time.monotonic()
            )

    def open(self, number: int, *, peer: ScriptedProcess | None = None) -> BootstrapRoom:
        """A room that has not met the other side, or has if there is a peer."""
        room, now = BootstrapRoom(number), time.monotonic()
        self.table.open(room, rid=f"r{number}", prompt_digest=b"", deadline_s=now + 60.0, now=now)
        if peer is not None:
            self.meet(room, peer.instance)
        return room

    def meet(self, room: BootstrapRoom, peer: Instance) -> None:
        """WAITING_FOR_INPUT: decode has made its offer."""
        now = time.monotonic()
        if self.role is Role.PREFILL:
            self.table.join_offer(room, Offer(peer, (1,), Slot(0, 1), 0, 1, b""), deadline_s=now + 60.0, now=now)
        else:
            self.table.advance(room, TransferState.WAITING_FOR_INPUT, now, peer=peer)

    def progress(self, room: BootstrapRoom, pages: int) -> None:
        """TRANSFERRING, with as many pages written."""
        if self.table.get(room).state is TransferState.BOOTSTRAPPING:
            self.meet(room, Instance("other-side", 1))
        done = Progress(1, pages, pages * 1024)
        self.table.advance(room, TransferState.TRANSFERRING, time.monotonic(), progress=done)

    def succeed(self, room: BootstrapRoom) -> None:
        self.progress(room, 1)
        self.table.advance(room, TransferState.SUCCESS, time.monotonic())

    def fail(self, room: BootstrapRoom, error: PdError) -> None:
        self.table.fail(room, error, time.monotonic())

    def leg(self, room: BootstrapRoom) -> RoomTrace:
        """Lasts until its `end`."""
        return self.tracing.begin(_LEG[self.role], room, spans.of_room(room))

    def _describe(self) -> inspection_pb2.GetProcessResponse:
        copy = inspection_pb2.GetProcessResponse()
        copy.CopyFrom(self.described)
        return copy


class ScriptedSystem:
    """A router with one prefill and one decode that are paired."""

    def __init__(self) -> None:
        self.router = ScriptedProcess(Role.ROUTER, "0")
        self.prefill = ScriptedProcess(Role.PREFILL, "0")
        self.decode = ScriptedProcess(Role.DECODE, "0")
        self.processes = (self.router, self.prefill, self.decode)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Inspector]:
        """Gives an inspector that knows the router."""
        for process in self.processes:
            await process.start()
        self.router.serves(self.prefill)
        self.router.serves(self.decode)
        self.decode.paired_with(self.prefill)
        self.prefill.paired_with(self.decode)
        self.prefill.registered(self.prefill)
        inspector = Inspector([(self.router.address, Role.ROUTER)], dial_plain)
        try:
            yield inspector
        finally:
            await inspector.close()
            for process in self.processes:
                await process.stop()
