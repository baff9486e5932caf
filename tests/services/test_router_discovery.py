"""Workers that come and go with what names stand for: the rules, the lookups, and the router that follows them."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from pd_common.control.connection import dial_plain
from pd_common.control.server import ControlServer
from pd_common.errors import InternalError, NoWorkers
from pd_common.generation import ClientRequest, Output, SamplingParams
from pd_common.telemetry.tracing import Tracing
from pd_common.types import BootstrapAddress, BootstrapRoom, Role
from services.router import discovery
from services.router.__main__ import main
from services.router.collector import RouterCollector
from services.router.describe import describe
from services.router.discovery import Lookup, reconcile, resolve
from services.router.dispatch import Dispatcher
from services.router.policy import LeastLoaded
from services.router.probe import Prober
from services.router.sources import DnsName
from services.router.workers import Workers
from tests.services.engine_server import EngineServer, ending, soon
from tests.services.pair import until

NAME = DnsName("prefill", 8998)
A, B, C = (BootstrapAddress(host, 8998) for host in ("10.0.0.1", "10.0.0.2", "10.0.0.3"))
ROOM = BootstrapRoom(1)
REQUEST = ClientRequest(prompt=(1, 2, 3), sampling=SamplingParams(max_new_tokens=4))


# --- what is to be done ---


@dataclass(frozen=True)
class Known:
    address: BootstrapAddress
    is_live: bool = True
    open_rooms: int = 0


def test_an_address_without_a_worker_is_new_and_each_is_once() -> None:
    changes = reconcile([Known(A)], [B, A, C, B])
    assert (changes.new, changes.over) == ((B, C), ())


@pytest.mark.parametrize(
    ("worker", "is_over"),
    [
        (Known(A), False),
        (Known(A, open_rooms=1), False),
        (Known(A, is_live=False, open_rooms=1), False),
        (Known(A, is_live=False), True),
    ],
    ids=["live", "live and busy", "its rooms have not ended", "gone"],
)
def test_a_worker_without_an_address_is_over_when_it_has_ended_as_well(worker: Known, is_over: bool) -> None:
    assert reconcile([worker], [B]).over == ((worker,) if is_over else ())
    assert reconcile([worker], [A]).over == ()


one_known = st.builds(Known, st.sampled_from([A, B, C]), st.booleans(), st.integers(0, 2))
known_workers = st.lists(one_known, unique_by=lambda known: known.address)


@given(known_workers, st.lists(st.sampled_from([A, B, C])))
def test_what_is_followed_once_leaves_nothing_to_follow(known: list[Known], wanted: list[BootstrapAddress]) -> None:
    changes = reconcile(known, wanted)
    left = [worker for worker in known if worker not in changes.over] + [Known(address) for address in changes.new]
    assert {worker.address for worker in left} >= set(wanted)
    assert len({worker.address for worker in left}) == len(left)
    assert all(worker in left for worker in known if worker.is_live or worker.open_rooms)
    assert reconcile(left, wanted) == ((), ())


# --- how it is given ---


def test_addresses_and_names_may_be_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PD_PREFILL", "p:1 dns+prefill:8998")
    given = main.make_context("pd-router", ["--decode", "dns+[::1]:2", "--decode", "d:2"]).params
    assert given["prefills"] == (BootstrapAddress("p", 1), NAME)
    assert given["decodes"] == (DnsName("::1", 2), BootstrapAddress("d", 2))
    assert [source.target for source in given["decodes"]] == ["dns+[::1]:2", "d:2"]


@pytest.mark.parametrize("wrong", ["dns+", "dns+p", "dns+p:0", "dns:p:1", "dns+dns+p:1:2"])
def test_what_is_neither_is_refused(wrong: str) -> None:
    with pytest.raises(click.BadParameter, match="is not HOST:PORT"):
        main.make_context("pd-router", ["--decode", wrong])


# --- what a name stands for ---


def getaddrinfo_gives(monkeypatch: pytest.MonkeyPatch, *hosts: str) -> None:
    families = {host: socket.AF_INET6 if ":" in host else socket.AF_INET for host in hosts}
    found = [(families[host], socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, 8998)) for host in hosts]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)


def test_a_name_of_this_host_is_looked_up() -> None:
    assert resolve("localhost", 7) == [BootstrapAddress("127.0.0.1", 7)]
    assert resolve("::1", 7) == [BootstrapAddress("::1", 7)]


@pytest.mark.parametrize(
    ("found", "addresses"),
    [
        (("10.0.0.2", "10.0.0.1", "10.0.0.2"), ["10.0.0.1", "10.0.0.2"]),
        (("fd00::2", "10.0.0.1"), ["10.0.0.1"]),
        (("fd00::2", "fd00::1"), ["fd00::1", "fd00::2"]),
    ],
    ids=["each once", "of both families one", "IPv6"],
)
def test_a_name_stands_for_each_process_once(
    monkeypatch: pytest.MonkeyPatch, found: Sequence[str], addresses: Sequence[str]
) -> None:
    getaddrinfo_gives(monkeypatch, *found)
    assert resolve("prefill", 8998) == [BootstrapAddress(host, 8998) for host in addresses]


@pytest.mark.parametrize("code", [socket.EAI_NONAME, socket.EAI_NODATA])
def test_a_name_may_stand_for_nothing(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", Script(socket.gaierror(code, "no such name")))
    assert resolve("prefill", 8998) == ()


def test_that_nobody_can_say_is_another_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", Script(socket.gaierror(socket.EAI_AGAIN, "try again")))
    with pytest.raises(socket.gaierror):
        resolve("prefill", 8998)


class Script:
    """A name service that says one thing after the other, and the last for ever."""

    def __init__(self, *answers: object) -> None:
        self._answers = list(answers)

    def __call__(self, *_: object, **__: object) -> Any:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, threading.Event):
            assert answer.wait(10)
            return self()
        if isinstance(answer, Exception):
            raise answer
        return answer


FAILURE = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_AGAIN_S", 0.005)


async def looked_up(script: Script, condition: Callable[[Lookup], bool]) -> Lookup:
    """The lookup as it is when the condition is true."""
    looked = asyncio.Event()
    lookup = Lookup(NAME, script, looked)
    running = asyncio.create_task(lookup.run())
    async with asyncio.timeout(10):
        while not condition(lookup):
            await looked.wait()
            looked.clear()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return lookup


async def test_a_lookup_that_fails_keeps_what_is_known_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    script = Script([A, B], FAILURE, FAILURE, [A, B, C])
    lookup = await looked_up(script, lambda lookup: C in lookup.addresses)
    assert (lookup.addresses, lookup.trouble) == ((A, B, C), "")
    said = "dns+prefill:8998 cannot be looked up: Temporary failure in name resolution"
    assert [record.getMessage() for record in caplog.records] == [said]

    lookup = await looked_up(Script([A, B], FAILURE), lambda lookup: bool(lookup.addresses and lookup.trouble))
    assert (lookup.addresses, lookup.trouble) == ((A, B), said)


async def test_a_name_that_stands_for_nothing_any_more_is_believed(caplog: pytest.LogCaptureFixture) -> None:
    lookup = await looked_up(Script([A], ()), lambda lookup: "no address" in lookup.trouble)
    assert (lookup.addresses, lookup.trouble) == ((), "dns+prefill:8998 stands for no address")
    assert caplog.text.count("stands for no address") == 1


async def test_a_slow_lookup_keeps_what_is_known_and_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_SLOW_S", 0.01)
    answered = threading.Event()
    script = Script([A], answered, [A, B])

    def is_slow(lookup: Lookup) -> bool:
        if lookup.trouble.endswith("no answer for 0.01 s"):
            assert lookup.addresses == (A,)
            answered.set()
        return answered.is_set() and not lookup.trouble

    lookup = await looked_up(script, is_slow)
    assert lookup.addresses == (A, B)


async def test_a_defect_of_a_lookup_is_its_death() -> None:
    with pytest.raises(ZeroDivisionError):
        await soon(Lookup(NAME, Script(ZeroDivisionError()), asyncio.Event()).run())


# --- the router follows ---


class Router:
    """A router whose names stand for what a test says; engines are real servers."""

    def __init__(self, *prefills: BootstrapAddress | DnsName) -> None:
        self.named: dict[str, list[BootstrapAddress]] = {"prefill": [], "decode": [], "alias": []}
        self.changed = asyncio.Event()
        self.policy = LeastLoaded(disaggregated=bool(prefills))
        sources = {Role.PREFILL: prefills, Role.DECODE: (DnsName("decode", 8999),)}
        self.workers = Workers(sources, self.policy, self.changed, dial_plain, self._resolve)
        self.dispatcher = Dispatcher(self.policy, Tracing())
        self.control = ControlServer([])

    def _resolve(self, name: str, port: int) -> Sequence[BootstrapAddress]:  # noqa: ARG002  as it is
        return tuple(self.named[name])

    async def start(self) -> None:
        await self.control.start("127.0.0.1", 0)
        prober = Prober(self.dispatcher, self.policy, self.changed, self.control)
        works = {**self.workers.works(), "prober": prober.run(), "probes": prober.watch()}
        self.tasks = [asyncio.create_task(work, name=name) for name, work in works.items()]

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.dispatcher.close()
        await self.workers.close()
        await self.control.stop(grace_s=0.0)

    async def looked_again(self) -> None:
        """All that the names stand for now is known."""
        for _ in range(2):
            self.workers._looked.clear()
            await soon(self.workers._looked.wait())
        await asyncio.sleep(0)

    async def ask(self) -> list[Output]:
        return [output async for output in self.dispatcher.generate(REQUEST)]

    def addresses(self) -> list[str]:
        """Of all workers, as anybody who looks into the router sees them."""
        shown = [worker.control_address for worker in describe(self.dispatcher, self.policy).workers]
        registry = CollectorRegistry()
        registry.register(RouterCollector(self.dispatcher, self.policy))
        live = next(metric for metric in registry.collect() if metric.name == "pd_worker_live")
        assert [sample.labels["worker"] for sample in live.samples] == shown
        return shown


@pytest.fixture
async def engines() -> AsyncIterator[list[EngineServer]]:
    engines = [EngineServer() for _ in range(3)]
    for engine in engines:
        await engine.start()
        engine.answer_all(ending(ROOM))
    yield engines
    for engine in engines:
        await engine.stop()


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    router = Router(NAME)
    await router.start()
    yield router
    await router.stop()


async def test_workers_come_with_their_addresses_and_are_used_when_they_are_proven(
    router: Router, engines: list[EngineServer]
) -> None:
    prefill, decode, another = engines
    router.named["decode"] = [decode.address]
    await until(lambda: any(worker.is_live for worker in router.policy.decodes))
    assert not router.dispatcher.is_ready
    assert router.dispatcher.not_ready_reason() == "no prefill is known; dns+prefill:8998 stands for no address"
    with pytest.raises(NoWorkers, match=r"no usable pair: no prefill is known; dns\+prefill:8998 stands for no"):
        await soon(router.ask())
    assert not decode.rooms.transfers.live(), "nobody decodes alone because of what a name stands for at the moment"

    router.named["prefill"] = [prefill.address]
    await until(lambda: router.dispatcher.is_ready)
    assert len(await soon(router.ask())) == 1
    (pair,) = router.policy.routes

    router.named["decode"] = [another.address, decode.address]
    await until(lambda: len(router.policy.routes) == 2 and all(route.is_proven for route in router.policy.routes))
    assert router.policy.routes[0] is pair, "what was known stays known"
    assert router.addresses() == [engine.address.target for engine in (prefill, decode, another)]


async def test_a_worker_that_its_name_has_dropped_is_used_until_it_is_gone(
    router: Router, engines: list[EngineServer]
) -> None:
    prefill, decode, _ = engines
    router.named |= {"prefill": [prefill.address], "decode": [decode.address]}
    await until(lambda: router.dispatcher.is_ready)
    (worker,) = router.policy.prefills
    router.named["prefill"] = []
    await router.looked_again()
    assert len(await soon(router.ask())) == 1
    assert router.policy.prefills == (worker,)

    await prefill.stop()
    await until(lambda: not router.policy.prefills)
    assert router.addresses() == [decode.address.target]
    assert not router.dispatcher.is_ready
    assert [task for task in asyncio.all_tasks() if task.get_name() == f"stream of {worker}"] == []

    await prefill.start()
    await router.looked_again()
    assert not router.policy.prefills, "nobody has named it"
    router.named["prefill"] = [prefill.address]
    await until(lambda: any(worker.is_live for worker in router.policy.prefills))
    assert router.policy.prefills != (worker,), "who comes back is a new one"
    assert all(not task.done() for task in router.tasks)


async def test_a_worker_that_is_gone_stays_as_long_as_it_has_rooms_or_a_name(
    router: Router, engines: list[EngineServer]
) -> None:
    prefill, decode, _ = engines
    router.named |= {"prefill": [prefill.address], "decode": [decode.address]}
    await until(lambda: router.dispatcher.is_ready)
    (worker,) = router.policy.prefills
    worker.open(ROOM, lambda _: None)
    await prefill.stop()
    await until(lambda: not worker.is_live)
    await router.looked_again()
    assert router.policy.prefills == (worker,)
    router.named["prefill"] = []
    await router.looked_again()
    assert router.policy.prefills == (worker,)
    worker.close(ROOM)
    await until(lambda: not router.policy.prefills)
    await prefill.start()


async def test_one_address_is_one_worker_however_often_it_is_named(engines: list[EngineServer]) -> None:
    prefill, decode, _ = engines
    router = Router(prefill.address, NAME, DnsName("alias", 8998))
    router.named |= {"prefill": [prefill.address], "alias": [prefill.address], "decode": [decode.address]}
    await router.start()
    await until(lambda: router.dispatcher.is_ready)
    await router.looked_again()
    assert [worker.address for worker in router.policy.prefills] == [prefill.address]
    await prefill.stop()
    router.named |= {"prefill": [], "alias": []}
    await router.looked_again()
    assert [worker.address for worker in router.policy.prefills] == [prefill.address], "that it is there was said"
    await router.stop()
    await prefill.start()


async def test_without_a_prefill_in_its_settings_a_router_has_decode_do_it_all(engines: list[EngineServer]) -> None:
    router = Router()
    router.named["decode"] = [engines[0].address]
    await router.start()
    await until(lambda: router.dispatcher.is_ready)
    assert len(await soon(router.ask())) == 1
    await router.stop()


async def test_a_worker_that_has_come_later_is_looked_after_like_any_other(
    router: Router, engines: list[EngineServer]
) -> None:
    router.named["decode"] = [engines[0].address]
    await until(lambda: bool(router.policy.decodes))
    (stream,) = (task for task in asyncio.all_tasks() if task.get_name().startswith("stream of decode"))
    stream.cancel()
    watching = next(task for task in router.tasks if task.get_name() == "streams")
    with pytest.raises(InternalError, match=r"stream of decode .* died"):
        await soon(watching)


async def test_names_are_found_in_the_log_when_workers_go(
    router: Router, engines: list[EngineServer], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    decode = engines[0]
    router.named["decode"] = [decode.address]
    await until(lambda: any(worker.is_live for worker in router.policy.decodes))
    router.named["decode"] = []
    await decode.stop()
    await until(lambda: not router.policy.decodes)
    await until(lambda: f"decode {decode.address.target} is forgotten" in caplog.text)
    await decode.start()
