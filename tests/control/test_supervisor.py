from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pd_common.aio import Tasks, for_ever
from pd_common.control import server, supervisor
from pd_common.control.abort_servicer import AbortServicer
from pd_common.control.connection import Connection
from pd_common.control.server import LIVENESS, ControlServer
from pd_common.control.supervisor import Supervisor
from pd_common.errors import InternalError, TransferFailed
from tests.control.fake_rooms import FakeRooms
from tests.control.serving import LOOPBACK

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
READINESS = ("", "pd.v1.Abort")


class Watcher:
    """What a standard health client is told of one name, as it changes."""

    def __init__(self, connection: Connection, name: str) -> None:
        stub: Any = health_pb2_grpc.HealthStub(connection.channel)
        self._call = stub.Watch(health_pb2.HealthCheckRequest(service=name))

    async def next(self) -> int:
        status: int = (await asyncio.wait_for(self._call.read(), 2)).status
        return status

    async def turns(self, status: int) -> None:
        """Returns when it is this; each change comes within two seconds."""
        while await self.next() != status:
            pass

    async def stops_serving(self) -> None:
        """Watches no longer then."""
        await self.turns(NOT_SERVING)
        self._call.cancel()


async def status_of(connection: Connection, name: str) -> int:
    stub: Any = health_pb2_grpc.HealthStub(connection.channel)
    status: int = (await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=2)).status
    return status


@pytest.fixture
async def control(rooms: FakeRooms) -> AsyncIterator[ControlServer]:
    control = ControlServer([server.abort(AbortServicer(rooms))])
    yield control
    await control.stop(grace_s=0.0)


@pytest.fixture
async def connection(control: ControlServer) -> AsyncIterator[Connection]:
    connection = Connection(f"{LOOPBACK}:{await control.start(LOOPBACK, 0)}")
    yield connection
    await connection.close()


async def fails() -> None:
    raise ZeroDivisionError("of a loop")


async def fails_typed() -> None:
    raise TransferFailed("the data plane is broken")


async def returns() -> None:
    pass


def cancel(name: str) -> None:
    (task,) = (task for task in asyncio.all_tasks() if task.get_name() == name)
    task.cancel()


DEATHS: list[tuple[Callable[[], Coroutine[Any, Any, None]], str]] = [
    (fails, "ZeroDivisionError: of a loop"),
    (fails_typed, "the data plane is broken"),
    (returns, "it has ended"),
    (for_ever, "it was cancelled"),
]


@pytest.mark.parametrize(("dying", "why"), DEATHS, ids=["raises", "raises typed", "returns", "is cancelled"])
async def test_a_work_that_ends_in_any_way_ends_health_and_the_process(
    control: ControlServer, connection: Connection, dying: Callable[[], Coroutine[Any, Any, None]], why: str
) -> None:
    await control.set_serving(True)
    watchers = [Watcher(connection, name) for name in (*READINESS, LIVENESS)]
    assert [await watcher.next() for watcher in watchers] == [SERVING] * 3
    process = Supervisor(control)
    closed: list[str] = []

    async def close(part: str) -> None:
        closed.append(part)
        if part == "broken":
            raise TransferFailed("a part that does not close, as its thread is dead")

    async with process.running(good=for_ever(), engine_loop=dying()):
        if dying is for_ever:
            cancel("engine loop")
        for watcher in watchers:
            await watcher.stops_serving()
        await asyncio.wait_for(process.until_end(), 2)
        assert process.patience_s(30.0) == 0.0
        await control.set_serving(True)  # of one who does not know
        assert [await status_of(connection, name) for name in (*READINESS, LIVENESS)] == [NOT_SERVING] * 3
    with pytest.raises(InternalError, match=f"engine loop died: {why}"):
        await process.close(close("broken"), close("other"))
    assert closed == ["broken", "other"]


async def test_a_signal_ends_readiness_and_leaves_liveness(control: ControlServer, connection: Connection) -> None:
    await control.set_serving(True)
    process = Supervisor(control)
    async with process.running(loop=for_ever()):
        ending = asyncio.create_task(process.until_end())
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(ending, 2)
        assert process.patience_s(30.0) == 30.0
        await control.set_serving(True)  # of a probe that went through just now
        assert [await status_of(connection, name) for name in READINESS] == [NOT_SERVING] * 2
        assert await status_of(connection, LIVENESS) == SERVING
    await process.close()
    assert await status_of(connection, LIVENESS) == SERVING


async def test_liveness_is_there_before_readiness_and_does_not_follow_it(
    control: ControlServer, connection: Connection
) -> None:
    assert [await status_of(connection, name) for name in ("", LIVENESS)] == [NOT_SERVING, SERVING]
    for ready in (True, False):
        await control.set_serving(ready)
        assert await status_of(connection, LIVENESS) == SERVING


async def test_a_part_that_does_not_close_is_the_error_when_nothing_has_died(control: ControlServer) -> None:
    process = Supervisor(control)
    async with process.running():
        pass
    with pytest.raises(TransferFailed):
        await process.close(fails_typed(), returns())


async def test_a_process_that_does_not_end_after_a_death_is_cut_off(
    control: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_off = asyncio.Event()
    monkeypatch.setattr(supervisor, "_ENDS_WITHIN_S", 0.01)
    monkeypatch.setattr(os, "_exit", lambda _: cut_off.set())
    process = Supervisor(control)
    async with process.running(engine=fails()):
        await asyncio.wait_for(process.until_end(), 2)
    hanging = asyncio.create_task(process.close(for_ever()))
    await asyncio.wait_for(cut_off.wait(), 2)
    hanging.cancel()


async def test_a_process_that_ends_in_time_after_a_death_is_not_cut_off(
    control: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_off = asyncio.Event()
    monkeypatch.setattr(supervisor, "_ENDS_WITHIN_S", 0.05)
    monkeypatch.setattr(os, "_exit", lambda _: cut_off.set())
    process = Supervisor(control)
    async with process.running(engine=fails()):
        await process.until_end()
    with pytest.raises(InternalError):
        await process.close()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(cut_off.wait(), 0.1)


# --- tasks that may end ---


async def test_tasks_may_return_and_the_first_that_does_not_is_named() -> None:
    tasks = Tasks()
    watch = asyncio.create_task(tasks.watch())
    await tasks.start("a proof", returns())
    await asyncio.sleep(0)
    assert list(tasks) == []
    assert not watch.done()
    with pytest.raises(ZeroDivisionError):
        await tasks.start("another proof", fails())
    with pytest.raises(InternalError, match="another proof died: ZeroDivisionError: of a loop"):
        await asyncio.wait_for(watch, 2)


async def test_a_task_that_somebody_cancels_has_died_before_its_first_step_too() -> None:
    tasks = Tasks()
    tasks.start("a beat", for_ever()).cancel()
    with pytest.raises(InternalError, match="a beat died: it was cancelled"):
        await asyncio.wait_for(tasks.watch(), 2)


async def test_tasks_that_are_closed_have_ended_and_have_not_died() -> None:
    tasks = Tasks()
    watch = asyncio.create_task(tasks.watch())
    task = tasks.start("a beat", for_ever())
    await tasks.close()
    assert task.cancelled()
    await asyncio.sleep(0)
    assert not watch.done()
    watch.cancel()
