"""pdctl try as a person types it, against scripted processes: what it asks for, prints, and ends with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest
from pd.v1 import generation_pb2, generation_pb2_grpc

from pd_common.control import server
from pd_common.control.inspection_servicer import InspectionServicer
from pd_common.control.rooms import Call
from pd_common.control.server import ControlServer
from pd_common.errors import CapacityExceeded, DigestMismatch
from pd_common.telemetry import spans
from pd_common.telemetry.spans import SpanName
from pd_common.types import BootstrapRoom
from tests.cli.pdctl_runs import Ended, run_pdctl
from tests.control.serving import LOOPBACK
from tests.inspection.scripted_system import ScriptedSystem

ROOM = BootstrapRoom(5)
LAST = generation_pb2.Output(
    bootstrap_room=ROOM,
    text=" be",
    finish_reason=generation_pb2.FINISH_REASON_LENGTH,
    usage=generation_pb2.Usage(prompt_tokens=7, completion_tokens=2),
)


@dataclass
class Answering(generation_pb2_grpc.GenerationServicer):
    """A router that sends every request to room 5, where `happens` what a test says, and answers `to be`."""

    system: ScriptedSystem
    happens: Callable[[], None] = lambda: None
    way: tuple[str, ...] = ("prefill", "decode")
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    asked: generation_pb2.GenerateRequest | None = None
    address: str = ""

    async def Generate(  # noqa: N802  the generated base class's name, and parameters
        self,
        request: generation_pb2.GenerateRequest,
        context: Call,  # noqa: ARG002
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        self.asked = request
        system = self.system
        named = {role: getattr(system, role).address for role in self.way}
        leg = system.router.tracing.begin(SpanName.ROUTE, ROOM, spans.of_room(ROOM), **named)
        try:
            yield generation_pb2.GenerateResponse(output=generation_pb2.Output(bootstrap_room=ROOM, text="to"))
            await self.may_end.wait()
            self.happens()
            yield generation_pb2.GenerateResponse(output=LAST)
        finally:
            leg.end()

    async def pdctl(self, *words: str) -> Ended:
        return await run_pdctl({"PD_ROUTER": self.address, "COLUMNS": "120"}, "try", *words)


@pytest.fixture
async def answering() -> AsyncIterator[Answering]:
    system = ScriptedSystem()
    answering = Answering(system)  # type: ignore[abstract]  # its other methods are not called
    answering.may_end.set()
    async with system.running():
        router = system.router
        inspection = server.inspection(InspectionServicer(router._describe, router.tracing))
        async with ControlServer([server.generation(answering), inspection]).listening(LOOPBACK, 0) as port:
            answering.address = f"{LOOPBACK}:{port}"
            yield answering


async def test_an_answer_its_room_and_both_sides_are_printed(answering: Answering) -> None:
    prefill, decode = answering.system.prefill, answering.system.decode

    def succeed() -> None:
        prefill.succeed(prefill.open(ROOM))
        decode.succeed(decode.open(ROOM))

    answering.happens = succeed
    ended = await answering.pdctl("or not", "--max-new-tokens", "2", "--timeout", "30")
    assert (ended.code, ended.err) == (0, "")
    assert answering.asked is not None
    assert ended.out.splitlines() == [
        "to be",
        f"room 5  rid {answering.asked.rid}  7 prompt tokens, 2 answer tokens",
        f"prefill {prefill.address}  success  1 page, 1 KiB",
        f"decode  {decode.address}  success  1 page, 1 KiB",
    ]
    sampling = answering.asked.sampling_params
    assert (answering.asked.text, sampling.max_new_tokens, sampling.temperature) == ("or not", 2, 0.0)
    assert answering.asked.bootstrap_room == 0, "the router draws it"


async def test_a_side_that_is_a_little_late_is_waited_for(answering: Answering) -> None:
    prefill, decode = answering.system.prefill, answering.system.decode

    def succeed_late() -> None:
        decode.succeed(decode.open(ROOM))
        prefill.progress(prefill.open(ROOM), 1)
        asyncio.get_running_loop().call_later(0.5, prefill.succeed, ROOM)

    answering.happens = succeed_late
    ended = await answering.pdctl()
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.count("success") == 2


async def test_a_decode_alone_is_fine_and_is_said(answering: Answering) -> None:
    decode = answering.system.decode
    answering.way = ("decode",)
    answering.happens = lambda: decode.succeed(decode.open(ROOM))
    ended = await answering.pdctl()
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.endswith("no prefill had to do with it: decode has computed the prompt itself\n")


async def test_a_side_that_has_failed_is_an_error(answering: Answering) -> None:
    prefill, decode = answering.system.prefill, answering.system.decode

    def half() -> None:
        prefill.succeed(prefill.open(ROOM))
        decode.fail(decode.open(ROOM), DigestMismatch("other bytes", room=ROOM))

    answering.happens = half
    ended = await answering.pdctl()
    assert ended.code == 1
    assert ended.err == f"Error: room 5 is failed on decode {decode.address}: DIGEST_MISMATCH: other bytes\n"


async def test_a_side_that_does_not_end_or_does_not_know_is_an_error(answering: Answering) -> None:
    prefill, decode = answering.system.prefill, answering.system.decode
    answering.happens = lambda: prefill.progress(prefill.open(ROOM), 1)
    ended = await answering.pdctl()
    assert ended.code == 1
    assert ended.err.splitlines() == [
        f"Error: decode {decode.address} does not say what became of room 5",
        f"room 5 is transferring on prefill {prefill.address}",
    ]


async def test_an_answer_that_fails_is_an_error_on_a_line_of_its_own(answering: Answering) -> None:
    def refuse() -> None:
        raise CapacityExceeded("too many wait")

    answering.happens = refuse
    assert await answering.pdctl() == Ended("to\n", "Error: too many wait\n", 1)


async def test_an_answer_that_does_not_end_is_given_up(answering: Answering) -> None:
    answering.may_end.clear()
    ended = await asyncio.wait_for(answering.pdctl("--timeout", "2"), 20)
    assert answering.asked is not None
    assert ended == Ended("to\n", f"Error: {answering.asked.rid} was not over within 2 s\n", 1)


async def test_nobody_at_the_router_is_an_error() -> None:
    ended = await run_pdctl({}, "try", "--router", f"{LOOPBACK}:1")
    assert (ended.code, ended.err.count("\n")) == (1, 1)
    assert ended.err.startswith(f"Error: {LOOPBACK}:1: ")
