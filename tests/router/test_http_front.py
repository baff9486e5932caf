from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest

from pd_common.errors import ERROR_OF_REASON, CapacityExceeded, NoWorkers, PeerLost, Reason
from services.router.http_body import MAX_BODY_BYTES
from services.router.http_errors import STATUS_OF_REASON
from tests.router.scripted_backend import HELLO, ScriptedBackend

ENDPOINTS: dict[str, dict[str, Any]] = {
    "/generate": {"text": "a"},
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


def test_every_reason_has_a_status() -> None:
    assert set(STATUS_OF_REASON) == set(Reason)


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("reason", Reason)
async def test_every_reason_reaches_the_client(
    client: httpx.AsyncClient, backend: ScriptedBackend, path: str, reason: Reason
) -> None:
    backend.script = [ERROR_OF_REASON[reason]("what happened", room=7, retry_after_s=3)]
    response = await client.post(path, json=ENDPOINTS[path])
    assert response.status_code == STATUS_OF_REASON[reason]
    error = response.json()["error"]
    assert (error["code"], error["message"]) == (reason.value, "what happened")
    assert error["metadata"] == {"room": "7", "retry_after_s": "3"}
    assert ("Retry-After" in response.headers) == (response.status_code in {429, 503})


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(
    ("said", "expected"),
    [({}, "1"), ({"retry_after_s": 17}, "17"), ({"retry_after_s": 0}, "1"), ({"retry_after_s": "soon\r\nX: y"}, "1")],
    ids=["nothing said", "said", "at once", "nonsense"],
)
async def test_who_is_refused_for_want_of_capacity_is_told_when_to_come_again(
    client: httpx.AsyncClient, backend: ScriptedBackend, path: str, said: dict[str, object], expected: str
) -> None:
    backend.script = [CapacityExceeded("4 requests wait", **said)]
    for stream in (False, True):
        response = await client.post(path, json={**ENDPOINTS[path], "stream": stream})
        assert (response.status_code, response.headers["Retry-After"]) == (429, expected)


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("priority", [-(2**31), 0, 2**31 - 1])
async def test_every_request_may_say_how_urgent_it_is(
    client: httpx.AsyncClient, backend: ScriptedBackend, path: str, priority: int
) -> None:
    response = await client.post(path, json={**ENDPOINTS[path], "priority": priority})
    assert response.status_code == 200
    assert backend.requests[0].priority == priority


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("priority", [2**31, -(2**31) - 1, "1", 0.5, True])
async def test_a_priority_that_cannot_be_sent_is_refused(
    client: httpx.AsyncClient, backend: ScriptedBackend, path: str, priority: object
) -> None:
    response = await client.post(path, json={**ENDPOINTS[path], "priority": priority})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "priority")
    assert backend.requests == []


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'"a"', b'{"text": NaN}', b'{"text": "\xff"}', b"[" * 9999])
async def test_bad_json(client: httpx.AsyncClient, path: str, content: bytes) -> None:
    response = await client.post(path, content=content)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "INVALID_REQUEST")


async def test_content_type_does_not_matter(client: httpx.AsyncClient) -> None:
    response = await client.post("/generate", content=b'{"text": "a"}', headers={"Content-Type": "text/plain"})
    assert response.status_code == 200


async def test_body_too_large(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    response = await client.post("/generate", content=b" " * (MAX_BODY_BYTES + 1))
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
    assert backend.requests == []


async def test_unknown_path_and_wrong_method(client: httpx.AsyncClient) -> None:
    unknown = await client.get("/v1/nothing")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")
    wrong = await client.get("/generate")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["Allow"] == "POST"


async def test_defect_is_told_without_its_text(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    backend.script = [RuntimeError("secret")]
    response = await client.post("/generate", json={"text": "a"})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "INTERNAL")
    assert "secret" not in response.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ENDPOINTS)
async def test_answer_without_an_end_is_not_passed_off_as_whole(
    client: httpx.AsyncClient, backend: ScriptedBackend, path: str, stream: bool
) -> None:
    backend.script = []
    assert (await client.post(path, json={**ENDPOINTS[path], "stream": stream})).status_code == 500
    backend.script = HELLO[:2]
    response = await client.post(path, json={**ENDPOINTS[path], "stream": stream})
    if stream:
        last = response.text.splitlines()[-2]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "INTERNAL"
    else:
        assert response.status_code == 500


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_failed_stream_has_no_done(client: httpx.AsyncClient, backend: ScriptedBackend, path: str) -> None:
    backend.script = [HELLO[0], PeerLost("prefill-0 is gone")]
    response = await client.post(path, json={**ENDPOINTS[path], "stream": True})
    assert response.status_code == 200
    assert "[DONE]" not in response.text
    last = response.text.splitlines()[-2]
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "prefill-0 is gone"


async def test_health_is_readiness(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    ready = await client.get("/health")
    assert (ready.status_code, ready.json()) == (200, {"status": "ok"})
    backend.ready = False
    waiting = await client.get("/health")
    assert (waiting.status_code, waiting.json()["reason"]) == (503, "no decode has registered")


async def test_models_without_workers(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    async def no_model() -> None:
        raise NoWorkers("no decode is live")

    backend.model = no_model  # type: ignore[assignment, method-assign]
    response = await client.get("/v1/models")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "NO_WORKERS")


@pytest.mark.parametrize("stream", [False, True])
async def test_generation_joins_the_callers_trace(
    client: httpx.AsyncClient, backend: ScriptedBackend, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}
    with caplog.at_level(logging.ERROR, logger="opentelemetry"):
        await client.post("/generate", json={"text": "a", "stream": stream}, headers=headers)
        await client.post("/generate", json={"text": "a", "stream": stream})
    assert [f"{trace_id:032x}" for trace_id in backend.trace_ids] == [TRACE_ID] * 3 + ["0" * 32] * 3
    assert caplog.records == []


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_goes_away_aborts(
    port: int, backend: ScriptedBackend, path: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    backend.script = [HELLO[0], asyncio.Event()]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({**ENDPOINTS[path], "stream": stream}).encode()
    writer.write(f"POST {path} HTTP/1.1\r\nHost: router\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    if stream:
        await reader.readuntil(b"data: ")
    await backend.started.wait()
    assert not backend.aborted.is_set()
    writer.close()
    await writer.wait_closed()
    await backend.aborted.wait()
    assert caplog.records == []


async def test_client_that_goes_away_before_the_first_piece_aborts(port: int, backend: ScriptedBackend) -> None:
    backend.script = [asyncio.Event()]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        asking = asyncio.create_task(client.post("/generate", json={"text": "a", "stream": True}))
        await backend.started.wait()
        asking.cancel()
        await asyncio.wait([asking])
        await backend.aborted.wait()


async def test_connection_is_reused_after_a_stream(port: int, backend: ScriptedBackend) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", limits=httpx.Limits(max_connections=1)) as client:
        for stream in (True, False, True):
            response = await client.post("/generate", json={"text": "a", "stream": stream})
            assert response.status_code == 200
    assert not backend.aborted.is_set()


async def test_large_body_is_refused_while_it_is_sent(port: int) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        response = await client.post("/generate", content=b" " * (MAX_BODY_BYTES * 2))
    assert response.status_code == 413
