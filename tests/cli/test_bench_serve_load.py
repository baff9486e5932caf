"""How `pdctl bench serve` sends its load, without a server: what is under way, what counts, what stops when."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field

import pytest

from pd_common.cli.bench.serve.exchange import Exchange, Failure, Log
from pd_common.cli.bench.serve.lengths import Uniform
from pd_common.cli.bench.serve.load import send
from pd_common.cli.bench.serve.plan import Arrivals, Background, Plan
from pd_common.cli.bench.serve.workload import Request, poisson_arrivals

_PROMPT_TOKENS, _STREAM_TOKENS = 20, 512


@dataclass
class Server:
    """Answers when it is let; a prompt and a background stream are told apart by their length."""

    let: asyncio.Event = field(default_factory=asyncio.Event)
    let_streams_begin: asyncio.Event = field(default_factory=asyncio.Event)
    came: asyncio.Queue[Exchange] = field(default_factory=asyncio.Queue)
    streams_came: asyncio.Queue[Exchange] = field(default_factory=asyncio.Queue)
    under_way: int = 0
    most_under_way: int = 0
    stream_lengths: list[int] = field(default_factory=list)
    cancelled_streams: int = 0
    stream_fails: bool = False

    async def complete(self, request: Request, exchange: Exchange) -> None:
        exchange.sent_s = time.perf_counter()
        if len(request.prompt) != _PROMPT_TOKENS:
            await self._stream(request, exchange)
            return
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        self.came.put_nowait(exchange)
        await self.let.wait()
        self.under_way -= 1
        answer(exchange)

    async def _stream(self, request: Request, exchange: Exchange) -> None:
        self.stream_lengths.append(request.output_tokens)
        self.streams_came.put_nowait(exchange)
        await self.let_streams_begin.wait()
        if self.stream_fails:
            await asyncio.sleep(0)  # as any answer from a network takes
            exchange.failure = Failure(429, "CAPACITY", "full")
            return
        exchange.take(b'{"choices": [{"text": "a", "finish_reason": null}]}', time.perf_counter())
        if request.output_tokens < _STREAM_TOKENS:
            exchange.done_s = time.perf_counter()
            return
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.cancelled_streams += 1


def answer(exchange: Exchange) -> None:
    exchange.arrived_s.append(time.perf_counter())
    exchange.done_s = time.perf_counter()


def _plan(arrivals: Arrivals, background: Background | None = None) -> Plan:
    return Plan(0, arrivals, Uniform(_PROMPT_TOKENS, _PROMPT_TOKENS), Uniform(4, 4), 0, 256, background)


async def test_the_first_ones_warm_up_and_do_not_count() -> None:
    server, log = Server(), Log()
    server.let.set()
    await send(_plan(Arrivals(None, 3, warm_up=4, requests=10, seconds=None)), server.complete, log)
    assert server.came.qsize() == 14
    assert sorted(exchange.number for exchange in log.prompts) == list(range(4, 14))


async def test_without_pause_there_are_always_so_many() -> None:
    server, log = Server(), Log()
    arrivals = Arrivals(None, 3, warm_up=0, requests=10, seconds=None)
    async with asyncio.TaskGroup() as group:
        group.create_task(send(_plan(arrivals), server.complete, log))
        for _ in range(3):
            await server.came.get()
        server.let.set()
    assert (server.most_under_way, len(log.prompts)) == (3, 10)


async def test_at_a_rate_they_come_whatever_is_under_way() -> None:
    server, log = Server(), Log()
    arrivals = Arrivals(1000.0, 1, warm_up=2, requests=10, seconds=None)
    async with asyncio.TaskGroup() as group:
        group.create_task(send(_plan(arrivals), server.complete, log))
        came = [await server.came.get() for _ in range(12)]
        server.let.set()
    assert server.most_under_way == 12
    due = list(itertools.islice(poisson_arrivals(1000.0, 0), 12))
    assert all(exchange.sent_s - came[0].sent_s >= due_s - 0.002 for exchange, due_s in zip(came, due, strict=True))


async def test_for_some_seconds_it_sends_what_is_due_in_them() -> None:
    server, log = Server(), Log()
    server.let.set()
    await send(_plan(Arrivals(500.0, 1, warm_up=3, requests=None, seconds=0.1)), server.complete, log)
    due = list(itertools.islice(poisson_arrivals(500.0, 0), 300))[3:]
    assert len(log.prompts) == sum(due_s - due[0] <= 0.1 for due_s in due)


async def test_without_pause_it_ends_after_some_seconds() -> None:
    server, log = Server(), Log()
    arrivals = Arrivals(None, 1, warm_up=1, requests=None, seconds=0.001)

    async def slowly(request: Request, exchange: Exchange) -> None:
        await server.complete(request, exchange)
        await asyncio.sleep(0.002)

    server.let.set()
    await asyncio.wait_for(send(_plan(arrivals), slowly, log), 10)
    assert len(log.prompts) == 1


async def test_prompts_wait_until_every_background_stream_has_begun() -> None:
    server, log = Server(), Log()
    plan = _plan(Arrivals(None, 1, 0, 2, None), Background(4, _STREAM_TOKENS, alone_s=0.0))
    server.let.set()
    async with asyncio.TaskGroup() as group:
        group.create_task(send(plan, server.complete, log))
        for _ in range(4):
            await server.streams_came.get()
        assert server.came.empty()
        server.let_streams_begin.set()
    assert len(log.prompts) == 2
    assert log.alone_from_s >= max(exchange.arrived_s[0] for exchange in log.background[:4])
    # First answers of a quarter, two quarters ... of the length; then a whole one in each lane, cut off at the end.
    assert server.stream_lengths[:4] == [128, 256, 384, 512]
    assert server.stream_lengths[4:] == [512, 512, 512]
    assert server.cancelled_streams == 4


async def test_a_background_stream_that_fails_ends_its_lane_and_holds_nothing_up() -> None:
    server, log = Server(stream_fails=True), Log()
    server.let.set()
    server.let_streams_begin.set()
    plan = _plan(Arrivals(None, 1, 0, 2, None), Background(4, _STREAM_TOKENS, alone_s=0.0))
    await asyncio.wait_for(send(plan, server.complete, log), 10)
    assert (len(log.background), len(log.prompts)) == (4, 2)


async def test_what_there_is_stays_when_it_is_cut_off() -> None:
    server, log = Server(), Log()
    server.let_streams_begin.set()
    plan = _plan(Arrivals(None, 1, 0, 5, None), Background(2, _STREAM_TOKENS, alone_s=0.0))
    sending = asyncio.create_task(send(plan, server.complete, log))
    answer(await server.came.get())
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert (len(log.prompts), len(log.background), server.cancelled_streams) == (1, 3, 2)
    assert log.prompts_from_s is not None
