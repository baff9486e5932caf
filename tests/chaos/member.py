"""One engine process of a chaos test: real services, control plane and UCX around an engine without a model.

Its parent tells it over a pipe what to do: a name and a number, one answer each.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from typing import Any

from pd_common.control import beats, process, server
from pd_common.control.connection import Connection
from pd_common.control.supervisor import Supervisor
from pd_common.transport.loopback import LoopbackNetwork
from pd_common.transport.ucx.binding import UCXEndpoint
from pd_common.transport.ucx.transport import UcxTransport
from pd_common.types import PageIndices, RankInfo, RankPosition, Role
from services.prefill.membership import Membership
from tests.control.serving import DATA_PLANE, LOOPBACK
from tests.services.byte_engine import ByteEngine, Gate
from tests.services.lives import GENEROUS, USUAL, DecodeLife, Growth, Life, PrefillLife, Real

CANARY = 0x5EED_CAFE
CHUNK_TOKENS = 64
CANARY_EXIT = 77
SETTINGS = {"UCX_NET_DEVICES": "lo", "UCX_LOG_LEVEL": "fatal"}


@dataclass(frozen=True, slots=True)
class Settings:
    """`port` 0 takes a free one. A token takes `16 * width` bytes of the pool."""

    role: Role
    environment: Mapping[str, str]
    port: int = 0
    pages: int = 160
    slots: int = 16
    width: int = 1024
    beat_s: float = beats.BEAT_S
    growth: Growth = USUAL
    """Of decode."""
    optimistic: int = 0
    """How often prefill may begin a prompt before its offer."""


class Canary:
    """Pages that nobody owns hold a mark; one that does not, when it gets an owner, ends the process."""

    def __init__(self, engine: ByteEngine) -> None:
        self._pool = engine.pool
        self._unowned = set(range(engine.pages.num_pages))
        self._alloc, self._free = engine.pages.alloc, engine.pages.free
        self._pool.fill(tuple(self._unowned), CANARY)
        engine.pages.alloc = self.alloc  # type: ignore[method-assign]
        engine.pages.free = self.free  # type: ignore[assignment,method-assign]

    def alloc(self, count: int) -> PageIndices | None:
        pages = self._alloc(count)
        damaged = self.damaged(pages or ())
        if damaged:
            print(f"pages {damaged} were written while nobody owned them", file=sys.stderr, flush=True)
            os._exit(CANARY_EXIT)
        self._unowned.difference_update(pages or ())
        return pages

    def free(self, pages: PageIndices) -> None:
        self._pool.fill(pages, CANARY)
        self._free(pages)
        self._unowned.update(pages)

    def damaged(self, pages: Iterable[int] | None = None) -> list[int]:
        """Of these, or of all that nobody owns."""
        looked_at = self._unowned if pages is None else pages
        return [page for page in looked_at if not self._pool.is_filled((page,), CANARY)]


class StopInTheMiddle:
    """Stops this process, as SIGSTOP does, when so many more puts have been posted as it was armed for."""

    def __init__(self) -> None:
        self._left = 0
        post = UCXEndpoint.put_nbx

        def put_nbx(endpoint: UCXEndpoint, puts: Iterable[Any], requests: deque[int]) -> None:
            rest = list(puts)
            if 0 < self._left <= len(rest):
                post(endpoint, rest[: self._left], requests)
                rest = rest[self._left :]
                self._left = 0
                os.kill(os.getpid(), signal.SIGSTOP)
            self._left = max(0, self._left - len(rest))
            post(endpoint, rest, requests)

        UCXEndpoint.put_nbx = put_nbx  # type: ignore[assignment,method-assign]

    def arm(self, puts: int) -> None:
        """0 disarms."""
        self._left = puts


class LaterGate(Gate):
    """Lets so many pass, and stops who comes then."""

    def __init__(self, passes: int) -> None:
        super().__init__()
        self._passes = passes

    async def wait(self) -> bool:  # type: ignore[override]
        self._passes -= 1
        return self._passes >= 0 or await super().wait()


class Member:
    """The process."""

    def __init__(self, settings: Settings, pipe: Pipe) -> None:
        self._pipe = pipe
        self._role, self._port = settings.role, settings.port
        self._stopper = StopInTheMiddle()
        real = Real(process.new_instance(settings.role), UcxTransport(), settings.width)
        pages, slots = settings.pages, settings.slots
        self.life: Life
        if settings.role is Role.PREFILL:
            self.life = PrefillLife(LoopbackNetwork(), pages, slots, CHUNK_TOKENS, 60.0, real)
            self.life.service._optimistic_attempts = settings.optimistic
        else:
            self.life = DecodeLife(LoopbackNetwork(), pages, slots, 60.0, real, GENEROUS, settings.growth)
            self._canary = Canary(self.life.engine)

    async def serve(self) -> None:
        """Ends only by a signal."""
        life = self.life
        control = server.ControlServer([getattr(server, name)(each) for name, each in life.servicers.items()])
        address = f"{LOOPBACK}:{await control.start(LOOPBACK, self._port)}"
        supervisor = Supervisor(control)
        works = {str(number): work for number, work in enumerate([*life.works(), life.transport.watch()])}
        if isinstance(life, DecodeLife):
            life.wire(address)
        else:
            rank = RankInfo(life.instance, Role.PREFILL, RankPosition(), address, life.engine.layout, DATA_PLANE)
            membership = Membership(rank, lambda: Connection(address))
            works["lease"] = membership.stay(await membership.join())
        asyncio.get_running_loop().add_reader(self._pipe.fileno(), self._obey)
        self._pipe.send(int(address.rpartition(":")[2]))
        async with supervisor.running(**works):
            await supervisor.until_end()
        await supervisor.close()

    def _obey(self) -> None:
        command, number = self._pipe.recv()
        self._pipe.send(getattr(self, command)(number))

    def stop_after_puts(self, number: int) -> None:
        self._stopper.arm(number)

    def stop_at_call(self, number: int) -> None:
        """The engine does nothing more after so many calls, until it may `go_on`."""
        gate = self.life.engine.gate = LaterGate(number)
        self._go_on = gate.set

    def fill(self, _: int) -> None:
        """Nobody gets pages until this process may `go_on`."""
        self._go_on = self.life.fill()

    def go_on(self, _: int) -> None:
        self._go_on()

    def is_still(self, _: int) -> bool:
        return self.life.engine.gate.reached.is_set()

    def is_parked(self, _: int) -> bool:
        """A prompt is computed, and waits for its offer."""
        life = self.life
        return isinstance(life, PrefillLife) and any(job.sequence.output for job in life.scheduler._running)

    def damaged(self, _: int) -> list[int]:
        return self._canary.damaged()

    def assert_untouched(self, _: int) -> str:
        """What is left of rooms that have ended; empty when nothing is."""
        try:
            self.life.assert_untouched()
        except AssertionError as left:
            return str(left) or "something is left"
        return ""


def main(settings: Settings, pipe: Pipe) -> None:
    """Runs in the new process."""
    os.environ.update(SETTINGS | dict(settings.environment))
    beats.BEAT_S = settings.beat_s
    process.share_interpreter()
    asyncio.run(Member(settings, pipe).serve())
