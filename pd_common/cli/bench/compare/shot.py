"""One request at a time, and what both sides have on record of its room."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
from pd.v1 import transfer_status_pb2, transfer_status_pb2_grpc, types_pb2

from pd_common.cli.bench.compare.model import VOCAB_SIZE
from pd_common.cli.bench.compare.setups import Setup
from pd_common.cli.bench.serve.client import Completions, Server
from pd_common.cli.bench.serve.exchange import Exchange
from pd_common.cli.bench.serve.lengths import Uniform
from pd_common.cli.bench.serve.run import fields_of
from pd_common.cli.bench.serve.workload import Kind, Request, Workload
from pd_common.control.connection import Connection
from pd_common.errors import PeerLost, TransferFailed

_T = TypeVar("_T")

TIMEOUT_S = 600.0
_WARM_UP_SEED = 2**32
"""No other prompt begins as those do: seeds are below this."""
_SETTLED_S, _LOOK_AGAIN_S = 10.0, 0.01
_FINAL = (types_pb2.TRANSFER_STATE_SUCCESS, types_pb2.TRANSFER_STATE_FAILED)


@dataclass(frozen=True, slots=True)
class Shot:
    """One answer. `sent_ns` and `first_ns` are nanoseconds since 1970, as spans count."""

    room: int
    sent_ns: int
    first_ns: int
    cached_tokens: int

    @property
    def ttft_ms(self) -> float:
        return (self.first_ns - self.sent_ns) / 1e6


def server_of(setup: Setup) -> Server:
    return Server(setup.url, None, TIMEOUT_S)


class Shooter:
    """Sends requests to one set-up over connections that stay."""

    def __init__(self, setup: Setup) -> None:
        """Within an event loop."""
        self.setup = setup
        self._server = server_of(setup)
        self._session: aiohttp.ClientSession = self._server.session()
        self._rooms = itertools.count(1)

    async def close(self) -> None:
        await self._session.close()

    async def shoot(self, request: Request) -> Shot:
        """Returns when the answer is whole.

        Raises:
            PeerLost: there is none.

        """
        return await self.start(request).answer()

    def start(self, request: Request) -> Flight:
        """Sends it; nobody waits for the answer yet."""
        room, exchange, begun = next(self._rooms), Exchange(0), asyncio.Event()
        exchange.on_first = begun.set
        task = asyncio.create_task(self._complete(request, exchange, room))
        task.add_done_callback(lambda _: begun.set())
        return Flight(self.setup.name, room, exchange, begun, task)

    async def _complete(self, request: Request, exchange: Exchange, room: int) -> None:
        fields = {**fields_of(self.setup.model, ignore_eos=True), "bootstrap_room": room}
        await Completions(self._server, self._session, fields).complete(request, exchange)


@dataclass(frozen=True, slots=True)
class Flight:
    """A request under way. `begun` is set when its first token is there, or it has failed."""

    setup: str
    room: int
    exchange: Exchange
    begun: asyncio.Event
    task: asyncio.Task[None]

    async def answer(self) -> Shot:
        """Raises PeerLost when there is none."""
        await self.task
        exchange = self.exchange
        if not exchange.is_answered:
            raise PeerLost(f"{self.setup}: a request has failed: {exchange.failure}")
        since_1970_ns = time.time_ns() - time.perf_counter_ns()
        sent_ns, first_ns = (
            since_1970_ns + round(1e9 * moment_s) for moment_s in (exchange.sent_s, exchange.arrived_s[0])
        )
        return Shot(self.room, sent_ns, first_ns, 0 if exchange.usage is None else exchange.usage.cached_tokens)


async def bytes_moved(prefill: str, room: int) -> int:
    """What prefill has written for a room, once it has ended there.

    Raises:
        TransferFailed: it does not end, or has failed.

    """
    connection = Connection(prefill)
    stub: Any = transfer_status_pb2_grpc.TransferStatusStub(connection.channel)
    request = transfer_status_pb2.GetTransferRequest(bootstrap_room=room)
    give_up = time.monotonic() + _SETTLED_S
    try:
        while (transfer := (await connection.call(stub.GetTransfer, request)).transfer).state not in _FINAL:
            if time.monotonic() > give_up:
                break
            await asyncio.sleep(_LOOK_AGAIN_S)
    finally:
        await connection.close()
    if transfer.state != types_pb2.TRANSFER_STATE_SUCCESS:
        raise TransferFailed(f"room {room} has not ended well on prefill: {transfer.failure.message or 'it goes on'}")
    return int(transfer.bytes_done)


async def warm_up(shooter: Shooter, tokens: int, pool_tokens: int) -> float:
    """Prompts of this length through the whole pool and once more: after that no page is new to the kernel.

    Gives the median TTFT of the later half, in ms.
    """
    workload, shots = prompts(_WARM_UP_SEED, tokens, 1), 1 + -(-pool_tokens // tokens)
    took_ms = [(await shooter.shoot(workload.request(number))).ttft_ms for number in range(shots)]
    return statistics.median(took_ms[shots // 2 :])


def prompts(seed: int, tokens: int, output_tokens: int, prefix_tokens: int = 0) -> Workload:
    """Prompts of one length; number n is another one for each n, but for the common prefix of one seed."""
    lengths = Uniform(tokens, tokens), Uniform(output_tokens, output_tokens)
    return Workload(seed, Kind.PROMPTS, *lengths, prefix_tokens, VOCAB_SIZE)


def in_turns(things: Sequence[_T], number: int) -> Sequence[_T]:
    """Now in one order and now in the other, so that none always comes after the same."""
    return things if number % 2 == 0 else things[::-1]
