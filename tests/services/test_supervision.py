"""The three processes, wired by their own `serve`: whatever dies in one of them, health tells and it ends."""

from __future__ import annotations

import asyncio
import ctypes
import socket
import sys
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import click
import pytest
from opentelemetry.context import Context

from pd_common.control.connection import Connection
from pd_common.control.generation_client import GenerationClient
from pd_common.control.server import LIVENESS, ControlServer
from pd_common.errors import InternalError, InvalidRequest, PdError, ShuttingDown
from pd_common.generation import Output
from pd_common.telemetry.tracing import Tracing
from pd_common.transport.fake import FAKE_BOOTSTRAP_HOST
from pd_common.types import BootstrapAddress
from services.decode import __main__ as decode
from services.prefill import __main__ as prefill
from services.router import __main__ as router
from services.router.dispatch import Dispatcher
from services.router.probe import Prober
from tests.control.serving import LOOPBACK, make_request
from tests.control.test_supervisor import NOT_SERVING, SERVING, Watcher, status_of
from tests.services.engine_server import Cluster, soon
from tests.services.pair import Pair, until
from tests.services.pair import running as running_pair
from tests.tiny_models import tiny_model

ENGINE = ["scheduler", "reaper", "engine", "data plane", "rooms", "metrics"]
PREFILL = [*ENGINE, "lease"]
DECODE = [*ENGINE, "pairings", "proofs"]
ROUTER = ["prober", "probes", "rooms", "http", "metrics", "workers"]
OF_OTHERS = {
    "HTTP server (http_port)": "http",
    "HTTP server (metrics_port)": "metrics",
    "stream of prefill": "streams died: stream of prefill",
    "stream of decode": "streams died: stream of decode",
}
"""Tasks of tasks: who watches them dies of their death."""


@dataclass(frozen=True, slots=True)
class Served:
    """A process's `serve`, running."""

    task: asyncio.Task[None]
    connection: Connection

    async def health(self) -> tuple[int, int]:
        """Readiness and liveness."""
        return await status_of(self.connection, ""), await status_of(self.connection, LIVENESS)

    async def watchers(self) -> tuple[Watcher, Watcher]:
        """Of readiness and of liveness, both SERVING."""
        ready, live = Watcher(self.connection, ""), Watcher(self.connection, LIVENESS)
        await soon(ready.turns(SERVING))
        assert await live.next() == SERVING
        return ready, live


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def free_port() -> int:
    with socket.socket() as each:
        each.bind((LOOPBACK, 0))
        port: int = each.getsockname()[1]
        return port


def options_of(command: click.Command, *flags: str) -> dict[str, Any]:
    return dict(command.make_context("test", [*flags, "--host", LOOPBACK, "--metrics-port", "0"]).params)


@asynccontextmanager
async def running(work: Coroutine[Any, Any, None], port: int) -> AsyncIterator[Served]:
    served = Served(asyncio.create_task(work), Connection(f"{LOOPBACK}:{port}"))
    try:
        await served.connection.channel.channel_ready()
        yield served
    finally:
        await served.connection.close()
        if not served.task.done():
            kill_task("metrics")
        await asyncio.gather(served.task, return_exceptions=True)


@asynccontextmanager
async def engine_process(module: Any) -> AsyncIterator[Served]:
    port = free_port()
    flags = ["--model", str(tiny_model()), "--port", str(port), "--page-size", "16", "--kv-cache-tokens", "512"]
    async with running(module.serve(options_of(module.main, *flags, "--threads", "1")), port) as served:
        yield served


@asynccontextmanager
async def router_process() -> AsyncIterator[Served]:
    """Its peers answer nothing: only its liveness is to be seen."""
    port, nobody = free_port(), f"{LOOPBACK}:{free_port()}"
    flags = ["--prefill", nobody, "--decode", nobody, "--grpc-port", str(port), "--http-port", "0"]
    async with running(router.serve(**options_of(router.main, *flags)), port) as served:
        yield served


def kill_task(name: str) -> None:
    """The one whose name begins like this."""
    (task,) = (task for task in asyncio.all_tasks() if task.get_name().startswith(name))
    task.cancel()


def kill_thread(name: str) -> None:
    """The youngest of this name: engines that other tests share may be there as well."""
    *_, thread = (thread for thread in threading.enumerate() if thread.name == name)
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))


async def assert_ends(served: Served, name: str) -> None:
    with pytest.raises(InternalError, match=f"this process cannot go on: {name}.* died: "):
        await soon(served.task)


class Room:
    """A request to one engine process, as a router sends it."""

    def __init__(self, served: Served, number: int, bootstrap: BootstrapAddress) -> None:
        self._client = GenerationClient(served.connection)
        self._request = replace(make_request(number, max_new_tokens=2), bootstrap=bootstrap)
        self._outputs = self._client.stream_outputs(f"router-{number}")

    async def submit(self) -> None:
        assert await soon(anext(self._outputs)) == ()
        await self._client.submit(self._request, f"router-{self._request.room}", Context())

    async def failure(self) -> PdError | None:
        """Of the first output there is, which comes within two seconds."""
        outputs: tuple[Output, ...] = ()
        async with asyncio.timeout(2):
            while not outputs:  # nothing but a sign of life
                outputs = await anext(self._outputs)
        await self._outputs.aclose()
        return outputs[0].error


@pytest.fixture
def silent() -> Iterator[BootstrapAddress]:
    """A peer that takes connections and never says a word: rooms that are to meet there wait."""
    with socket.create_server((LOOPBACK, 0)) as listening:
        yield BootstrapAddress(LOOPBACK, listening.getsockname()[1])


