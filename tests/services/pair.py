"""Prefill and decode in one process and one event loop: real services, servicers and clients over real gRPC.

Pages travel through the loopback transport; there is no model.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from opentelemetry.context import Context

from pd_common.control import server
from pd_common.control.bootstrap_client import BootstrapClient
from pd_common.control.connection import Connection
from pd_common.control.generation_client import GenerationClient
from pd_common.control.peer_client import PeerClient
from pd_common.control.process import new_instance
from pd_common.errors import PdError
from pd_common.generation import FinishReason, GenerationRequest, Output, SamplingParams
from pd_common.handoff.deadlines import Timeouts
from pd_common.handoff.state import Transfer, TransferState
from pd_common.handoff.table import TransferTable
from pd_common.transport.base import Transport
from pd_common.transport.loopback import Faults, LoopbackNetwork
from pd_common.types import BootstrapAddress, BootstrapRoom, RankInfo, RankPosition, Role
from tests.control.serving import DATA_PLANE, LOOPBACK
from tests.services.byte_engine import answer_tokens
from tests.services.lives import GENEROUS, USUAL, DecodeLife, Growth, Life, PrefillLife, Real, unfinished
from tests.services.tap import Tap


async def soon(awaitable: Any) -> Any:
    """Its result; a test that would wait for ever fails instead."""
    return await asyncio.wait_for(awaitable, 10)


async def turns(count: int = 20) -> None:
    """Lets everything that can go on without the network go on."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    """For what nobody tells of; the network goes on meanwhile."""

    async def look() -> None:
        while not condition():  # noqa: ASYNC110  there is no event to wait for
            await asyncio.sleep(0)

    await soon(look())


class Client:
    """A router's view of one process: submits, and keeps every output by room."""

    def __init__(self, connection: Connection, name: str) -> None:
        self._generation = GenerationClient(connection)
        self._name = name
        self._outputs: dict[int, list[Output]] = {}
        self._more = asyncio.Event()

    async def start(self) -> None:
        stream = self._generation.stream_outputs(self._name)
        assert await soon(anext(stream)) == ()
        self._reading = asyncio.create_task(self._read(stream))

    async def stop(self) -> None:
        """The client goes away."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def submit(self, request: GenerationRequest) -> None:
        before = self._outputs.get(request.room)
        if before is None or (before and before[-1].is_last):
            self._outputs[request.room] = []
        try:
            await soon(self._generation.submit(request, self._name, Context()))
        except PdError:  # refused: nothing of it will come
            if before is None:
                del self._outputs[request.room]
            else:
                self._outputs[request.room] = before
            raise

    async def abort(self, room: int) -> None:
        await self._generation.abort_room(BootstrapRoom(room), "the user pressed stop")

    async def outputs(self, room: int) -> list[Output]:
        """All of a room's outputs, once there is a last one."""
        while not any(output.is_last for output in self._outputs[room]):
            self._more.clear()
            await soon(self._more.wait())
        return self._outputs[room]

    async def failure(self, room: int) -> PdError:
        """Why the room failed; it has said nothing after that."""
        *_, last = await self.outputs(room)
        assert last.error is not None, last
        return last.error

    async def assert_each_ended_once(self) -> None:
        for room in self._outputs:
            outputs = await self.outputs(room)
            assert [output.is_last for output in outputs] == [False] * (len(outputs) - 1) + [True], room

    async def _read(self, stream: AsyncIterator[tuple[Output, ...]]) -> None:
        async for outputs in stream:
            for output in outputs:
                self._outputs[output.room].append(output)
            self._more.set()


class Node:
    """One address: a server with a tap, the present life behind it, and a client."""

    def __init__(self, life: Life) -> None:
        self.tap = Tap()
        self.life = life
        self._taps = {name: self.tap.on(servicer) for name, servicer in life.servicers.items()}
        self._control = server.ControlServer([getattr(server, name)(tapped) for name, tapped in self._taps.items()])
        self._works: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self.port = await self._control.start(LOOPBACK, 0)
        self.connection = Connection(self.address.target)
        self.peer_client = PeerClient(self.connection)
        await self._begin()
        self.client = await self.new_client("router")

    async def _begin(self) -> None:
        life = self.life
        if isinstance(life, DecodeLife):
            life.wire(self.address.target)
        else:
            plane = replace(DATA_PLANE, backend=life.transport.info.backend)
            rank = RankInfo(life.instance, Role.PREFILL, RankPosition(), self.address.target, life.engine.layout, plane)
            await BootstrapClient(self.connection).register_rank(rank)
        self._works += [asyncio.create_task(work) for work in life.works()]

    async def new_client(self, name: str) -> Client:
        client = Client(self.connection, name)
        await client.start()
        return client

    async def renew_client(self) -> None:
        """The client connects to whoever is there now."""
        await self.client.stop()
        self.client = await self.new_client("router")

    async def replace(self, life: Life) -> Life:
        """Another process answers at this address, and no connection breaks. Gives the one that did until now."""
        before, self.life = self.life, life
        for name, servicer in life.servicers.items():
            self._taps[name].servicer = servicer
        await self._begin()
        return before

    @property
    def address(self) -> BootstrapAddress:
        return BootstrapAddress(LOOPBACK, self.port)

    async def stop(self) -> None:
        await self.client.stop()
        died = [work for work in self._works if work.done()]
        await soon(self.life.service.close(0.0))
        for work in self._works:
            work.cancel()
        await asyncio.gather(*self._works, return_exceptions=True)
        await soon(self.life.close())
        await self.connection.close()
        await self._control.stop(grace_s=0.0)
        assert died == []


