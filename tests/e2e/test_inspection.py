"""A system is looked into with tools that know nothing of it but where it listens."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.e2e.tools import buf_curl, grpcurl, needs_buf, needs_grpcurl
from tests.services.pair import Pair, running

STATUS = "pd.v1.TransferStatus"
ROOMS = (42, 43)
METHOD = r"rpc (\w+) \( (?:stream )?\.(pd\.v1\.\w+) \) returns \( (?:stream )?\.(pd\.v1\.\w+) \);"
ABORTED = 2**53 + 1
STANDARD = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
BOTH = {"pd.v1.Abort", "pd.v1.Generation", STATUS}


@pytest.fixture
async def both() -> AsyncIterator[Pair]:
    """Two rooms have gone well, a third was aborted before it came."""
    async with running(Pair()) as both:
        for room in ROOMS:
            await both.serve(room)
        await both.at_prefill.client.abort(ABORTED)
        yield both


@pytest.fixture
async def prefill(both: Pair) -> str:
    return both.at_prefill.address.target


@pytest.fixture
async def decode(both: Pair) -> str:
    return both.at_decode.address.target


def rooms(answer: dict[str, list[dict[str, str]]]) -> list[int]:
    return [int(transfer["bootstrap_room"]) for transfer in answer.get("transfers", [])]


@needs_grpcurl
async def test_the_services_are_listed(prefill: str, decode: str) -> None:
    on_prefill, on_decode = await asyncio.gather(grpcurl(prefill, "list"), grpcurl(decode, "list"))
    assert set(on_prefill.out.split()) == STANDARD | BOTH | {"pd.v1.Bootstrap", "pd.v1.PageAllocation"}
    assert set(on_decode.out.split()) == STANDARD | BOTH


@needs_grpcurl
async def test_every_method_can_be_described_and_called_with_nothing_known(prefill: str) -> None:
    """What it answers to an empty message is an answer, or an error with a reason; a stream goes on."""
    services = [name for name in (await grpcurl(prefill, "list")).out.split() if name.startswith("pd.v1.")]
    for service in services:
        described = (await grpcurl(prefill, "describe", service)).out
        methods = re.findall(METHOD, described)
        assert methods
        for method, *messages in methods:
            for message in messages:
                assert f"{message} is a message:" in (await grpcurl(prefill, "describe", message)).out
            called = await grpcurl(prefill, f"{service}/{method}", data={}, max_time_s=0.5)
            reason = re.search(r'google\.rpc\.ErrorInfo.*"domain":"pd".*"reason":"[A-Z_]+"', called.err)
            assert called.code == 0 or reason or "DeadlineExceeded" in called.err, f"{method}: {called}"


@needs_grpcurl
async def test_what_a_person_types_shows_a_room(prefill: str) -> None:
    described = await grpcurl(prefill, "describe", STATUS)
    assert "rpc GetTransfer ( .pd.v1.GetTransferRequest ) returns ( .pd.v1.GetTransferResponse );" in described.out
    shown = (await grpcurl(prefill, f"{STATUS}/GetTransfer", data={"bootstrap_room": "42"})).message["transfer"]
    assert (shown["bootstrap_room"], shown["rid"], shown["role"]) == ("42", "r42", "ROLE_PREFILL")
    assert shown["state"] == "TRANSFER_STATE_SUCCESS"
    assert shown["peer"]["instance_id"].startswith("decode-")
    entered = [step["state"].removeprefix("TRANSFER_STATE_") for step in shown["timeline"]]
    assert entered == ["BOOTSTRAPPING", "WAITING_FOR_INPUT", "TRANSFERRING", "SUCCESS"]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", step["time"]) for step in shown["timeline"])


@needs_grpcurl
async def test_why_a_room_failed_is_shown_in_words_and_by_reason(prefill: str) -> None:
    found = await grpcurl(prefill, f"{STATUS}/GetTransfer", data={"bootstrap_room": str(ABORTED)})
    failure = found.message["transfer"]["failure"]
    assert failure["message"] == "the user pressed stop"
    assert failure["details"][0]["reason"] == "ROOM_ABORTED"


@needs_grpcurl
async def test_an_error_has_a_reason_for_programs(prefill: str) -> None:
    missing = await grpcurl(prefill, f"{STATUS}/GetTransfer", data={"bootstrap_room": "7"})
    assert missing.code != 0
    for part in ("Code: NotFound", "Message: Room 7 is not on record", '"reason":"ROOM_UNKNOWN"', '"room":"7"'):
        assert part in missing.err


@needs_grpcurl
async def test_rooms_are_listed_by_state_and_peer_and_age_page_by_page(both: Pair, prefill: str) -> None:
    method, good = f"{STATUS}/ListTransfers", {"states": ["TRANSFER_STATE_SUCCESS"]}
    assert rooms((await grpcurl(prefill, method)).message) == [*ROOMS, ABORTED]
    assert rooms((await grpcurl(prefill, method, data=good)).message) == [*ROOMS]
    peer = {"peer_instance_id": both.decode.instance.instance_id}
    assert rooms((await grpcurl(prefill, method, data=peer)).message) == [*ROOMS]
    assert rooms((await grpcurl(prefill, method, data={"older_than": "3600s"})).message) == []
    first = (await grpcurl(prefill, method, data={**good, "page_size": 1})).message
    assert rooms(first) == [42]
    second = {**good, "page_size": 1, "page_token": first["next_page_token"]}
    answer = (await grpcurl(prefill, method, data=second)).message
    assert rooms(answer) == [43]
    assert "next_page_token" not in answer


@needs_grpcurl
async def test_a_watch_shows_what_is_there_and_goes_on_from_where_it_stopped(both: Pair, decode: str) -> None:
    method = f"{STATUS}/WatchTransfers"
    seen = (await grpcurl(decode, method, max_time_s=1)).messages
    assert [int(message["transfer"]["bootstrap_room"]) for message in seen] == [*ROOMS]
    resumed = asyncio.create_task(
        grpcurl(decode, method, data={"after_sequence": seen[0]["transfer"]["sequence"]}, max_time_s=2)
    )
    await both.serve(44)
    later = (await resumed).messages
    assert later[0]["transfer"]["bootstrap_room"] == "43"
    assert (later[-1]["transfer"]["bootstrap_room"], later[-1]["transfer"]["state"]) == ("44", "TRANSFER_STATE_SUCCESS")


@needs_buf
async def test_buf_finds_the_same_by_reflection(prefill: str, decode: str, tmp_path: Path) -> None:
    room = (await buf_curl(tmp_path, prefill, f"{STATUS}/GetTransfer", {"bootstrap_room": "42"})).message
    assert room["transfer"]["state"] == "TRANSFER_STATE_SUCCESS"
    pool = (await buf_curl(tmp_path, decode, f"{STATUS}/GetPool", {})).message
    assert pool["pagesFree"] + pool["pagesCached"] == pool["pagesTotal"]
    peers = (await buf_curl(tmp_path, decode, f"{STATUS}/ListPeers", {})).message["peers"]
    assert [peer["controlAddress"] for peer in peers] == [prefill]
    missing = await buf_curl(tmp_path, prefill, f"{STATUS}/GetTransfer", {"bootstrap_room": "7"})
    assert missing.code != 0
    assert '"code": "not_found"' in missing.err
    assert "google.rpc.ErrorInfo" in missing.err