@pytest.mark.parametrize(
    ("module", "name"), [(prefill, name) for name in PREFILL] + [(decode, name) for name in DECODE]
)
async def test_a_task_of_an_engine_process_that_dies_ends_it(module: Any, name: str, silent: BootstrapAddress) -> None:
    async with engine_process(module) as served:
        ready, live = await served.watchers()
        room = Room(served, 5, silent)
        await room.submit()
        kill_task(name)
        await ready.stops_serving()
        await live.stops_serving()
        assert isinstance(await room.failure(), ShuttingDown)
        await assert_ends(served, name)


@pytest.mark.parametrize("module", [prefill, decode])
@pytest.mark.parametrize(("thread", "name"), [("engine", "engine"), ("ucx-progress", "data plane")])
async def test_a_thread_of_an_engine_process_that_dies_ends_it(
    module: Any, thread: str, name: str, silent: BootstrapAddress
) -> None:
    async with engine_process(module) as served:
        ready, live = await served.watchers()
        room = Room(served, 5, silent)
        await room.submit()
        kill_thread(thread)
        if thread == "engine":  # it waits for work, and meets its end in the next step
            stepping = Room(served, 6, BootstrapAddress(FAKE_BOOTSTRAP_HOST, 8998))
            await stepping.submit()
            assert isinstance(await stepping.failure(), InternalError | ShuttingDown)
        await ready.stops_serving()
        await live.stops_serving()
        assert isinstance(await room.failure(), ShuttingDown)
        await assert_ends(served, name)


@pytest.mark.parametrize(("task", "name"), [*((name, name) for name in ROUTER), *OF_OTHERS.items()])
async def test_a_task_of_the_router_that_dies_ends_it(task: str, name: str) -> None:
    async with router_process() as served:
        live = Watcher(served.connection, LIVENESS)
        assert await live.next() == SERVING
        kill_task(task)
        await live.stops_serving()
        await assert_ends(served, name)


@pytest.mark.parametrize("option", ["--http-port", "--metrics-port"])
async def test_a_router_that_cannot_start_leaves_nothing_behind(option: str) -> None:
    port, nobody = free_port(), f"{LOOPBACK}:{free_port()}"
    with socket.create_server((LOOPBACK, 0)) as busy:
        flags = ["--prefill", nobody, "--decode", nobody, "--grpc-port", str(port), "--http-port", "0"]
        context = router.main.make_context("test", [*flags, option, str(busy.getsockname()[1])])
        with pytest.raises(InvalidRequest, match="cannot listen on"):
            await soon(router.serve(**context.params))
    with socket.socket() as again:  # nobody listens there any more
        again.bind((LOOPBACK, port))


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_router_refuses_an_address_that_is_given_twice(role: str) -> None:
    flags = ["--prefill", "p:1", "--decode", "d:2", f"--{role}", f"{role[0]}:{'1' if role == 'prefill' else '2'}"]
    with pytest.raises(InvalidRequest, match=f"--{role} .* is given more than once"):
        await soon(router.serve(**options_of(router.main, *flags)))


async def test_a_probe_that_dies_is_a_death() -> None:
    cluster = Cluster()
    await cluster.start()
    dispatcher = Dispatcher(cluster.policy, Tracing())
    prober = Prober(dispatcher, cluster.policy, cluster.changed, ControlServer([]))
    probing, watch = asyncio.create_task(prober.run()), asyncio.create_task(prober.watch())
    await cluster.decode_servers[0].next_request()
    kill_task("probe of ")
    with pytest.raises(InternalError, match=r"probe of .* died: it was cancelled"):
        await soon(watch)
    probing.cancel()
    await asyncio.gather(probing, return_exceptions=True)
    await dispatcher.close()
    await cluster.stop()


# --- what is no death ---


@pytest.mark.parametrize("task", ["beats of 127", "canaries of 127"])
async def test_a_pairing_that_nobody_looks_after_any_more_is_made_anew(task: str) -> None:
    async with running_pair(Pair()) as pair:
        await pair.serve(1)
        kill_task(task)
        await until(lambda: not pair.decode.prefills.peers([]))
        await pair.serve(2)


@pytest.mark.parametrize("module", [prefill, decode])
async def test_neither_a_thousand_waiting_rooms_nor_a_lost_peer_change_health(module: Any) -> None:
    async with engine_process(module) as served:
        await served.watchers()
        client, outputs = GenerationClient(served.connection), 0
        stream = client.stream_outputs("router")
        assert await soon(anext(stream)) == ()
        with socket.create_server((LOOPBACK, 0), backlog=1100) as listening:
            peer = BootstrapAddress(LOOPBACK, listening.getsockname()[1])
            requests = [replace(make_request(number), bootstrap=peer) for number in range(1, 1001)]
            await asyncio.wait_for(asyncio.gather(*(client.submit(each, "router", Context()) for each in requests)), 60)
            assert await served.health() == (SERVING, SERVING)
        # The peer is gone now: on decode all fail, on prefill they go on waiting for pages.
        while module is decode and outputs < len(requests):
            outputs += len(await soon(anext(stream)))
        assert await served.health() == (SERVING, SERVING)
        await stream.aclose()


async def test_a_router_without_peers_is_live_and_not_ready() -> None:
    async with router_process() as served:
        assert await served.health() == (NOT_SERVING, SERVING)
