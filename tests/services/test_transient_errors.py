"""One error never blacklists a peer: the channel that broke is replaced, and the next room is served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from pd_common.errors import PdError, PeerLost, TransferFailed
from pd_common.transport.ucx.transport import UcxTransport
from tests.services.byte_engine import Gate
from tests.services.pair import Pair, running, soon
from tests.transport.pairs import CARRIERS, Memory, ProcessReceiver

ROOM, NEXT = 7, 8


@pytest.fixture(params=["loopback", *CARRIERS])
async def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    for name, value in CARRIERS.get(request.param, {}).items():
        monkeypatch.setenv(name, value)
    async with running(Pair(new_transport=None if request.param == "loopback" else UcxTransport)) as pair:
        yield pair


async def ended(pair: Pair, room: int) -> list[PdError | None]:
    """How both legs ended."""
    clients = (pair.at_prefill.client, pair.at_decode.client)
    return [(await client.outputs(room))[-1].error for client in clients]


async def test_a_port_that_is_torn_down_costs_the_rooms_on_it_and_no_later_one(pair: Pair) -> None:
    """Prefill finds out by a write that fails; decode by being told. Again and again, in the same two processes."""
    await pair.serve(1)
    for round_number in range(2, 5):
        room = 10 * round_number
        gate = pair.prefill.engine.shut()
        await pair.submit(pair.request(room, prompt_tokens=20))
        await soon(gate.reached.wait())
        await pair.decode.prefills._paired[pair.prefill.instance].port.fence()
        gate.set()
        for error in await ended(pair, room):
            assert isinstance(error, PeerLost | TransferFailed)
        await pair.serve(room + 1)  # at once: nobody waits for the dust to settle


async def test_a_channel_that_is_closed_under_a_room_is_replaced(pair: Pair) -> None:
    await pair.serve(1)
    gate = pair.prefill.engine.shut()
    await pair.submit(pair.request(ROOM, prompt_tokens=20))
    await soon(gate.reached.wait())
    broken = pair.prefill.receivers.get(pair.decode.instance).channel
    await broken.close()
    gate.set()
    for error in await ended(pair, ROOM):
        assert isinstance(error, PeerLost | TransferFailed)
    await pair.serve(NEXT)
    assert pair.prefill.receivers.get(pair.decode.instance).channel is not broken


async def test_rooms_that_were_waiting_when_the_channel_broke_are_served_by_the_next() -> None:
    async with running(Pair(decode_slots=1)) as pair:
        gate = pair.faults.hold = Gate()
        pair.faults.fail_write = 1
        await pair.submit(pair.request(ROOM, prompt_tokens=6))
        await soon(gate.reached.wait())
        waiting = [pair.request(room) for room in (20, 21, 22)]
        for request in waiting:
            await pair.submit(request)
        gate.set()
        assert all(isinstance(error, PeerLost | TransferFailed) for error in await ended(pair, ROOM))
        for request in waiting:
            await pair.assert_answered(request)


@pytest.mark.parametrize("carrier", CARRIERS)
async def test_the_address_of_a_port_opens_no_other(carrier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ports have two addresses, and one that is gone is unreachable: torn down, or dead and succeeded by another
    process that offers memory of its own.
    """
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    for name, value in CARRIERS[carrier].items():
        monkeypatch.setenv(name, value)
    sender, receivers = UcxTransport(), [ProcessReceiver(CARRIERS[carrier])]
    source = Memory()
    sender.register(source.region)
    try:
        torn_down, of_the_dead = await receivers[0].listen(), await receivers[0].listen()
        assert torn_down != of_the_dead
        channel = await sender.connect(of_the_dead)
        await receivers[0].fence(torn_down)
        with pytest.raises(TransferFailed):
            await asyncio.wait_for(sender.connect(torn_down), 20)
        receivers[0].kill()
        receivers.append(ProcessReceiver(CARRIERS[carrier]))
        assert await receivers[1].listen() not in (torn_down, of_the_dead)
        untouched = receivers[1].call("checksum")
        for address in (torn_down, of_the_dead):
            with pytest.raises(TransferFailed):
                await asyncio.wait_for(sender.connect(address), 20)
        assert receivers[1].call("checksum") == untouched
        await channel.close()
    finally:
        await sender.close()
        for receiver in receivers:
            receiver.kill()
