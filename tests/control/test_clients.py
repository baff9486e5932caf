from __future__ import annotations

import asyncio
from contextlib import suppress

from pd_common.control.connection import Connection
from pd_common.control.generation_client import GenerationClient
from pd_common.types import BootstrapAddress
from tests.control.fake_rooms import MODEL
from tests.control.serving import LOOPBACK

DELAY_S = 0.25


class SlowLink:
    """A way to another address on which every byte takes a while."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._relays: list[asyncio.Task[None]] = []

    async def start(self) -> BootstrapAddress:
        self._server = await asyncio.start_server(self._accept, LOOPBACK, 0)
        return BootstrapAddress(LOOPBACK, self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        self._server.close()
        for relay in self._relays:
            relay.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._relays.append(asyncio.create_task(self._relay(reader, writer)))

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        try:
            await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
        finally:
            for end in (writer, far_writer):
                end.close()
                with suppress(OSError):
                    await end.wait_closed()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(65536):
        await asyncio.sleep(DELAY_S)
        sink.write(data)


async def test_a_slow_network_is_not_a_lost_peer(engine: Connection) -> None:
    link = SlowLink(engine.address)
    connection = Connection((await link.start()).target)
    try:
        assert await GenerationClient(connection).get_model() == MODEL
    finally:
        await connection.close()
        await asyncio.wait_for(link.stop(), 10)
