"""What an inspection finds in a system whose processes come, go, freeze and disagree."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from pd.v1 import types_pb2

from pd_common.control.connection import dial_plain
from pd_common.errors import DigestMismatch, PeerLost, Reason, RoomAborted, RoomUnknown, TopologyIncomplete
from pd_common.inspection.inspector import Inspector
from pd_common.inspection.listing import list_rooms
from pd_common.inspection.process_client import RoomFilter
from pd_common.inspection.views import Clock, ClusterView, instance_of, is_open
from pd_common.types import MAX_ROOM, BootstrapRoom, Role
from tests.inspection.scripted_system import ScriptedProcess, ScriptedSystem

SUCCESS, FAILED = types_pb2.TRANSFER_STATE_SUCCESS, types_pb2.TRANSFER_STATE_FAILED
EVERYTHING = RoomFilter()


@pytest.fixture
async def system() -> ScriptedSystem:
    return ScriptedSystem()


@pytest.fixture
async def inspector(system: ScriptedSystem) -> AsyncIterator[Inspector]:
    async with system.running() as inspector:
        yield inspector


def found(cluster: ClusterView) -> dict[str, str]:
    return {view.address: view.role.value for view in cluster.processes}


# --- who is there ---


async def test_everybody_is_found_from_the_router(system: ScriptedSystem, inspector: Inspector) -> None:
    cluster = await inspector.cluster()
    assert list(found(cluster).values()) == ["router", "prefill", "decode"]
    router, prefill, decode = cluster.processes
    assert all(view.trouble is None for view in cluster.processes)
    assert (router.pool, router.topology) == (None, None)
    assert prefill.topology is not None
    assert [rank.control_address for rank in prefill.topology.ranks] == [system.prefill.address]
    assert decode.pool is not None
    assert decode.pool.pages_total == 64
    assert [peer.carrier for peer in decode.peers] == ["cma"]


async def test_without_a_router_a_worker_leads_to_its_peers(system: ScriptedSystem, inspector: Inspector) -> None:
    from_decode = Inspector([(system.decode.address, Role.DECODE)], dial_plain)
    assert found(await from_decode.cluster()) == {system.prefill.address: "prefill", system.decode.address: "decode"}
    await from_decode.close()


async def test_a_directory_leads_to_its_other_ranks(system: ScriptedSystem, inspector: Inspector) -> None:
    other = ScriptedProcess(Role.PREFILL, "1")
    await other.start()
    system.prefill.registry.unregister(system.prefill.instance)
    system.prefill.registered(system.prefill, other)
    assert other.address in found(await inspector.cluster())
    await other.stop()


async def test_a_process_with_two_addresses_is_one(system: ScriptedSystem, inspector: Inspector) -> None:
    system.router.described.workers.add(
        role=types_pb2.ROLE_DECODE, control_address=f"localhost:{system.decode.port}", live=True
    )
    assert [view.role for view in (await inspector.cluster()).processes] == [Role.ROUTER, Role.PREFILL, Role.DECODE]


async def test_a_role_is_what_the_process_says(system: ScriptedSystem, inspector: Inspector) -> None:
    mistaken = Inspector([(system.decode.address, Role.ROUTER)], dial_plain)
    assert found(await mistaken.cluster())[system.decode.address] == "decode"
    await mistaken.close()


async def test_one_that_is_gone_is_shown_with_the_rest(system: ScriptedSystem, inspector: Inspector) -> None:
    await system.decode.stop()
    router, prefill, decode = (await inspector.cluster()).processes
    assert (router.trouble, prefill.trouble) == (None, None)
    assert isinstance(decode.trouble, PeerLost)
    assert decode.why_silent == "Failed to connect to remote host: Connection refused"
    await system.decode.start()
    again = (await inspector.cluster()).processes
    assert [view.trouble for view in again] == [None, None, None]


async def test_one_that_accepts_and_says_nothing_is_given_up(system: ScriptedSystem, inspector: Inspector) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        system.router.described.workers.add(role=types_pb2.ROLE_DECODE, control_address=address)
        view = (await inspector.cluster()).at(address)
    assert view is not None
    assert isinstance(view.trouble, PeerLost)


async def test_nobody_at_all_is_an_error_that_says_who(system: ScriptedSystem, inspector: Inspector) -> None:
    for process in system.processes:
        await process.stop()
    cluster = await inspector.cluster()
    with pytest.raises(PeerLost, match=f"router {system.router.address} does not answer"):
        cluster.require_answers()


async def test_a_directory_that_misses_a_rank_says_so(system: ScriptedSystem, inspector: Inspector) -> None:
    system.prefill.registry.unregister(system.prefill.instance)
    prefill = (await inspector.cluster()).of_role(Role.PREFILL)[0]
    assert (prefill.trouble, prefill.topology) == (None, None)
    assert isinstance(prefill.topology_trouble, TopologyIncomplete)


async def test_clocks_of_one_host_do_not_differ(system: ScriptedSystem, inspector: Inspector) -> None:
    for view in (await inspector.cluster()).processes:
        assert view.clock is not None
        assert abs(view.clock.ahead_s) <= view.clock.round_trip_s


def test_a_clock_is_only_corrected_by_what_is_certain() -> None:
    time_there = Timestamp(seconds=100)
    assert Clock(ahead_s=0.001, round_trip_s=0.002).ours_ns(time_there) == 100 * 10**9
    assert Clock(ahead_s=3.0, round_trip_s=0.002).ours_ns(time_there) == 97 * 10**9


# --- rooms ---


async def test_the_latest_rooms_are_found_among_many(system: ScriptedSystem, inspector: Inspector) -> None:
    for number in range(1, 3001):
        system.decode.succeed(system.decode.open(number))
    (_, on_prefill), (_, on_decode) = await inspector.rooms(limit=20)
    assert on_prefill == ()
    assert [transfer.bootstrap_room for transfer in on_decode] == list(range(2981, 3001))
    _, (_, more) = await inspector.rooms(limit=2500)
    assert [transfer.bootstrap_room for transfer in more] == list(range(501, 3001))


async def test_an_old_room_is_found_by_its_state(system: ScriptedSystem, inspector: Inspector) -> None:
    stuck = system.decode.open(MAX_ROOM)
    for number in range(1, 3001):
        system.decode.succeed(system.decode.open(number))
    _, (_, waiting) = await inspector.rooms(states=[types_pb2.TRANSFER_STATE_BOOTSTRAPPING], limit=5)
    assert [transfer.bootstrap_room for transfer in waiting] == [stuck]


async def test_a_listing_has_both_sides_of_a_room_whichever_matches(
    system: ScriptedSystem, inspector: Inspector
) -> None:
    room = system.prefill.open(5, peer=system.decode)
    system.decode.open(5, peer=system.prefill)
    system.prefill.succeed(room)
    system.decode.fail(room, DigestMismatch("other bytes", room=room))
    (listed,) = (await list_rooms(inspector, await inspector.cluster(), RoomFilter(states=(FAILED,)), 10)).rooms
    assert listed.prefill is not None
    assert listed.decode is not None
    assert (listed.prefill.transfer.state, listed.decode.transfer.state) == (SUCCESS, FAILED)


async def test_a_listing_ends_with_the_room_that_came_last(system: ScriptedSystem, inspector: Inspector) -> None:
    first, second = system.decode.open(9), system.decode.open(3)
    system.decode.fail(first, RoomAborted("stop", room=first))  # changed last, opened first
    listing = await list_rooms(inspector, await inspector.cluster(), EVERYTHING, 10)
    assert [room.number for room in listing.rooms] == [first, second]


async def test_rooms_are_listed_although_a_side_is_gone(system: ScriptedSystem, inspector: Inspector) -> None:
    system.decode.open(5, peer=system.prefill)
    await system.prefill.stop()
    listing = await list_rooms(inspector, await inspector.cluster(), EVERYTHING, 10)
    assert [(room.number, room.prefill) for room in listing.rooms] == [(5, None)]
    assert [view.role for view in listing.cluster.processes if view.trouble] == [Role.PREFILL]


async def test_a_room_is_gathered_from_all_who_know_it(system: ScriptedSystem, inspector: Inspector) -> None:
    room = system.decode.open(MAX_ROOM)
    legs = [system.router.leg(room), system.decode.leg(room)]
    view = await inspector.room(room)
    assert [side.role for side in view.sides] == [Role.ROUTER, Role.DECODE]
    router, decode = view.sides
    assert router.transfer is None
    assert decode.transfer is not None
    assert decode.transfer.bootstrap_room == MAX_ROOM
    assert {leg.trace_id for side in view.sides for leg in side.legs} == {legs[0].trace_id}
    assert len(view.cluster.processes) == 3


async def test_an_unknown_room_says_who_was_asked(system: ScriptedSystem, inspector: Inspector) -> None:
    await system.decode.stop()
    with pytest.raises(RoomUnknown) as unknown:
        await inspector.room(BootstrapRoom(7))
    assert f"room 7 is not on record at router {system.router.address}, prefill" in unknown.value.message
    assert f"decode {system.decode.address} did not answer" in unknown.value.message


async def test_a_room_whose_answer_is_being_written_is_open(system: ScriptedSystem, inspector: Inspector) -> None:
    room = system.decode.open(5)
    leg = system.decode.leg(room)
    system.decode.succeed(room)
    assert [is_open(side) for side in (await inspector.room(room)).sides] == [True]
    leg.end()
    assert [is_open(side) for side in (await inspector.room(room)).sides] == [False]


# --- ending ---


async def test_an_abort_goes_to_the_router_that_has_the_room_open(system: ScriptedSystem, inspector: Inspector) -> None:
    room = system.decode.open(5)
    leg = system.router.leg(room)
    await inspector.abort(room, "by hand")
    aborted, error = system.router.rooms.aborted.get_nowait()
    assert (aborted, error.message) == (room, "by hand")
    assert system.decode.rooms.aborted.empty()
    leg.end()


async def test_an_abort_goes_to_each_side_where_no_router_has_the_room(
    system: ScriptedSystem, inspector: Inspector
) -> None:
    room = system.decode.open(5)
    system.prefill.open(5)
    view = await inspector.abort(room, "by hand")
    reasons = [side.transfer.timeline[-1].reason for side in view.sides if side.transfer]
    assert reasons == [Reason.ROOM_ABORTED, Reason.ROOM_ABORTED]


async def test_a_room_that_is_over_is_left_alone(system: ScriptedSystem, inspector: Inspector) -> None:
    room = system.decode.open(5)
    system.decode.succeed(room)
    await inspector.abort(room, "by hand")
    assert system.decode.rooms.aborted.empty()


# --- watching ---


async def test_changes_come_from_all_processes_and_a_lost_one_comes_back(
    system: ScriptedSystem, inspector: Inspector
) -> None:
    system.decode.open(1)  # before anybody watched
    async with aclosing(inspector.watch()) as changes, asyncio.timeout(15):
        began = {instance_of(view) for view, transfer in [await anext(changes), await anext(changes)] if not transfer}
        assert began == {system.prefill.instance.instance_id, system.decode.instance.instance_id}
        system.prefill.open(5)
        view, transfer = await anext(changes)
        assert transfer is not None
        assert (view.role, transfer.bootstrap_room) == (Role.PREFILL, 5)
        await system.decode.stop()
        view, transfer = await anext(changes)
        assert (view.role, transfer) == (Role.DECODE, None)
        assert isinstance(view.trouble, PeerLost)
        await system.decode.start()
        view, transfer = await anext(changes)
        assert (view.role, view.trouble, transfer) == (Role.DECODE, None, None)
