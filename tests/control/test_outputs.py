from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from pd_common.control.outputs import OutputHub
from pd_common.errors import InvalidRequest, PeerLost
from pd_common.generation import FinishReason, Output
from pd_common.types import BootstrapRoom

ONE, TWO, THREE = BootstrapRoom(1), BootstrapRoom(2), BootstrapRoom(3)


def piece(room: BootstrapRoom, token: int) -> Output:
    return Output(room, token_ids=(token,))


def last(room: BootstrapRoom) -> Output:
    return Output(room, finish=FinishReason.LENGTH)


def failed(room: BootstrapRoom) -> Output:
    return Output(room, error=PeerLost("gone"))


async def next_step(stream: AsyncIterator[tuple[Output, ...]]) -> tuple[Output, ...]:
    return await asyncio.wait_for(anext(stream), 5)


@pytest.fixture
def hub() -> OutputHub:
    hub = OutputHub()
    hub.subscribe("a")
    hub.subscribe("b")
    return hub


async def test_one_step_is_one_message_for_each_subscriber(hub: OutputHub) -> None:
    for room, owner in ((ONE, "a"), (TWO, "b"), (THREE, "a")):
        hub.own(room, owner)
    hub.publish([piece(ONE, 10), piece(TWO, 20), piece(THREE, 30)])
    hub.publish([piece(THREE, 31), piece(ONE, 11)])
    a, b = hub.stream("a"), hub.stream("b")
    assert await next_step(a) == (piece(ONE, 10), piece(THREE, 30))
    assert await next_step(a) == (piece(THREE, 31), piece(ONE, 11))
    assert await next_step(b) == (piece(TWO, 20),)


async def test_a_step_without_outputs_for_a_subscriber_is_no_message(hub: OutputHub) -> None:
    hub.own(ONE, "a")
    hub.own(TWO, "b")
    hub.publish([piece(TWO, 20)])
    hub.publish([])
    hub.publish([piece(ONE, 10)])
    assert await next_step(hub.stream("a")) == (piece(ONE, 10),)


async def test_outputs_of_a_room_that_nobody_owns_go_nowhere(hub: OutputHub) -> None:
    hub.publish([piece(ONE, 10)])
    hub.own(ONE, "a")
    hub.publish([piece(ONE, 11)])
    assert await next_step(hub.stream("a")) == (piece(ONE, 11),)


@pytest.mark.parametrize("end", [last(ONE), failed(ONE)], ids=["finish", "error"])
async def test_the_last_output_ends_the_ownership(hub: OutputHub, end: Output) -> None:
    hub.own(ONE, "a")
    hub.publish([piece(ONE, 10), end, piece(ONE, 11)])
    hub.publish([failed(ONE)])
    hub.own(TWO, "a")
    hub.publish([piece(TWO, 20)])
    stream = hub.stream("a")
    assert await next_step(stream) == (piece(ONE, 10), end)
    assert await next_step(stream) == (piece(TWO, 20),)
    assert hub.unsubscribe("a") == (TWO,)


async def test_unsubscribing_gives_the_rooms_that_have_not_ended(hub: OutputHub) -> None:
    for room, owner in ((ONE, "a"), (TWO, "a"), (THREE, "b")):
        hub.own(room, owner)
    hub.publish([last(ONE)])
    assert hub.unsubscribe("a") == (TWO,)
    assert hub.unsubscribe("a") == ()
    hub.publish([piece(TWO, 20), piece(THREE, 30)])
    assert await next_step(hub.stream("b")) == (piece(THREE, 30),)


async def test_a_name_can_be_used_again_and_starts_empty(hub: OutputHub) -> None:
    hub.own(ONE, "a")
    hub.publish([piece(ONE, 10)])
    hub.unsubscribe("a")
    hub.subscribe("a")
    hub.own(TWO, "a")
    hub.publish([piece(TWO, 20)])
    assert await next_step(hub.stream("a")) == (piece(TWO, 20),)


@pytest.mark.parametrize("name", ["", "a"], ids=["empty", "in use"])
def test_a_name_that_cannot_be_subscribed_is_refused(hub: OutputHub, name: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        hub.subscribe(name)
    assert raised.value.metadata == {"field": "subscriber"}


def test_only_a_subscriber_may_submit(hub: OutputHub) -> None:
    hub.require("a")
    hub.unsubscribe("a")
    for name in ("a", "nobody", ""):
        with pytest.raises(InvalidRequest):
            hub.require(name)
