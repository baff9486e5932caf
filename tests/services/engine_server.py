"""Engine processes as the router meets them: real servers on this host whose rooms do what a test says."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from pd_common.control import server
from pd_common.control.abort_servicer import AbortServicer
from pd_common.control.connection import dial_plain
from pd_common.control.generation_servicer import EngineGenerationServicer
from pd_common.control.outputs import OutputHub
from pd_common.control.server import ControlServer
from pd_common.generation import FinishReason, GenerationRequest, Output, Usage
from pd_common.types import BootstrapAddress, BootstrapRoom, Role
from services.router.policy import LeastLoaded
from services.router.route import Route
from services.router.worker import Worker
from tests.control.fake_rooms import FakeModel, FakeRooms
from tests.control.serving import LOOPBACK


async def soon(awaitable: Any) -> Any:
    """Its result; a test that would wait for ever fails instead."""
    return await asyncio.wait_for(awaitable, 10)


def piece(room: BootstrapRoom, token: int) -> Output:
    return Output(room, token_ids=(token,), text="x")


def ending(room: BootstrapRoom, token: int = 9) -> Output:
    return Output(room, token_ids=(token,), text="y", finish=FinishReason.LENGTH, usage=Usage(3, 2))


def handed_off(room: BootstrapRoom) -> Output:
    return Output(room, finish=FinishReason.HANDED_OFF, usage=Usage(3, 1))


class EngineServer:
    """One engine process; after `stop` it may be started again, as a new life at the same address."""

    def __init__(self) -> None:
        self.port = 0
        self._playing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.hub = OutputHub()
        self.rooms = FakeRooms(self.hub)
        self._control = ControlServer(
            [
                server.abort(AbortServicer(self.rooms)),
                server.generation(EngineGenerationServicer(self.rooms, self.hub, FakeModel())),
            ]
        )
        self.port = await self._control.start(LOOPBACK, self.port)

    async def stop(self) -> None:
        """Like the end of the process: every call breaks off."""
        if self._playing is not None:
            self._playing.cancel()
        await self._control.stop(grace_s=0.0)

    @property
    def address(self) -> BootstrapAddress:
        return BootstrapAddress(LOOPBACK, self.port)

    def publish(self, *outputs: Output) -> None:
        """One engine step."""
        self.hub.publish(outputs)

    async def next_request(self) -> GenerationRequest:
        request, _ = await soon(self.rooms.submitted.get())
        return request  # type: ignore[no-any-return]

    async def next_abort(self) -> tuple[BootstrapRoom, str]:
        room, error = await soon(self.rooms.aborted.get())
        return room, error.message

    def answer_all(self, *script: Output) -> None:
        """From now on every request is answered like this, with its own room."""
        self._playing = asyncio.create_task(self._play(script))

    async def _play(self, script: tuple[Output, ...]) -> None:
        while True:
            request, _ = await self.rooms.submitted.get()
            for output in script:
                self.publish(replace(output, room=request.room))


async def until_live(worker: Worker, changed: asyncio.Event) -> None:
    """The worker's stream stands."""
    while not worker.is_live:
        await soon(changed.wait())
        changed.clear()


async def until_lost(worker: Worker, changed: asyncio.Event) -> None:
    """The worker's stream is broken."""
    while worker.is_live:
        await soon(changed.wait())
        changed.clear()


def prove(route: Route) -> None:
    """As if a room had gone through."""
    assert route.lives is not None
    route.note_probe(route.lives, None)


class Cluster:
    """Engine servers and a router's workers for them, all connected; no route is proven before `prove_all`."""

    def __init__(self, prefills: int = 1, decodes: int = 1, min_prompt_tokens: int = 0) -> None:
        self._min_prompt_tokens = min_prompt_tokens
        self.changed = asyncio.Event()
        self.prefill_servers = [EngineServer() for _ in range(prefills)]
        self.decode_servers = [EngineServer() for _ in range(decodes)]
        self.servers = [*self.prefill_servers, *self.decode_servers]
        self._runs: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        for engine in self.servers:
            await engine.start()
        self.prefills = [
            Worker(Role.PREFILL, engine.address, self.changed, dial_plain) for engine in self.prefill_servers
        ]
        self.decodes = [Worker(Role.DECODE, engine.address, self.changed, dial_plain) for engine in self.decode_servers]
        self.workers = [*self.prefills, *self.decodes]
        self.policy = LeastLoaded(
            self.prefills, self.decodes, self._min_prompt_tokens, disaggregated=bool(self.prefills)
        )
        self._runs = [asyncio.create_task(worker.run()) for worker in self.workers]
        for worker in self.workers:
            await until_live(worker, self.changed)

    def prove_all(self) -> None:
        """As if a room had gone through every route."""
        for route in self.policy.routes:
            prove(route)

    async def stop(self) -> None:
        for run in self._runs:
            assert not run.done()
            run.cancel()
        await asyncio.gather(*self._runs, return_exceptions=True)
        for worker in self.workers:
            await worker.stop()
        for engine in self.servers:
            await engine.stop()
