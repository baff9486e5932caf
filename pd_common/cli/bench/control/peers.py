"""Decode processes as one prefill sees them, without what is behind them: many in one process of the bench."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import grpc
from opentelemetry.context import Context
from pd.v1 import transfer_status_pb2

from pd_common.cli.bench.control.load import PROMPT_TOKENS, Leg, make_request
from pd_common.cli.bench.control.result import Latency, Peers
from pd_common.cli.bench.processes import LOOPBACK, Service
from pd_common.control.bootstrap_client import BootstrapClient
from pd_common.control.connection import Connection
from pd_common.control.generation_client import GenerationClient
from pd_common.control.peer_client import PeerClient
from pd_common.errors import PdError
from pd_common.handoff.destination import Offer
from pd_common.handoff.digest import digest_prompt
from pd_common.handoff.metadata import ROW_BYTES, Slot
from pd_common.types import BootstrapAddress, BootstrapRoom, Instance, RankInfo

_PAGES, _BASE = 64, 2**32
_JOIN_AT_ONCE = 16
_BEATS_S = 5.0
_FIRST_ROOM = 2**40
_TIME_LEFT_S = 60.0


async def _agree(
    request: transfer_status_pb2.ReportTransferRequest,
    context: grpc.aio.ServicerContext[Any, Any],  # noqa: ARG001
) -> transfer_status_pb2.ReportTransferResponse:
    """Whatever prefill says of a room, it is so here too."""
    return transfer_status_pb2.ReportTransferResponse(state=request.state)


_REPORTS = grpc.method_handlers_generic_handler(
    transfer_status_pb2.DESCRIPTOR.services_by_name["TransferStatus"].full_name,
    {
        "ReportTransfer": grpc.unary_unary_rpc_method_handler(
            _agree,
            transfer_status_pb2.ReportTransferRequest.FromString,
            transfer_status_pb2.ReportTransferResponse.SerializeToString,
        )
    },
)


class SimulatedDecode:
    """One of them, over a connection of its own."""

    def __init__(self, number: int, control_address: str, prefill: BootstrapAddress) -> None:
        self.instance = Instance(f"bench-decode-{number}", number + 1)
        self._control_address = control_address
        self._connection = Connection(prefill.target)
        self._client = PeerClient(self._connection)
        self._held: asyncio.Task[None] | None = None

    async def join(self, rank: RankInfo) -> None:
        """Registers and holds on."""
        await self._client.register_receiver(
            receiver=self.instance,
            registration=1,
            sender=rank.instance,
            control_address=self._control_address,
            layout=rank.layout,
            data_address=b"fake",
            buffer_bases=[_BASE] * len(rank.layout.buffers),
            num_pages=_PAGES,
            metadata_base=_BASE,
            metadata_item_len_bytes=ROW_BYTES,
            metadata_slots=_PAGES,
            canary_base=_BASE,
            canary_pages=1,
        )
        first_beat = asyncio.Event()
        self._held = asyncio.create_task(self._hold(rank, first_beat))
        await first_beat.wait()

    @property
    def is_lost(self) -> bool:
        return self._held is None or self._held.done()

    async def offer(self, room: BootstrapRoom, rank: RankInfo, prompt: Sequence[int]) -> float:
        """Offers pages for a room; gives the seconds until the answer."""
        pages = tuple(range(-(-PROMPT_TOKENS // rank.layout.page_size)))
        offer = Offer(self.instance, pages, Slot(0, 1), 0, len(prompt), digest_prompt(prompt))
        began_s = time.perf_counter()
        await self._client.allocate_pages(room, rank.instance, 1, offer, _TIME_LEFT_S, Context())
        return time.perf_counter() - began_s

    async def leave(self) -> None:
        if self._held is not None:
            self._held.cancel()
            await asyncio.gather(self._held, return_exceptions=True)
        await self._connection.close()

    async def _hold(self, rank: RankInfo, first_beat: asyncio.Event) -> None:
        with suppress(PdError):  # the end of this task says enough
            async for _ in self._client.hold_receiver(self.instance, rank.instance, 1):
                first_beat.set()


async def measure(prefill: Service, address: BootstrapAddress, count: int) -> Peers:
    """Pairs `count` simulated decodes with the prefill, watches their beats for a while, and sends a room to each.

    Raises:
        PdError: one of them could not be paired, or its room failed.

    """
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_REPORTS,))
    ports = [server.add_insecure_port(f"{LOOPBACK}:0") for _ in range(count)]
    await server.start()
    decodes = [SimulatedDecode(number, f"{LOOPBACK}:{port}", address) for number, port in enumerate(ports)]
    directory = Connection(address.target)
    try:
        (rank,) = (await BootstrapClient(directory).get_topology()).ranks
        before = prefill.resident_bytes
        join_s = await _join(decodes, rank)
        cpu_share = await _beats(prefill)
        latency = Latency.of(await _rooms(decodes, rank, address, directory))
        grown = prefill.resident_bytes - before
        lost = sum(decode.is_lost for decode in decodes)
        return Peers(count, join_s, lost, grown / 1024 / count, cpu_share, latency)
    finally:
        for decode in decodes:
            await decode.leave()
        await directory.close()
        await server.stop(None)


async def _join(decodes: Sequence[SimulatedDecode], rank: RankInfo) -> float:
    began_s = time.perf_counter()
    turns = asyncio.Semaphore(_JOIN_AT_ONCE)

    async def join(decode: SimulatedDecode) -> None:
        async with turns:
            await decode.join(rank)

    await asyncio.gather(*(join(decode) for decode in decodes))
    return time.perf_counter() - began_s


async def _beats(prefill: Service) -> float:
    """Processor time per second while there is nothing else to do."""
    before_s = prefill.cpu_s
    await asyncio.sleep(_BEATS_S)
    return (prefill.cpu_s - before_s) / _BEATS_S


async def _rooms(
    decodes: Sequence[SimulatedDecode], rank: RankInfo, address: BootstrapAddress, connection: Connection
) -> list[float]:
    """One room with each, one after the other; the seconds until each offer was answered."""
    leg = Leg(GenerationClient(connection))
    standing = asyncio.Event()
    outputs = asyncio.create_task(leg.follow(standing))
    await standing.wait()
    seconds = []
    try:
        for number, decode in enumerate(decodes):
            request = make_request(BootstrapRoom(_FIRST_ROOM + number), address)
            end = leg.open(request.room)
            await leg.submit(request)
            seconds.append(await decode.offer(request.room, rank, request.prompt))
            if (error := await end) is not None:
                raise error
    finally:
        outputs.cancel()
        await asyncio.gather(outputs, return_exceptions=True)
    return seconds
