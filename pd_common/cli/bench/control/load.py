"""Rooms sent through a pair as a router sends them: both legs, and the end of both."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from pd_common.cli.bench.control.model import VOCAB_SIZE
from pd_common.control.connection import Connection
from pd_common.control.generation_client import GenerationClient
from pd_common.errors import PdError
from pd_common.generation import GenerationRequest, SamplingParams
from pd_common.telemetry import spans
from pd_common.types import BootstrapAddress, BootstrapRoom

PROMPT_TOKENS = 16
_TIMEOUT_S = 60.0
_SUBSCRIBER = "bench"


@dataclass(slots=True)
class Leg:
    """One process as its client sees it; `ends` are the rooms that have not had their last output."""

    client: GenerationClient
    ends: dict[BootstrapRoom, asyncio.Future[PdError | None]] = field(default_factory=dict)

    def open(self, room: BootstrapRoom) -> asyncio.Future[PdError | None]:
        """The room's end: None when it went well."""
        end = self.ends[room] = asyncio.get_running_loop().create_future()
        return end

    async def submit(self, request: GenerationRequest) -> None:
        await self.client.submit(request, _SUBSCRIBER, spans.of_room(request.room))

    async def follow(self, standing: asyncio.Event) -> None:
        """Reads the outputs of every room."""
        async for outputs in self.client.stream_outputs(_SUBSCRIBER):
            standing.set()
            for output in outputs:
                if output.is_last:
                    self.ends.pop(output.room).set_result(output.error)


@dataclass(frozen=True, slots=True)
class RoomTimes:
    """When both legs were sent, in seconds since 1970, and how long until both sides had ended the room."""

    room: BootstrapRoom
    sent_s: float
    seconds: float


class Load:
    """A client of one pair. Nothing is generated beyond the first token."""

    def __init__(self, prefill: BootstrapAddress, decode: BootstrapAddress) -> None:
        self._bootstrap = prefill
        self._connections = [Connection(address.target) for address in (prefill, decode)]
        self._legs = [Leg(GenerationClient(connection)) for connection in self._connections]
        self._numbers = itertools.count(1)
        self._streams: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Opens the streams of outputs."""
        for leg in self._legs:
            standing = asyncio.Event()
            self._streams.append(asyncio.create_task(leg.follow(standing)))
            await standing.wait()

    async def stop(self) -> None:
        for stream in self._streams:
            stream.cancel()
        await asyncio.gather(*self._streams, return_exceptions=True)
        for connection in self._connections:
            await connection.close()

    async def room(self) -> RoomTimes:
        """One room.

        Raises:
            PdError: the room failed.

        """
        request = make_request(BootstrapRoom(next(self._numbers)), self._bootstrap)
        sent_s, began_s = time.time(), time.perf_counter()
        ends = [leg.open(request.room) for leg in self._legs]
        await asyncio.gather(*(leg.submit(request) for leg in self._legs))
        for end in ends:
            if (error := await end) is not None:
                raise error
        return RoomTimes(request.room, sent_s, time.perf_counter() - began_s)

    async def back_to_back(self, rooms: int, at_once: int) -> Sequence[RoomTimes]:
        """So many rooms, `at_once` of them at any time."""
        left = itertools.repeat(None, rooms)

        async def lane() -> list[RoomTimes]:
            return [await self.room() for _ in left]

        lanes = await asyncio.gather(*(lane() for _ in range(at_once)))
        return [times for lane in lanes for times in lane]

    async def at_rate(self, rooms: int, per_s: float) -> Sequence[RoomTimes]:
        """So many rooms, one every 1/`per_s` seconds whatever becomes of the others."""
        began_s = time.perf_counter()
        running = []
        for number in range(rooms):
            await asyncio.sleep(max(0.0, began_s + number / per_s - time.perf_counter()))
            running.append(asyncio.create_task(self.room()))
        return await asyncio.gather(*running)


def make_request(room: BootstrapRoom, bootstrap: BootstrapAddress) -> GenerationRequest:
    """A short prompt, and one token for an answer."""
    return GenerationRequest(
        rid=f"bench-{room}",
        room=room,
        bootstrap=bootstrap,
        prompt=tuple((room + place) % VOCAB_SIZE for place in range(PROMPT_TOKENS)),
        sampling=SamplingParams(max_new_tokens=1, temperature=0.0),
        timeout_s=_TIMEOUT_S,
    )
