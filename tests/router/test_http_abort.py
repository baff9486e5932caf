from __future__ import annotations

from typing import Any

import httpx
import pytest

from pd_common.types import BootstrapRoom
from tests.router.scripted_backend import ROOM, ScriptedBackend


@pytest.fixture(autouse=True)
async def open_rooms(backend: ScriptedBackend) -> None:
    backend.open_rooms = {BootstrapRoom(1): "mine", ROOM: "mine", BootstrapRoom(3): "mine too"}


async def test_every_request_with_this_rid_is_aborted(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    response = await client.post("/abort_request", json={"rid": "mine"})
    assert (response.status_code, response.json()) == (200, {"aborted_rooms": ["1", str(ROOM)]})
    assert backend.aborts == [(1, "aborted by the client"), (ROOM, "aborted by the client")]


async def test_a_rid_that_nobody_has_is_no_failure(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    response = await client.post("/abort_request", json={"rid": "min", "abort_all": False})
    assert (response.status_code, response.json(), backend.aborts) == (200, {"aborted_rooms": []}, [])


@pytest.mark.parametrize(("room", "aborted"), [(ROOM, [str(ROOM)]), (77, [])], ids=["open", "still to come"])
async def test_a_room_is_aborted(
    client: httpx.AsyncClient, backend: ScriptedBackend, room: int, aborted: list[str]
) -> None:
    response = await client.post("/abort_request", json={"bootstrap_room": room, "abort_message": "too slow"})
    assert (response.status_code, response.json()) == (200, {"aborted_rooms": aborted})
    assert backend.aborts == [(room, "too slow")]


NOTHING_NAMED: list[dict[str, Any]] = [
    {},
    {"rid": ""},
    {"rid": None},
    {"rid": ["mine"]},
    {"bootstrap_room": 0},
    {"bootstrap_room": "1"},
    {"rid": "mine", "bootstrap_room": 1},
    {"abort_all": True},
    {"rid": "mine", "abort_all": True},
    {"rids": ["mine"]},
]


@pytest.mark.parametrize("body", NOTHING_NAMED, ids=str)
async def test_what_does_not_name_one_thing_aborts_nothing(
    client: httpx.AsyncClient, backend: ScriptedBackend, body: dict[str, Any]
) -> None:
    response = await client.post("/abort_request", json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "INVALID_REQUEST")
    assert backend.aborts == []


@pytest.mark.parametrize("ready", [True, False])
async def test_liveness_does_not_depend_on_workers(
    client: httpx.AsyncClient, backend: ScriptedBackend, ready: bool
) -> None:
    backend.ready = ready
    response = await client.get("/livez")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize("path", ["/livez", "/health"])
async def test_a_process_in_which_something_has_died_says_so(
    client: httpx.AsyncClient, backend: ScriptedBackend, path: str
) -> None:
    backend.live = False
    response = await client.get(path)
    assert (response.status_code, response.json()["status"]) == (503, "dead")
