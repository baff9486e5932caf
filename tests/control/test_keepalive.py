from __future__ import annotations

import asyncio
import time
from typing import Any, Self

import pytest
from pd.v1 import abort_pb2, abort_pb2_grpc

from pd_common.control import server
from pd_common.control.abort_servicer import AbortServicer
from pd_common.control.connection import Connection
from pd_common.control.outputs import OutputHub
from pd_common.errors import PdError, PeerLost
from pd_common.handoff.state import TransferState
from pd_common.types import BootstrapRoom
from tests.control.fake_rooms import FakeRooms
from tests.control.serving import LOOPBACK, serving


class NeverQuiet(FakeRooms):
    """An abort that takes for ever; `asked` is set when there is one."""

    def __init__(self) -> None:
        super().__init__(OutputHub())
        self.asked = asyncio.Event()

    async def abort(self, room: BootstrapRoom, error: PdError) -> TransferState | None:  # noqa: ARG002
        self.asked.set()
        await asyncio.Event().wait()
        return None


class Line:
    """A connection through here stands; after `freeze` nothing comes through any more, as from a stopped process."""

    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.rpartition(":")
        self._ends: list[asyncio.StreamWriter] = []
        self._pipes: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connect, LOOPBACK, 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.freeze()
        await asyncio.gather(*self._pipes, return_exceptions=True)
        for end in self._ends:
            end.close()
        self._server.close()

    @property
    def target(self) -> str:
        return f"{LOOPBACK}:{self._server.sockets[0].getsockname()[1]}"

    def freeze(self) -> None:
        for pipe in self._pipes:
            pipe.cancel()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_connection(self._host, int(self._port))
        self._ends += [writer, forth]
        self._pipes += [asyncio.create_task(_pipe(reader, forth)), asyncio.create_task(_pipe(back, writer))]


async def _pipe(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(65536):
        sink.write(data)


async def test_a_process_that_answers_nothing_at_all_is_noticed_in_three_seconds_by_a_call_that_waits() -> None:
    rooms = NeverQuiet()
    async with serving(server.abort(AbortServicer(rooms))) as direct, Line(direct.address) as line:
        connection = Connection(line.target)
        stub: Any = abort_pb2_grpc.AbortStub(connection.channel)
        request = abort_pb2.AbortRoomRequest(bootstrap_room=1)
        call = asyncio.create_task(connection.call(stub.AbortRoom, request, timeout=30))
        await asyncio.wait_for(rooms.asked.wait(), 5)
        line.freeze()
        frozen = time.monotonic()
        with pytest.raises(PeerLost):
            await call
        assert time.monotonic() - frozen < 3.0
        await connection.close()
