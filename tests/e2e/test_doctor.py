"""Real processes in trouble, and `pdctl doctor` beside them. More: tests/inspection/test_diagnosed_pairs.py."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import pytest

from demo.cluster import LOOPBACK, Cluster
from pd_common.inspection.diagnoses.finding import Finding, Kind, Severity
from pd_common.types import Role
from tests.e2e.harness import Client, client_of, eventually, running_cluster, started_cluster
from tests.inspection.inspected import diagnosed
from tests.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.slow

BOOTSTRAPPING, WAITING_FOR_INPUT, TRANSFERRING, SUCCESS, FAILED = 1, 2, 3, 4, 5
LONG = tuple(random.Random(1).choices(range(1, VOCAB_SIZE), k=6000))
SHORT = LONG[:100]
FOR_LONG = 7000
"""Tokens of an answer that nobody waits for to the end."""
ROOMS = itertools.count(1000)
MOST_QUEUED = 2


async def printed(running: Cluster, *words: str) -> tuple[str, int]:
    """What `pdctl doctor` prints, on either stream, and its exit code."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "pd_common.cli.main", "doctor", "--router", f"{LOOPBACK}:{running.ports.grpc}", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    return out.decode(), process.returncode or 0


async def doctor(running: Cluster, room: int | None = None) -> dict[Kind, Finding]:
    """The same as values; it calls stuck what lasts a fifth of a second."""
    return await diagnosed([(f"{LOOPBACK}:{running.ports.grpc}", Role.ROUTER)], room, patience_s=0.2)


async def findings_with(running: Cluster, kind: Kind) -> dict[Kind, Finding]:
    """As soon as there is one of this kind."""
    findings: dict[Kind, Finding] = {}

    async def complaint() -> str:
        findings.clear()
        findings.update(await doctor(running))
        return "" if kind in findings else f"{kind} is not among {list(findings)}"

    await eventually(complaint)
    return findings


def meeting(running: Cluster) -> dict[str, Any]:
    return {"bootstrap_host": LOOPBACK, "bootstrap_port": running.ports.prefill}


@asynccontextmanager
async def asked(*answers: Any) -> AsyncIterator[None]:
    """While the block runs somebody waits for these answers; then nobody does."""
    tasks = [asyncio.create_task(answer) for answer in answers]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def until_pool(client: Client, name: str, wanted: Callable[[Any], bool]) -> Any:
    async def complaint() -> str:
        pool = await client.pool(name)
        return "" if wanted(pool) else f"{name}: {pool}"

    return eventually(complaint)


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    """Small chunks, so that a long prompt is under way for a while; one answer at a time."""
    flags = ["--max-running-requests", "1", "--decode-extra-slots", "0", "--max-queued-requests", str(MOST_QUEUED)]
    with running_cluster(chunk=64, decode_flags=flags) as running:
        yield running


@pytest.fixture
async def client(pair: Cluster) -> AsyncIterator[Client]:
    async with client_of(pair) as client:
        yield client


async def test_a_sound_system_has_nothing_wrong_and_exit_code_0(pair: Cluster, client: Client) -> None:
    room = (await client.generate(SHORT)).room
    out, code = await printed(pair)
    assert (out.startswith("Nothing is wrong"), code) == (True, 0), out
    assert await printed(pair, str(room)) == (f"Nothing is wrong with room {room}.\n", 0)


async def test_a_room_that_nobody_knows_is_an_error(pair: Cluster) -> None:
    out, code = await printed(pair, "123456")
    assert (out.startswith("Error: room 123456 is not on record"), code) == (True, 1), out


async def test_a_direct_client_with_two_room_numbers_is_told_so_in_words(pair: Cluster, client: Client) -> None:
    one, other = next(ROOMS), next(ROOMS)
    to_prefill = client.generate(SHORT, to="prefill", bootstrap_room=one, rid="chat-7", **meeting(pair))
    to_decode = client.generate(SHORT, to="decode", bootstrap_room=other, rid="chat-7", **meeting(pair))
    async with asked(to_prefill, to_decode):
        await client.reached("decode", WAITING_FOR_INPUT, other)
        await client.reached("prefill", BOOTSTRAPPING, one)
        out, code = await printed(pair, "--patience", "0.2")
        as_json, _ = await printed(pair, "--patience", "0.2", "--json")
    assert code == 1
    words = " ".join(out.split())
    assert "The two legs of a request have different room numbers [stuck]" in words
    assert f"room {one}, prefill {LOOPBACK}:{pair.ports.prefill}: BOOTSTRAPPING" in words
    assert f"room {other}, decode {LOOPBACK}:{pair.ports.decode}: WAITING_FOR_INPUT" in words
    assert "the rid 'chat-7' is the same" in words
    assert "\x1b" not in out
    assert all(line == line.rstrip() and len(line) <= 80 for line in out.splitlines())
    (finding,) = json.loads(as_json)["findings"]
    assert (finding["kind"], finding["severity"]) == ("room-ids-differ", "stuck")
    assert set(finding["rooms"]) == {str(one), str(other)}


