"""What the status page is told, by an inspector that plays a script instead of asking processes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from google.protobuf import timestamp_pb2
from pd.v1 import inspection_pb2, transfer_status_pb2, types_pb2

from pd_common.control.connection import dial_plain
from pd_common.control.status import to_status
from pd_common.errors import PdError, PeerLost, RoomUnknown, TransferFailed
from pd_common.inspection.inspector import Inspector
from pd_common.inspection.process_client import RoomFilter
from pd_common.inspection.views import Clock, ClusterView, ProcessView, RoomSide, RoomView
from pd_common.types import BootstrapRoom, Role
from services.router.http import create_app
from services.router.ui import api, files
from services.router.ui.refresh import Shared
from tests.router.scripted_backend import ScriptedBackend

BIG = BootstrapRoom(2**64 - 1)
NOW_S = 1_800_000_000
STEPS = ("BOOTSTRAPPING", "WAITING_FOR_INPUT", "TRANSFERRING")


def at(second: float) -> timestamp_pb2.Timestamp:
    """So long after the beginning of the script."""
    time = timestamp_pb2.Timestamp()
    time.FromNanoseconds(round((NOW_S + second) * 1e9))
    return time


def transfer(
    room: int, role: Role, *steps: tuple[str, float], failure: PdError | None = None, **fields: Any
) -> types_pb2.Transfer:
    """A record that entered these states at these seconds."""
    timeline = [
        types_pb2.TransferTransition(state=f"TRANSFER_STATE_{state}", time=at(second)) for state, second in steps
    ]
    made = types_pb2.Transfer(
        bootstrap_room=room,
        role=types_pb2.ROLE_PREFILL if role is Role.PREFILL else types_pb2.ROLE_DECODE,
        state=timeline[-1].state,
        timeline=timeline,
        **fields,
    )
    if failure is not None:
        made.failure.CopyFrom(to_status(failure))
    return made


def process(role: Role, *, ahead_s: float = 0.0, **fields: Any) -> ProcessView:
    life = inspection_pb2.GetProcessResponse(
        instance=types_pb2.Instance(instance_id=f"{role.value}-1", epoch=NOW_S * 10**6),
        model="tiny",
        software_version="1",
    )
    return ProcessView(f"{role.value}:1", role, process=life, clock=Clock(ahead_s, 0.001), **fields)


@dataclass
class Script(Inspector):
    """Answers with what it was given, counts how often it was asked; `gate` holds answers back while it is clear."""

    processes: tuple[ProcessView, ...] = ()
    transfers: list[tuple[ProcessView, types_pb2.Transfer]] = field(default_factory=list)
    views: dict[int, RoomView] = field(default_factory=dict)
    asked: int = 0

    def __post_init__(self) -> None:
        super().__init__((), dial_plain)
        self.gate = asyncio.Event()
        self.gate.set()
        self.looked = asyncio.Event()

    async def cluster(self) -> ClusterView:
        self.asked += 1
        self.looked.set()
        await self.gate.wait()
        return ClusterView(self.processes)

    async def rooms_of(
        self, view: ProcessView, wanted: RoomFilter, limit: int
    ) -> tuple[ProcessView, tuple[types_pb2.Transfer, ...]]:
        found = tuple(each for owner, each in self.transfers if owner is view and each.state in wanted.states)
        return view, found[-limit:]

    async def room(self, number: BootstrapRoom) -> RoomView:
        if number not in self.views:
            raise RoomUnknown(f"room {number} is not on record", room=number)
        return self.views[number]


@asynccontextmanager
async def browser(script: Script) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(ScriptedBackend(), lambda: True, api.ui_routes(script))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        yield client


async def system(script: Script) -> Any:
    async with browser(script) as client:
        return (await client.get("/ui/api/system")).raise_for_status().json()


# --- rooms ---


async def test_a_room_is_told_once_with_what_both_sides_say_and_its_number_as_a_string() -> None:
    prefill, decode = process(Role.PREFILL), process(Role.DECODE)
    steps = [(state, second) for second, state in enumerate(STEPS)]
    script = Script(
        processes=(prefill, decode),
        transfers=[
            (prefill, transfer(BIG, Role.PREFILL, *steps, ("SUCCESS", 4), rid="chat", pages_done=8, bytes_done=2000)),
            (decode, transfer(BIG, Role.DECODE, *steps[:1])),
        ],
    )
    told = await system(script)
    (room,) = told["live"]
    assert room["room"] == str(2**64 - 1), "a JSON number would be another room"
    assert room["rid"] == "chat"
    assert {role: side["state"] for role, side in room["sides"].items()} == {
        "prefill": "SUCCESS",
        "decode": "BOOTSTRAPPING",
    }
    assert room["sides"]["prefill"]["pages_done"] == 8
    assert room["sides"]["prefill"]["bytes_per_s"] == 1000, "2000 bytes in the two seconds since the first page"
    assert (told["rooms_live"], told["ended"]) == (1, []), "it goes on as long as one side does"


async def test_the_room_that_waits_longest_comes_first_and_so_does_the_one_that_ended_last() -> None:
    prefill = process(Role.PREFILL)
    live = [transfer(room, Role.PREFILL, ("BOOTSTRAPPING", -room)) for room in (1, 3, 2)]
    ended = [transfer(10 + s, Role.PREFILL, ("BOOTSTRAPPING", 0), ("SUCCESS", s)) for s in (1, 3, 2)]
    told = await system(Script(processes=(prefill,), transfers=[(prefill, each) for each in (*live, *ended)]))
    assert [room["room"] for room in told["live"]] == ["3", "2", "1"]
    assert [room["room"] for room in told["ended"]] == ["13", "12", "11"]


async def test_a_list_has_an_end_however_many_rooms_live() -> None:
    prefill = process(Role.PREFILL)
    many = [(prefill, transfer(room, Role.PREFILL, ("BOOTSTRAPPING", -room))) for room in range(1, 251)]
    told = await system(Script(processes=(prefill,), transfers=many))
    assert told["rooms_live"] == 250
    assert len(told["live"]) == 100


async def test_a_failed_room_says_why_it_failed_where_it_failed_first_and_is_counted_once() -> None:
    prefill, decode = process(Role.PREFILL), process(Role.DECODE)
    cause, told_of = TransferFailed("the port broke"), PeerLost("prefill says so")
    script = Script(
        processes=(prefill, decode),
        transfers=[
            (decode, transfer(7, Role.DECODE, ("BOOTSTRAPPING", 0), ("FAILED", 2.1), failure=told_of)),
            (prefill, transfer(7, Role.PREFILL, ("BOOTSTRAPPING", 0), ("FAILED", 2), failure=cause)),
        ],
    )
    told = await system(script)
    assert told["ended"][0]["failure"] == {"reason": "TRANSFER_FAILED", "message": "the port broke"}
    assert told["failures"] == [{"reason": "TRANSFER_FAILED", "count": 1}]


async def test_clocks_that_differ_do_not_make_a_room_older() -> None:
    prefill, decode = process(Role.PREFILL), process(Role.DECODE, ahead_s=3600.0)
    script = Script(
        processes=(prefill, decode),
        transfers=[
            (prefill, transfer(7, Role.PREFILL, ("BOOTSTRAPPING", 0), ("SUCCESS", 1))),
            (decode, transfer(7, Role.DECODE, ("BOOTSTRAPPING", 3600), ("SUCCESS", 3602))),
        ],
    )
    (room,) = (await system(script))["ended"]
    assert room["until_ms"] - room["opened_ms"] == 2000


# --- processes ---


async def test_a_process_that_does_not_answer_is_shown_so_and_the_others_as_ever() -> None:
    worker = inspection_pb2.Worker(control_address="decode:1", live=False, trouble="no beat for 2.5 s", max_queued=9)
    router = process(Role.ROUTER)
    assert router.process is not None
    router.process.workers.append(worker)
    router.process.routes.add(prefill_address="prefill:1", decode_address="decode:1", trouble="not proven yet")
    pool = transfer_status_pb2.GetPoolResponse(pages_total=10, pages_free=3, pages_cached=2, pages_quarantined=1)
    silent = ProcessView("decode:1", Role.DECODE, trouble=PeerLost("decode:1 has not answered within 2 s"))
    told = await system(Script(processes=(router, process(Role.PREFILL, pool=pool), silent)))
    _, prefill, decode = told["processes"]
    assert prefill["pool"]["pages"] == {"total": 10, "used": 4, "cached": 2, "free": 3, "quarantined": 1}
    assert decode["trouble"]["reason"] == "PEER_LOST"
    assert (decode["worker"]["live"], decode["worker"]["trouble"]) == (False, "no beat for 2.5 s")
    assert decode["worker"]["stopping"] is False
    assert told["routes"] == [
        {"prefill": "prefill:1", "decode": "decode:1", "proven": False, "trouble": "not proven yet"}
    ]


# --- one room ---


async def test_one_room_brings_its_spans_and_the_account_of_its_first_token() -> None:
    route = inspection_pb2.Span(name="pd.route", start=at(0), end=at(2), attributes={"ttft_ms": "1000"})
    dispatch = inspection_pb2.Span(name="pd.dispatch", start=at(0), end=at(0.25))
    leg = inspection_pb2.RoomSpans(trace_id="ab" * 16, root=route, stages=[dispatch])
    running = inspection_pb2.RoomSpans(root=inspection_pb2.Span(name="pd.decode", start=at(1)))
    record = transfer(BIG, Role.DECODE, ("BOOTSTRAPPING", 1), rid="chat")
    view = RoomView(
        BIG,
        (
            RoomSide("router:1", Role.ROUTER, None, (leg,)),
            RoomSide("decode:1", Role.DECODE, record, (running,)),
        ),
    )
    async with browser(Script(views={BIG: view})) as client:
        told = (await client.get(f"/ui/api/rooms/{BIG}")).raise_for_status().json()
    assert (told["room"], told["rid"], told["trace_id"]) == (str(BIG), "chat", "ab" * 16)
    router, decode = told["sides"]
    (stage,) = router["legs"][0]["stages"]
    assert stage["name"] == "pd.dispatch"
    assert stage["end_ms"] - stage["start_ms"] == pytest.approx(250, abs=0.001)
    assert decode["legs"][0]["root"]["end_ms"] is None
    assert [step["state"] for step in decode["transfer"]["timeline"]] == ["BOOTSTRAPPING"]
    assert [(share["span"], round(share["took_ms"])) for share in told["account"]] == [
        ("pd.dispatch", 250),
        ("unaccounted", 750),
    ]


async def test_a_room_that_nobody_knows_and_what_is_no_room_are_refused_in_words() -> None:
    async with browser(Script()) as client:
        unknown = await client.get("/ui/api/rooms/42")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "ROOM_UNKNOWN")
        for number in ("0", "x", "-1", "1.5", "18446744073709551616", "9" * 400, "%F0%9D%9F%99"):
            answer = await client.get(f"/ui/api/rooms/{number}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "INVALID_REQUEST"), number


# --- what asking costs ---


async def test_many_browsers_cost_the_workers_what_one_does_and_none_costs_nothing() -> None:
    script = Script(processes=(process(Role.PREFILL),))
    async with browser(script) as client:
        await client.get("/ui/")
        await client.get("/ui/app.js")
        assert script.asked == 0
        script.gate.clear()
        asking = [asyncio.create_task(client.get("/ui/api/system")) for _ in range(20)]
        await script.looked.wait()
        script.gate.set()
        answers = await asyncio.gather(*asking)
    assert script.asked == 1
    assert len({answer.content for answer in answers}) == 1


async def test_a_value_is_made_again_when_it_is_old_and_somebody_asks() -> None:
    clock = [0.0]
    made: list[float] = []

    async def make() -> float:
        made.append(clock[0])
        return clock[0]

    shared = Shared(make, 1.0, lambda: clock[0])
    assert await shared.get() == 0.0
    clock[0] = 0.9
    assert await shared.get() == 0.0
    clock[0] = 1.0
    assert await shared.get() == 1.0
    assert made == [0.0, 1.0]


async def test_a_browser_that_goes_away_takes_nothing_from_the_others() -> None:
    gate = asyncio.Event()

    async def make() -> str:
        await gate.wait()
        return "made"

    shared = Shared(make, 1.0)
    first, second = asyncio.create_task(shared.get()), asyncio.create_task(shared.get())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait((first,))
    gate.set()
    assert await second == "made"


async def test_what_failed_is_tried_again() -> None:
    script: list[Exception | str] = [PeerLost("gone"), "made"]

    async def make() -> str:
        step = script.pop(0)
        if isinstance(step, Exception):
            raise step
        return step

    shared = Shared(make, 1.0)
    outcomes = await asyncio.gather(shared.get(), shared.get(), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [PeerLost, PeerLost]
    assert await shared.get() == "made"


# --- the page itself ---


async def test_everything_under_ui_may_use_nothing_but_itself() -> None:
    async with browser(Script(processes=(process(Role.PREFILL),))) as client:
        page = await client.get("/ui", follow_redirects=True)
        assert page.url.path == "/ui/"
        named = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        assert {"style.css", "app.js", "icon.svg"} <= set(named)
        imported = re.findall(r'from "\./([^"]+)"', (await client.get("/ui/app.js")).text)
        for path in ("/ui/", "/ui/api/system", *(f"/ui/{name}" for name in (*named, *imported))):
            answer = (await client.get(path)).raise_for_status()
            policy = answer.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_no_file_of_the_page_makes_markup_of_text_or_names_another_host() -> None:
    static = Path(files.__file__).with_name("static")
    for file in static.iterdir():
        text = file.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|https?://", text), (
            file.name
        )


async def test_a_router_that_was_told_so_serves_no_page() -> None:
    app = create_app(ScriptedBackend(), lambda: True)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        for path in ("/ui", "/ui/", "/ui/app.js", "/ui/api/system"):
            assert (await client.get(path)).status_code == 404
