"""How many replicas an SLO needs, and `pdctl plan` from its command line to its answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from pd_common.cli.bench.compare.model import VOCAB_SIZE
from pd_common.cli.bench.serve.client import Completions, Server
from pd_common.cli.bench.serve.lengths import Uniform
from pd_common.cli.bench.serve.workload import Kind, Workload, poisson_arrivals
from pd_common.cli.plan import plan as command
from pd_common.cli.plan.load import arrivals_of
from pd_common.cli.plan.probe import Probe, ProbeSizes
from pd_common.errors import CapacityExceeded, PeerLost
from pd_common.planning.plan import Limit, Planned, Slo, lower_bound, plan
from pd_common.planning.simulation import Arrival, Fleet
from pd_common.planning.speeds import DecodeSpeed, HandoffSpeed, PrefillSpeed, Settings, Speeds, fit
from tests.cli.scripted_openai import DONE, ScriptedOpenAI, event
from tests.http_server import serving

SPEEDS = Speeds(Settings(), PrefillSpeed(0.005, 1e-4, 2e-8), HandoffSpeed(0.01, 5e-6), DecodeSpeed(0.006, 0.0005, 1e-7))


def _poisson(per_s: float, prompt_tokens: int, output_tokens: int, count: int = 800) -> list[Arrival]:
    gaps_s = np.random.default_rng(0).exponential(1 / per_s, count).tolist()
    return [Arrival(at_s, prompt_tokens, output_tokens) for at_s in accumulate(gaps_s)]


def _plan(speeds: Speeds, slo: Slo, arrivals: list[Arrival]) -> Planned:
    return plan(speeds, slo, arrivals, warm_up=100, progress=lambda _: None)


def test_the_plan_keeps_the_slo_and_nothing_smaller_does() -> None:
    slo = Slo(0.4, 0.02, 0.9)
    found = _plan(SPEEDS, slo, _poisson(20, 1000, 64))
    fleet = found.chosen.fleet
    assert found.chosen.limit is None
    assert found.chosen.good >= 0.9
    assert {each.fleet for each in found.smaller} == {
        Fleet(fleet.prefills - 1, fleet.decodes),
        Fleet(fleet.prefills, fleet.decodes - 1),
    } - {Fleet(fleet.prefills, 0), Fleet(0, fleet.decodes)}
    assert all(each.good < 0.9 and each.limit is not None for each in found.smaller)
    assert found.bound.prefills <= fleet.prefills
    assert found.bound.decodes <= fleet.decodes


def test_twice_the_load_needs_about_twice_the_fleet() -> None:
    """Not more: large fleets share their idle time better."""
    slo = Slo(0.5, 0.02, 0.9)
    once, twice = (_plan(SPEEDS, slo, _poisson(per_s, 1000, 64)).chosen.fleet for per_s in (20, 40))
    assert once.prefills < twice.prefills <= 2 * once.prefills
    assert once.decodes <= twice.decodes <= 2 * once.decodes


@pytest.mark.parametrize(
    ("speeds", "arrivals", "limit"),
    [
        pytest.param(SPEEDS, _poisson(18, 1000, 2, 400), Limit.PREFILL_COMPUTE, id="prompts"),
        pytest.param(
            replace(SPEEDS, decode=DecodeSpeed(0.002, 0.004, 0)),
            _poisson(4, 100, 100, 400),
            Limit.DECODE_COMPUTE,
            id="steps",
        ),
        pytest.param(
            replace(SPEEDS, settings=Settings(kv_cache_tokens=4096)),
            _poisson(3, 1000, 300, 400),
            Limit.DECODE_PAGES,
            id="pages",
        ),
    ],
)
def test_a_smaller_fleet_says_what_it_lacks(speeds: Speeds, arrivals: list[Arrival], limit: Limit) -> None:
    found = _plan(speeds, Slo(0.5, 0.03, 0.9), arrivals)
    assert limit in {each.limit for each in found.smaller}


def test_the_lower_bound_is_the_work_over_what_one_can_do() -> None:
    speeds = Speeds(
        Settings(), PrefillSpeed(0, 1e-4, 0), HandoffSpeed(0, 0), DecodeSpeed(0.01, 0, 0)
    )  # 10,000 tokens/s each; 100 steps/s of 32 answers
    arrivals = [Arrival(0.05 * number, 1000, 321) for number in range(401)]  # 20/s: 20,000 and 6,400 tokens/s
    assert lower_bound(speeds, Slo(1, 1, 0.9), arrivals) == Fleet(2, 2)
    assert lower_bound(speeds, Slo(1, 1, 0.9), [replace(each, output_tokens=322) for each in arrivals]) == Fleet(2, 3)


@pytest.mark.parametrize(
    ("slo", "why"),
    [
        pytest.param(Slo(0.1, 0.02, 0.9), "first token within 100 ms, .* takes 130 ms already", id="ttft"),
        pytest.param(Slo(0.4, 0.005, 0.9), r"at most 5\.0 ms between tokens, .* has 6\.6 ms already", id="itl"),
    ],
)
def test_what_one_request_alone_cannot_keep_is_impossible(slo: Slo, why: str) -> None:
    with pytest.raises(CapacityExceeded, match=why):
        _plan(SPEEDS, slo, _poisson(5, 1000, 64))


def test_it_is_not_searched_for_ever() -> None:
    """Half of the prompts are too long for the TTFT, and the answers of the others for the ITL."""
    arrivals = [Arrival(number, *((100, 400) if number % 2 else (1500, 1))) for number in range(120)]
    speeds = replace(SPEEDS, decode=DecodeSpeed(0.01, 0, 1e-5), prefill=PrefillSpeed(0, 1e-3, 0))
    with pytest.raises(CapacityExceeded, match=r"more replicas do not help: .* 0\.0 % of the requests"):
        _plan(speeds, Slo(1.0, 0.012, 0.5), arrivals)


# --- the load of `bench serve` ---


def test_the_simulation_gets_the_requests_of_bench_serve() -> None:
    workload = Workload(3, Kind.PROMPTS, Uniform(10, 90), Uniform(1, 9), 4, VOCAB_SIZE)
    arrivals = arrivals_of(workload, 2.5, 40)
    assert [each.at_s for each in arrivals] == [
        at_s for at_s, _ in zip(poisson_arrivals(2.5, 3), range(40), strict=False)
    ]
    requests = [workload.request(number) for number in range(40)]
    assert [(each.prompt_tokens, each.output_tokens) for each in arrivals] == [
        (len(request.prompt), request.output_tokens) for request in requests
    ]


# --- the command ---

_LOAD = ("--rate", "12", "--prompt-tokens", "500-1500", "--output-tokens", "32")


def _run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(command, arguments)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def test_the_command_says_how_many_and_why_not_fewer(tmp_path: Path) -> None:
    SPEEDS.write(tmp_path / "speeds.json")
    slo = ("--slo-ttft-ms", "400", "--slo-itl-ms", "15", "--json", str(tmp_path / "plan.json"))
    code, output = _run("replicas", str(tmp_path / "speeds.json"), *_LOAD, *slo)
    document = json.loads((tmp_path / "plan.json").read_text())
    fleet = document["chosen"]["fleet"]
    assert code == 0
    assert f"{fleet['prefills']} x {fleet['decodes']}" in output
    assert "keep the SLO" in output
    for trial in document["smaller"]:
        assert f"the limit is {trial['limit']}" in output
    assert output.count("less: ") == len(document["smaller"]) > 0


@pytest.mark.parametrize(
    ("ttft_ms", "text", "says"),
    [
        pytest.param("20", None, "with nothing else to do", id="impossible"),
        pytest.param("400", "{}", "pdctl plan measure", id="no speeds"),
    ],
)
def test_what_cannot_be_planned_ends_with_1_and_a_sentence(
    tmp_path: Path, ttft_ms: str, text: str | None, says: str
) -> None:
    path = tmp_path / "speeds.json"
    SPEEDS.write(path)
    if text is not None:
        path.write_text(text)
    code, output = _run("replicas", str(path), *_LOAD, "--slo-ttft-ms", ttft_ms, "--slo-itl-ms", "15")
    assert (code, says in output) == (1, True)


# --- the probe ---


class Metronome:
    """A server whose answers come a token a millisecond, as many as are asked for; it counts those under way."""

    def __init__(self) -> None:
        self.most = 0
        self.prompts: list[list[int]] = []
        self._now = 0

    def app(self) -> Starlette:
        models = JSONResponse({"data": [{"id": "tiny"}]})
        return Starlette(
            routes=[
                Route("/v1/models", lambda _: models),
                Route("/v1/completions", self._complete, methods=["POST"]),
            ]
        )

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        self.prompts.append(body["prompt"])
        return StreamingResponse(self._tokens(body["max_tokens"]), media_type="text/event-stream")

    async def _tokens(self, count: int) -> AsyncIterator[bytes]:
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            for _ in range(count):
                await asyncio.sleep(0.001)
                yield event()
            yield DONE
        finally:
            self._now -= 1


_SIZES = ProbeSizes(
    (8, 32, 64, 128), rounds=2, burst=3, burst_tokens=2, answers=(1, 4), seconds=0.1, answer_tokens=1000
)


async def test_the_probe_sends_new_prompts_alone_at_once_and_side_by_side() -> None:
    server, said = Metronome(), list[str]()
    async with serving(server.app()) as url:
        where = Server(url, None, 30.0)
        async with where.session() as session:
            completions = Completions(where, session, {"model": "tiny", "stream": True})
            seen = await Probe(completions, 256, 7, _SIZES, said.append).run()
    assert [each.tokens for each in seen.singles] == [8, 32, 64, 128]
    assert [(each.tokens, each.count) for each in seen.bursts] == [(tokens, 3) for tokens in (8, 32, 64, 128)]
    assert [each.running for each in seen.gaps] == [1, 1, 4, 4]
    assert [each.context_tokens // each.running // 32 for each in seen.gaps[1::2]] >= [1, 1]
    assert server.most == 4
    assert len({tuple(prompt) for prompt in server.prompts}) == len(server.prompts)
    assert len(said) == 4 + 8 + 4
    fit(Settings(), seen.singles, seen.bursts, seen.gaps)


async def test_what_is_measured_can_be_planned_with(tmp_path: Path) -> None:
    path = tmp_path / "speeds.json"
    options = ("--to", str(path), "--longest-prompt", "64", "--answers", "1", "--kv-cache-tokens", "4096")
    async with serving(Metronome().app()) as url:
        code, output = await asyncio.to_thread(_run, "measure", url, *options)
    assert code == 0, output
    for said in ("TTFT, 64 tokens", "4 at once, 64 tokens", "ITL, 1 answer,", f"written to {path}"):
        assert said in output
    assert Speeds.read(path).settings == Settings(kv_cache_tokens=4096)


@pytest.mark.parametrize(
    ("server", "why"),
    [
        pytest.param(
            ScriptedOpenAI(refusal=JSONResponse({"error": {"message": "full", "code": "CAPACITY"}}, 429)),
            "a request of the probe has failed: .*full",
            id="refused",
        ),
        pytest.param(ScriptedOpenAI(script=(event(), DONE)), "fewer side by side", id="answers too short"),
    ],
)
async def test_a_probe_that_cannot_see_says_why(server: ScriptedOpenAI, why: str) -> None:
    async with serving(server.app()) as url:
        where = Server(url, None, 30.0)
        async with where.session() as session:
            with pytest.raises(PeerLost, match=why):
                await Probe(Completions(where, session, {}), 256, 7, _SIZES, lambda _: None).run()
