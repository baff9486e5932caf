"""`pdctl bench serve` from its command line to its figures, against scripted servers; no figure is judged."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from starlette.responses import JSONResponse, PlainTextResponse

from pd_common.cli.main import main
from pd_common.errors import CapacityExceeded, PeerLost
from services.router.http import create_app
from tests.cli.scripted_openai import DONE, ScriptedOpenAI, event, usage
from tests.http_server import serving
from tests.router.scripted_backend import HELLO, ScriptedBackend

_ONE_AFTER_THE_OTHER = ("--requests", "4", "--warm-up", "1", "--prompt-tokens", "8", "--output-tokens", "3")


async def bench(url: str, *options: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, main, ["bench", "serve", url, *_ONE_AFTER_THE_OTHER, *options])


async def found(url: str, path: Path, *options: str) -> dict[str, Any]:
    """What it writes; it fails on nothing but what the server answers."""
    done = await bench(url, "--json", str(path / "found.json"), *options)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    written: dict[str, Any] = json.loads((path / "found.json").read_text())
    return written | {"exit_code": done.exit_code, "output": done.output}


async def test_the_router_is_measured(tmp_path: Path) -> None:
    backend = ScriptedBackend(HELLO)
    options = ("--prefix-tokens", "5", "--plot", str(tmp_path / "found.png"), "--slo-ttft-ms", "60000")
    async with serving(create_app(backend, lambda: True)) as url:
        result = await found(url, tmp_path, *options)
    assert (result["exit_code"], result["url"], result["model"]) == (0, url, "tiny")
    figures = result["figures"]
    assert (figures["sent"], figures["answered"], figures["failures"]) == (4, 4, [])
    assert (figures["prompt_tokens"], figures["cached_tokens"], figures["output_tokens"]) == (12, 8, 12)
    assert figures["output_events"] == 8
    assert (figures["ttft"]["count"], figures["itl"]["count"], figures["e2e"]["count"]) == (4, 4, 4)
    assert 0 < figures["ttft"]["p50_ms"] <= figures["e2e"]["worst_ms"]
    assert figures["goodput"]["share"] == 1.0
    assert [row["number"] for row in result["rows"]] == [1, 2, 3, 4]
    for line in (
        "4 of 4 answered",
        "66.7 % of the prompt tokens",
        "12 tokens came in 8 events",
        "100.0 % of the requests",
    ):
        assert line in result["output"]
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
    assert len(backend.requests) == 5
    assert {request.prompt[:5] for request in backend.requests} == {backend.requests[0].prompt[:5]}
    assert len({request.prompt for request in backend.requests}) == 5
    assert all(
        (r.sampling.max_new_tokens, r.sampling.ignore_eos, r.sampling.temperature) == (3, True, 0)
        for r in backend.requests
    )


async def test_background_streams_are_told_apart(tmp_path: Path) -> None:
    server = ScriptedOpenAI([event(), event(), event(finish="length"), usage(8, 3), DONE])
    options = ("--background-streams", "2", "--background-output", "3", "--background-alone", "0.05")
    async with serving(server.app()) as url:
        result = await found(url, tmp_path, *options, "--plot", str(tmp_path / "found.png"))
    figures = result["figures"]
    assert (figures["sent"], figures["itl"]["count"]) == (4, 8)
    assert figures["background"]["alone"]["count"] > 0
    assert figures["background"]["under_load"]["count"] > 0
    assert "background ITL, under load" in result["output"]
    assert len(server.bodies) > 5 + 2
    assert (tmp_path / "found.png").exists()


async def test_what_a_request_says(tmp_path: Path) -> None:
    server = ScriptedOpenAI()
    options = ("--model", "tiny", "--text", "--no-ignore-eos", "--extra-body", '{"logprobs": 0}', "--api-key", "key")
    async with serving(server.app()) as url:
        await found(f"{url}/v1/", tmp_path, *options)
    body = server.bodies[0]
    assert len(body.pop("prompt").split(" ")) == 8
    assert body == {
        "model": "tiny",
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "logprobs": 0,
    }
    assert server.headers[0]["authorization"] == "Bearer key"
    assert len(server.peers) == 1  # one request after the other, on one connection


@pytest.mark.parametrize(
    ("failure", "status", "code", "message"),
    [
        pytest.param(CapacityExceeded("the queue is full"), 429, "CAPACITY", "the queue is full", id="refused"),
        pytest.param(PeerLost("prefill is gone"), 200, "PEER_LOST", "prefill is gone", id="in-stream"),
    ],
)
async def test_failures_are_counted_by_status_and_code(
    tmp_path: Path, failure: Exception, status: int, code: str, message: str
) -> None:
    before = HELLO[:1] if status == 200 else ()
    async with serving(create_app(ScriptedBackend([*before, failure]), lambda: True)) as url:
        result = await found(url, tmp_path)
    assert result["figures"]["failures"] == [{"status": status, "code": code, "count": 4, "message": message}]
    assert (result["exit_code"], result["figures"]["answered"]) == (1, 0)
    assert f"FAILED: 4 requests, {status} {code}, the first: {message}" in result["output"]


@pytest.mark.parametrize(
    ("script", "code"),
    [
        pytest.param([event(), usage(3, 1)], "cut_short", id="no-done"),
        pytest.param([event(), b"data: {\n\n", DONE], "not_json", id="not-json"),
    ],
)
async def test_half_an_answer_does_not_pass_for_a_whole_one(tmp_path: Path, script: list[bytes], code: str) -> None:
    async with serving(ScriptedOpenAI(script).app()) as url:
        result = await found(url, tmp_path)
    assert [(each["code"], each["count"]) for each in result["figures"]["failures"]] == [(code, 4)]


async def test_an_answer_that_takes_too_long(tmp_path: Path) -> None:
    never = asyncio.Event()
    async with serving(ScriptedOpenAI([event(), never]).app()) as url:
        result = await found(url, tmp_path, "--timeout", "1", "--requests", "1", "--warm-up", "0")
        never.set()
    assert [(each["status"], each["code"]) for each in result["figures"]["failures"]] == [(None, "timeout")]


async def test_errors_that_are_no_json_are_quoted(tmp_path: Path) -> None:
    async with serving(ScriptedOpenAI(refusal=PlainTextResponse("no upstream", 502)).app()) as url:
        result = await found(url, tmp_path)
    assert "502 unknown, the first: no upstream" in result["output"]


@pytest.mark.parametrize(
    ("models", "options", "message"),
    [
        (
            JSONResponse({"data": [{"id": "a"}, {"id": "b"}]}),
            ("--model", "c"),
            "the server has no model c; it has a, b",
        ),
        (JSONResponse({"data": []}), (), "the server has no model at all"),
        (JSONResponse({"detail": "Not Found"}, 404), (), "name one with --model"),
        (JSONResponse({"error": {"message": "wrong key"}}, 401), (), "answers 401: wrong key"),
        (PlainTextResponse("hello"), (), "is this an OpenAI-compatible server?"),
        (JSONResponse(["a"]), (), "is this an OpenAI-compatible server?"),
    ],
)
async def test_a_server_that_cannot_be_measured(models: Any, options: tuple[str, ...], message: str) -> None:
    server = ScriptedOpenAI(models=models)
    async with serving(server.app()) as url:
        done = await bench(url, *options)
    assert (done.exit_code, server.bodies) == (1, [])
    assert message in done.output


async def test_a_server_without_a_list_of_models_is_measured(tmp_path: Path) -> None:
    async with serving(ScriptedOpenAI(models=JSONResponse({}, 404)).app()) as url:
        assert (await found(url, tmp_path, "--model", "x"))["figures"]["answered"] == 4


async def test_nobody_answers() -> None:
    done = await bench("http://127.0.0.1:9")
    assert done.exit_code == 1
    assert "no answer from http://127.0.0.1:9/v1/models" in done.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--rate", "5", "--concurrency", "2"), "--concurrency goes with --rate inf"),
        (("--seconds", "5"), "either --requests or --seconds"),
        (("--prefix-tokens", "8"), "must be below the length of prompts, which is 8"),
        (("--prompt-tokens", "5-2"), "'5-2' is no distribution of lengths"),
        (("--extra-body", "{"), "not JSON"),
        (("--extra-body", "[]"), "not a JSON object"),
        (("--json", "/nowhere/found.json"), "there is no directory /nowhere"),
    ],
)
async def test_options_that_do_not_go_together(options: tuple[str, ...], message: str) -> None:
    done = await bench("http://127.0.0.1:9", *options)
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())


async def test_a_url_needs_its_scheme() -> None:
    done = await bench("127.0.0.1:9")
    assert (done.exit_code, "does not begin with http://" in done.output) == (2, True)


async def test_a_plot_without_matplotlib_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    done = await bench("http://127.0.0.1:9", "--plot", "found.png")
    assert (done.exit_code, "pip install 'pd-handoff[plot]'" in done.output) == (2, True)


async def test_ctrl_c_shows_what_there_is() -> None:
    stuck = asyncio.Event()
    server = ScriptedOpenAI(later=[event(), stuck])
    async with serving(server.app()) as url:
        command = ("-m", "pd_common.cli.main", "bench", "serve", url, *_ONE_AFTER_THE_OTHER, "--warm-up", "0")
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        await server.stuck.wait()
        process.send_signal(signal.SIGINT)
        output, complaint = await process.communicate()
        stuck.set()
    assert process.returncode == 130, complaint.decode()
    assert "1 of 2 answered" in output.decode()
    assert "1 cut off: " in output.decode()
    assert b"Traceback" not in complaint