class Pair:
    """A prefill and a decode that have never met."""

    def __init__(
        self,
        *,
        prefill_pages: int = 32,
        decode_pages: int = 32,
        prefill_slots: int = 8,
        decode_slots: int = 8,
        chunk_tokens: int = 8,
        retention_s: float = 60.0,
        timeouts: Timeouts = GENEROUS,
        growth: Growth = USUAL,
        new_transport: Callable[[], Transport] | None = None,
    ) -> None:
        """Over loopback, unless another transport is given: then nothing can be made to go wrong by `faults`."""
        self.network = LoopbackNetwork()
        real = {
            role: None if new_transport is None else Real(new_instance(role), new_transport(), 1)
            for role in (Role.PREFILL, Role.DECODE)
        }
        self.prefill = PrefillLife(
            self.network, prefill_pages, prefill_slots, chunk_tokens, retention_s, real[Role.PREFILL], timeouts
        )
        self.decode = DecodeLife(
            self.network, decode_pages, decode_slots, retention_s, real[Role.DECODE], timeouts, growth
        )
        self.at_prefill, self.at_decode = Node(self.prefill), Node(self.decode)

    async def start(self) -> None:
        await self.at_prefill.start()
        await self.at_decode.start()

    @property
    def faults(self) -> Faults:
        """Of what prefill writes."""
        return self.prefill.faults

    def request(
        self, room: int, *, prompt_tokens: int = 10, new_tokens: int = 4, timeout_s: float = 30.0
    ) -> GenerationRequest:
        return GenerationRequest(
            rid=f"r{room}",
            room=BootstrapRoom(room),
            bootstrap=self.at_prefill.address,
            prompt=tuple(100 * room + place for place in range(prompt_tokens)),
            sampling=SamplingParams(max_new_tokens=new_tokens, temperature=0.0),
            timeout_s=timeout_s,
        )

    async def submit(self, request: GenerationRequest) -> None:
        """Both legs."""
        await self.at_prefill.client.submit(request)
        await self.at_decode.client.submit(request)

    async def assert_answered(self, request: GenerationRequest) -> None:
        """The whole answer on decode, and a handoff on prefill."""
        await self.assert_decoded(request)
        handed_off = await self.at_prefill.client.outputs(request.room)
        assert [output.finish for output in handed_off] == [FinishReason.HANDED_OFF]

    async def assert_decoded(self, request: GenerationRequest) -> None:
        """The whole answer."""
        outputs = await self.at_decode.client.outputs(request.room)
        expected = answer_tokens(len(request.prompt), request.sampling.max_new_tokens)
        assert (tuple(token for output in outputs for token in output.token_ids), outputs[-1].error) == (expected, None)

    async def serve(self, room: int, **options: Any) -> None:
        """A room that nothing happens to."""
        request = self.request(room, **options)
        await self.submit(request)
        await self.assert_answered(request)

    async def settled(self) -> None:
        """Every room has concluded and every proof is there; then nothing at all is left of them."""
        while tasks := self.unfinished():
            await soon(asyncio.wait(tasks))
            await turns(2)
        self.prefill.assert_untouched()
        self.decode.assert_untouched()
        await self.at_prefill.client.assert_each_ended_once()
        await self.at_decode.client.assert_each_ended_once()

    def unfinished(self) -> list[asyncio.Task[Any]]:
        return [*unfinished(self.prefill.service._tasks), *self.decode.unfinished()]

    async def stop(self) -> None:
        await self.at_decode.stop()
        await self.at_prefill.stop()


@asynccontextmanager
async def running(pair: Pair) -> AsyncIterator[Pair]:
    """Stops it in the end, and asserts that nothing is left."""
    await pair.start()
    try:
        yield pair
        await pair.settled()
    finally:
        await pair.stop()


async def state_reached(transfers: TransferTable, room: int, state: TransferState) -> Transfer:
    """The record, once it has come to this state."""
    reached: asyncio.Future[Transfer] = asyncio.get_running_loop().create_future()

    def look(transfer: Transfer) -> None:
        if transfer.room == room and transfer.state is state and not reached.done():
            reached.set_result(transfer)

    transfers.listeners.append(look)
    try:
        known = transfers.find(BootstrapRoom(room))
        return known if known is not None and known.state is state else await soon(reached)
    finally:
        transfers.listeners.remove(look)


def forget_finished(transfers: TransferTable) -> None:
    """As if every retention were over."""
    transfers.sweep(time.monotonic() + 10_000.0)
