"""Sends the load: prompts as they are due, and background streams beneath them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from pd_common.cli.bench.serve.exchange import Exchange, Log
from pd_common.cli.bench.serve.lag import watch_lag
from pd_common.cli.bench.serve.plan import Arrivals, Background, Plan
from pd_common.cli.bench.serve.workload import Request, Workload, poisson_arrivals

Complete = Callable[[Request, Exchange], Awaitable[None]]
"""Sends a request and reads its answer into the exchange; returns when there is no more of it."""


async def send(plan: Plan, complete: Complete, log: Log) -> None:
    """Returns when every prompt has been answered; then the background streams are cut off."""
    async with asyncio.TaskGroup() as group:
        beneath = [group.create_task(watch_lag(log.late_s))]
        if plan.background is not None:
            streams = Streams(plan.background, plan.streams(plan.background), complete, log)
            beneath += [group.create_task(streams.keep(lane)) for lane in range(plan.background.streams)]
            await streams.all_begun()
            log.alone_from_s = time.perf_counter()
            await asyncio.sleep(plan.background.alone_s)
        log.prompts_from_s = time.perf_counter()
        await Prompts(plan.arrivals, plan.prompts(), complete, log).send(plan.seed)
        for task in beneath:
            task.cancel()


class Prompts:
    """The requests that are measured, and those before them that warm up."""

    def __init__(self, arrivals: Arrivals, workload: Workload, complete: Complete, log: Log) -> None:
        self._arrivals = arrivals
        self._workload = workload
        self._complete = complete
        self._log = log
        self._taken = 0
        self._measured_from_s = 0.0

    async def send(self, seed: int) -> None:
        if self._arrivals.per_s is not None:
            await self._at_rate(self._arrivals.per_s, seed)
        else:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._arrivals.concurrency or 1):
                    group.create_task(self._without_pause())

    async def _at_rate(self, per_s: float, seed: int) -> None:
        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for due_s in poisson_arrivals(per_s, seed):
                if (number := self._take(due_s)) is None:
                    return
                await asyncio.sleep(max(0.0, began_s + due_s - time.perf_counter()))
                group.create_task(self._one(number))

    async def _without_pause(self) -> None:
        while (number := self._take(time.perf_counter())) is not None:
            await self._one(number)

    def _take(self, at_s: float) -> int | None:
        """The next request's number; None when there have been enough."""
        number, arrivals = self._taken, self._arrivals
        if number == arrivals.warm_up:
            self._measured_from_s = at_s
        measured = number - arrivals.warm_up
        if arrivals.requests is not None and measured >= arrivals.requests:
            return None
        if arrivals.seconds is not None and measured >= 0 and at_s - self._measured_from_s > arrivals.seconds:
            return None
        self._taken += 1
        return number

    async def _one(self, number: int) -> None:
        exchange = Exchange(number)
        request = self._workload.request(number)
        if number >= self._arrivals.warm_up:
            self._log.prompts.append(exchange)
        await self._complete(request, exchange)


class Streams:
    """Long answers one after the other in each of several lanes."""

    def __init__(self, background: Background, workload: Workload, complete: Complete, log: Log) -> None:
        self._background = background
        self._workload = workload
        self._complete = complete
        self._log = log
        self._begun = [asyncio.Event() for _ in range(background.streams)]

    async def all_begun(self) -> None:
        """Returns when every lane has had its first token, or has failed."""
        for begun in self._begun:
            await begun.wait()

    async def keep(self, lane: int) -> None:
        """Until it is cancelled, or an answer fails: a lane that fails is not to become a storm."""
        streams, tokens = self._background.streams, self._background.output_tokens
        # The first answers differ in length, so that the lanes do not end, and begin anew, all at once.
        lengths = itertools.chain([max(1, tokens * (lane + 1) // streams)], itertools.repeat(tokens))
        try:
            for number, length in zip(itertools.count(lane, streams), lengths, strict=False):
                exchange = Exchange(number, on_first=self._begun[lane].set)
                self._log.background.append(exchange)
                await self._complete(replace(self._workload.request(number), output_tokens=length), exchange)
                if not exchange.is_answered:
                    return
        finally:
            self._begun[lane].set()
