"""All of decode with a real prefill, in small worlds made by chance: what ends well is right, and nothing is left."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from pd_common.errors import PeerLost
from pd_common.generation import FinishReason, GenerationRequest, Output, Usage
from tests.services.byte_engine import PAGE_SIZE, Gate, answer_tokens
from tests.services.lives import Growth
from tests.services.pair import Client, Pair, running, turns
from tests.services.tap import PassOn

SEEDS = 20
ROOMS = 12
MOST_TOKENS = 40
COMMON = tuple(range(50_000, 50_013))


class Pace(Gate):
    """Lets every piece of an engine's work through after a while; none as long as it is `shut`."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.open = asyncio.Event()
        self.open.set()
        self._rng = rng

    async def wait(self) -> bool:  # type: ignore[override]
        await asyncio.sleep(self._rng.choice([0, 0, 0, 0.001, 0.002]))
        return await self.open.wait()


class World:
    """A pair with little memory, requests, and what happens to them. Without `faults` the worst is an abort."""

    def __init__(self, seed: int) -> None:
        rng = self._rng = random.Random(seed)
        self.faults = bool(seed % 2)
        growth = Growth(
            reserved_tokens=rng.choice([0, 3, 30]),
            host_pages=rng.choice([0, 5, 1000]),
            chunk_tokens=rng.choice([3, 8, 30]),
            retract_every=rng.choice([0, 0, 1, 4]),
            keeps_prefixes=rng.random() < 0.7,
        )
        self.pair = Pair(
            prefill_pages=rng.choice([11, 20, 40]),
            decode_pages=rng.choice([11, 20, 40]),
            prefill_slots=rng.choice([1, 2, 8]),
            decode_slots=rng.choice([2, 4, 8]),
            chunk_tokens=rng.choice([3, 8]),
            growth=growth,
        )
        self.pair.prefill.service._optimistic_attempts = rng.choice([0, 1, 3])
        self.requests: dict[int, GenerationRequest] = {}
        self.aborted: set[int] = set()

    async def live(self) -> None:
        self.pair.decode.engine.gate, self.pair.prefill.engine.gate = Pace(self._rng), Pace(self._rng)
        if self.faults:
            self._break_the_network()
        async with asyncio.TaskGroup() as group:
            lives = [group.create_task(self._live(number)) for number in range(1, ROOMS + 1)]
            while not all(life.done() for life in lives):
                await asyncio.sleep(self._rng.choice([0, 0.001, 0.003]))
                await self._happen()

    async def _live(self, number: int) -> None:
        """One request: it comes, perhaps it is aborted, and it ends."""
        await asyncio.sleep(self._rng.random() / 20)
        request = self.requests[number] = self._request(number)
        clients = [self.pair.at_decode.client]
        if request.bootstrap is not None:
            clients.append(self.pair.at_prefill.client)
        taken = await asyncio.gather(*(client.submit(request) for client in clients), return_exceptions=True)
        failed = any(taken)
        assert self.faults or not failed, taken
        if not failed and self._rng.random() < 0.25:
            self.aborted.add(number)
            await asyncio.sleep(self._rng.random() / 20)
            await self._abort(self._rng.choice(clients), number)
        for client, refusal in zip(clients, taken, strict=True):
            if failed or number in self.aborted:  # a router does so: whoever is not paired yet cannot know
                await self._abort(client, number)
            if refusal is None:
                outputs = await client.outputs(number)
                failed = failed or outputs[-1].error is not None
                self._check(number, outputs, on_decode=client is self.pair.at_decode.client)

    async def _abort(self, client: Client, number: int) -> None:
        """Again until it is heard."""
        while True:
            try:
                return await client.abort(number)
            except PeerLost:
                assert self.faults

    def _request(self, number: int) -> GenerationRequest:
        rng = self._rng
        prompt_tokens = rng.randrange(1, MOST_TOKENS - 8)
        request = self.pair.request(number, prompt_tokens=prompt_tokens)
        prompt = (*COMMON[: rng.choice([0, 8, 13])], *request.prompt)[:prompt_tokens]
        return replace(
            request,
            bootstrap=request.bootstrap if rng.random() < 0.75 else None,
            prompt=prompt,
            priority=rng.choice([0, 0, 0, 3]),
            sampling=replace(request.sampling, max_new_tokens=rng.randrange(1, MOST_TOKENS - prompt_tokens)),
        )

    def _check(self, number: int, outputs: list[Output], *, on_decode: bool) -> None:
        """The whole answer, in pieces of one token, or a failure that somebody is to blame for."""
        request, last = self.requests[number], outputs[-1]
        tokens = tuple(token for output in outputs for token in output.token_ids)
        expected = answer_tokens(len(request.prompt), request.sampling.max_new_tokens) if on_decode else ()
        assert tokens == expected[: len(tokens)]
        if last.error is not None:
            assert self.faults or number in self.aborted, last.error
            return
        assert tokens == expected
        assert [output.finish for output in outputs[:-1]] == [None] * (len(outputs) - 1)
        assert last.finish is (FinishReason.LENGTH if on_decode else FinishReason.HANDED_OFF)
        assert isinstance(last.usage, Usage)
        cached = last.usage.cached_tokens
        assert cached % PAGE_SIZE == 0
        assert cached < len(request.prompt)

    # --- what happens ---

    async def _happen(self) -> None:
        if self._rng.random() < 0.2:
            await self._nobody_waits_in_vain()
        if self.faults and self._rng.random() < 0.05:
            happening = self._rng.choice([self._a_step_fails, self._a_write_fails, self._the_pairing_is_lost])
            await happening()

    async def _nobody_waits_in_vain(self) -> None:
        """While the engine stands still, and no answer is between its old pages and the line for new ones."""
        life, pace = self.pair.decode, self.pair.decode.engine.gate
        assert isinstance(pace, Pace)
        pace.open.clear()
        await turns()
        held = life.memory.held
        lost = [
            room
            for number, room in life.service._rooms.items()
            if number in self.requests and room.has_turn and room.allocation not in held
        ]
        if len(lost) == life.queue.returning:
            waiting = [waiter for waiter in life.queue._line if not waiter.granted.done()]
            life.queue.grant()
            assert life.queue._line == waiting
        pace.open.set()

    async def _a_step_fails(self) -> None:
        engine = self._rng.choice([self.pair.prefill.engine, self.pair.decode.engine])
        engine.failure = RuntimeError("broken")

    async def _a_write_fails(self) -> None:
        faults = self.pair.faults
        which = self._rng.choice(["fail_write", "flip_in_write"])
        setattr(faults, which, faults.writes + self._rng.randrange(1, 4))

    async def _the_pairing_is_lost(self) -> None:
        for prefill in tuple(self.pair.decode.prefills._paired.values()):
            await self.pair.decode.prefills.forget(prefill, "by chance")

    def _break_the_network(self) -> None:
        """Some messages are late, some are lost, and of some only the answer."""

        async def passed(request: Any, pass_on: PassOn) -> Any:
            await asyncio.sleep(self._rng.choice([0, 0, 0.005]))
            fate = self._rng.random()
            if fate < 0.03:
                raise PeerLost("the message was lost")
            answer = await pass_on()
            if fate < 0.06:
                raise PeerLost("the answer was lost")
            return answer

        for node in (self.pair.at_prefill, self.pair.at_decode):
            for method in ("AllocatePages", "ReportTransfer", "AbortRoom"):
                node.tap.rules[method] = passed


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_whatever_happens_what_ends_well_is_right_and_nothing_is_left(seed: int) -> None:
    world = World(seed)
    async with running(world.pair):
        await world.live()
