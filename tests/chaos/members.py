"""Chaos tests' processes from outside: started, stopped, killed, started again at one address; and rooms on them."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pd.v1 import generation_pb2, generation_pb2_grpc, transfer_status_pb2, transfer_status_pb2_grpc

from pd_common.control import convert_generation
from pd_common.control.connection import Connection
from pd_common.errors import PdError, Reason
from pd_common.generation import GenerationRequest, SamplingParams
from pd_common.types import BootstrapAddress, BootstrapRoom
from tests.chaos import member
from tests.chaos.member import Settings
from tests.control.serving import LOOPBACK
from tests.services.byte_engine import answer_tokens

PATIENCE_S = 30.0
LOST = frozenset(
    {Reason.PEER_LOST, Reason.TRANSFER_FAILED, Reason.DEADLINE, Reason.ROOM_ABORTED, Reason.TOPOLOGY_INCOMPLETE}
)
"""Why a room may fail whose peer is stopped or killed."""

_spawn = multiprocessing.get_context("forkserver")
_spawn.set_forkserver_preload([member.__name__])
_rooms = itertools.count(1)


class Member:
    """One address, and the process that answers there now."""

    connection: Connection

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    async def start(self) -> None:
        """A process; after `kill` another one at the same address."""
        self._pipe, theirs = _spawn.Pipe()
        self._process = _spawn.Process(target=member.main, args=(self.settings, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.settings = replace(self.settings, port=await self._answer())
        self.connection = Connection(f"{LOOPBACK}:{self.settings.port}")

    @property
    def address(self) -> BootstrapAddress:
        return BootstrapAddress(LOOPBACK, self.settings.port)

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.exitcode

    async def ask(self, command: str, number: int = 0) -> Any:
        self._pipe.send((command, number))
        return await self._answer()

    async def arm(self, puts: int) -> None:
        """It stops itself after so many puts; 0 disarms. May be stopped before it can answer."""
        self._pipe.send(("stop_after_puts", puts))
        while not self._pipe.poll() and not self.is_stopped:  # noqa: ASYNC110  a pipe has no event
            await asyncio.sleep(0.002)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._pid, number)

    @property
    def is_stopped(self) -> bool:
        """By SIGSTOP."""
        stat = Path(f"/proc/{self._pid}/stat").read_text(encoding="ascii", errors="replace")
        return stat.rpartition(")")[2].split()[0] == "T"

    async def kill(self) -> None:
        """SIGKILL. Calls that are under way end as they do for any client."""
        self._process.kill()
        await asyncio.to_thread(self._process.join, PATIENCE_S)
        self._pipe.close()

    async def restart(self) -> None:
        await self.connection.close()
        await self.start()

    async def settle(self) -> None:
        """Takes answers that nobody waited for."""
        while self._pipe.poll():
            self._pipe.recv()

    async def pool(self) -> transfer_status_pb2.GetPoolResponse:
        stub: Any = transfer_status_pb2_grpc.TransferStatusStub(self.connection.channel)
        response: transfer_status_pb2.GetPoolResponse = await self.connection.call(
            stub.GetPool, transfer_status_pb2.GetPoolRequest()
        )
        return response

    async def quarantine(self) -> list[transfer_status_pb2.QuarantinedRoom]:
        stub: Any = transfer_status_pb2_grpc.TransferStatusStub(self.connection.channel)
        response = await self.connection.call(stub.ListQuarantine, transfer_status_pb2.ListQuarantineRequest())
        return list(response.rooms)

    async def generate(self, request: GenerationRequest) -> tuple[int, ...] | PdError:
        """One leg: its tokens, or why it failed."""
        stub: Any = generation_pb2_grpc.GenerationStub(self.connection.channel)
        tokens: list[int] = []
        try:
            with self.connection.typed_errors():
                call: AsyncIterator[generation_pb2.GenerateResponse] = stub.Generate(
                    convert_generation.request_to(request), timeout=request.timeout_s + PATIENCE_S
                )
                async for response in call:
                    tokens += response.output.token_ids
        except PdError as error:
            return error
        return tuple(tokens)

    @property
    def _pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    async def _answer(self) -> Any:
        answered = await asyncio.to_thread(self._pipe.poll, PATIENCE_S)
        assert answered, f"no answer; exit code {self.exit_code}"
        return self._pipe.recv()


@dataclass(frozen=True, slots=True)
class Outcome:
    """How both legs of a room ended."""

    request: GenerationRequest
    prefill: tuple[int, ...] | PdError
    decode: tuple[int, ...] | PdError

    @property
    def is_exact(self) -> bool:
        return self.decode == answer_tokens(len(self.request.prompt), self.request.sampling.max_new_tokens)

    def check(self, allowed: frozenset[Reason]) -> None:
        """Exact, or a typed error of these; never other text."""
        assert self.is_exact or (isinstance(self.decode, PdError) and self.decode.reason in allowed), self
        assert not isinstance(self.prefill, PdError) or self.prefill.reason in allowed, self


def new_request(at: Member, prompt_tokens: int, new_tokens: int, timeout_s: float = PATIENCE_S) -> GenerationRequest:
    """A room of its own; no two prompts begin alike."""
    room = next(_rooms)
    return GenerationRequest(
        rid=f"r{room}",
        room=BootstrapRoom(room),
        bootstrap=at.address,
        prompt=tuple((97 * room + place) % 90_000 + 1 for place in range(prompt_tokens)),
        sampling=SamplingParams(max_new_tokens=new_tokens, temperature=0.0),
        timeout_s=timeout_s,
    )


async def serve(
    prefill: Member, decode: Member, request: GenerationRequest, decode_timeout_s: float | None = None
) -> Outcome:
    """Both legs; decode may have less time than prefill."""
    on_decode = request if decode_timeout_s is None else replace(request, timeout_s=decode_timeout_s)
    outcomes = await asyncio.gather(prefill.generate(request), decode.generate(on_decode))
    return Outcome(request, *outcomes)


async def serve_until_exact(prefill: Member, decode: Member, prompt_tokens: int = 40) -> None:
    """The pair works (again): soon, and until then it says why not."""
    give_up = time.monotonic() + PATIENCE_S
    while True:
        outcome = await serve(prefill, decode, new_request(prefill, prompt_tokens, 3, timeout_s=10.0))
        outcome.check(LOST)
        if outcome.is_exact:
            return
        assert time.monotonic() < give_up, outcome
        await asyncio.sleep(0.05)


async def eventually(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not await condition():
        assert time.monotonic() < give_up, what
        await asyncio.sleep(0.02)


async def assert_whole(*members: Member) -> None:
    """Nothing is left of any room, nothing is in quarantine, no free page was written."""

    async def untouched(each: Member) -> bool:
        return bool(await each.ask("assert_untouched") == "")

    for each in members:
        await eventually(lambda each=each: untouched(each), f"{each.settings.role}: {await each.pool()}")  # type: ignore[misc]


@asynccontextmanager
async def started(*settings: Settings) -> AsyncIterator[list[Member]]:
    """Kills them in the end."""
    members: list[Member] = []
    try:
        for each in settings:
            new = Member(each)
            await new.start()
            members.append(new)
        yield members
    finally:
        for running in members:
            await running.kill()
            await running.connection.close()