async def test_a_client_that_went_away_is_told_from_a_broken_link(pair: Cluster, client: Client) -> None:
    room = next(ROOMS)
    async with asked(client.generate(LONG, bootstrap_room=room)):
        await client.reached("decode", TRANSFERRING, room)
    await client.wait_clean()
    findings = await doctor(pair, room)
    assert list(findings) == [Kind.ABORTED]
    assert any("the client went away: router" in seen for seen in findings[Kind.ABORTED].seen)


async def test_rooms_that_wait_for_their_turn_and_those_that_are_refused(pair: Cluster, client: Client) -> None:
    filler, waiting = next(ROOMS), [next(ROOMS) for _ in range(MOST_QUEUED)]
    async with asked(client.generate(SHORT, max_new_tokens=FOR_LONG, bootstrap_room=filler)):
        await client.reached("decode", SUCCESS, filler)
        async with asked(*(client.generate(SHORT, bootstrap_room=room) for room in waiting)):
            await until_pool(client, "decode", lambda pool: pool.requests_queued == MOST_QUEUED)
            findings = await findings_with(pair, Kind.QUEUE)  # the router hears twice a second of it
    assert set(findings[Kind.PAGES_NOT_OFFERED].rooms) == set(waiting)
    assert findings[Kind.QUEUE].title == "A queue is full"
    assert f"{MOST_QUEUED} of at most {MOST_QUEUED} requests wait" in findings[Kind.QUEUE].seen[0]
    await eventually(partial(still_found, pair, Kind.QUEUE))


async def still_found(running: Cluster, kind: Kind) -> str:
    finding = (await doctor(running)).get(kind)
    return "" if finding is None else f"it is over, and the doctor says {finding}"


async def test_a_frozen_prefill_and_what_it_leaves_behind(pair: Cluster, client: Client) -> None:
    room = next(ROOMS)
    async with asked(client.generate(LONG, bootstrap_room=room)):
        await client.reached("decode", TRANSFERRING, room)
        pair.prefill.send(signal.SIGSTOP)
        try:
            findings = await findings_with(pair, Kind.QUARANTINE)
        finally:
            pair.prefill.send(signal.SIGCONT)
    assert [finding.severity for finding in findings.values()][:2] == [Severity.DOWN] * 2, "the worst first"
    assert f"prefill {LOOPBACK}:{pair.ports.prefill}" in findings[Kind.UNREACHABLE].seen[0]
    assert "503" in findings[Kind.NO_ROUTE].title
    assert room in findings[Kind.PEER_LOST].rooms
    assert findings[Kind.QUARANTINE].rooms == (room,)
    assert "nor has its process ended" in " ".join(findings[Kind.QUARANTINE].seen)
    await asyncio.to_thread(pair.wait_ready)
    await client.wait_clean()
    assert not {Kind.UNREACHABLE, Kind.NO_ROUTE, Kind.QUARANTINE} & (await doctor(pair)).keys()


async def test_pools_that_differ_are_named_with_the_flag_and_a_killed_process_is_missed() -> None:
    with started_cluster(decode_flags=["--page-size", "32"]) as running:
        for process in (running.prefill, running.decode):
            await asyncio.to_thread(process.wait_for_log, " serves ")
        client = Client(running)
        with pytest.raises(grpc.aio.AioRpcError):
            await client.generate(SHORT, to="decode", bootstrap_room=next(ROOMS), **meeting(running))
        await client.close()
        findings = await findings_with(running, Kind.LAYOUTS_DIFFER)
        running.decode.kill()
        after_the_kill = await findings_with(running, Kind.UNREACHABLE)
    differ = findings[Kind.LAYOUTS_DIFFER]
    assert differ.title == "Prefill and decode do not fit together: page_size"
    assert {"page_size: 32 here, 16 there", "page_size: 16 here, 32 there"} & set(differ.seen)
    assert differ.do[0] == "start both with the same --page-size"
    assert Kind.NO_ROUTE in findings
    assert f"decode {LOOPBACK}:{running.ports.decode}" in " ".join(after_the_kill[Kind.UNREACHABLE].seen)
