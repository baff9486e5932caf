from __future__ import annotations

import logging
import re
import ssl
import time
from pathlib import Path

import httpx
import pytest
from pd.v1 import inspection_pb2, types_pb2
from prometheus_client import CollectorRegistry

from pd_common.control import metrics
from pd_common.control.metrics import EngineCollector, IdentityCollector
from pd_common.control.outputs import OutputHub
from pd_common.control.server import ControlServer
from pd_common.control.transfer_metrics import TransferMetrics
from pd_common.errors import DigestMismatch, InvalidRequest, PeerLost, RoomAborted
from pd_common.generation import Load
from pd_common.handoff.deadlines import Timeouts
from pd_common.handoff.metadata import ROW_BYTES, Slot
from pd_common.handoff.quarantine import Held
from pd_common.handoff.state import Progress, TransferState
from pd_common.handoff.table import TransferTable
from pd_common.types import BootstrapRoom, Instance, Role
from tests.control.certificates import Authority
from tests.control.fake_rooms import FakeRooms
from tests.control.serving import LOOPBACK

ONE, TWO, THREE = BootstrapRoom(1), BootstrapRoom(2), BootstrapRoom(3)
PEER = Instance("prefill-0", 3)
BUSY = Load(queued=7, max_queued=8, oldest_wait_s=1.5, running=2, pages_total=64, pages_available=45)
ENGINE = {
    'pd_kv_pages{state="free"}': 40,
    'pd_kv_pages{state="used"}': 11,
    'pd_kv_pages{state="quarantined"}': 8,
    'pd_kv_pages{state="cached"}': 5,
    'pd_metadata_slots{state="free"}': 3,
    'pd_metadata_slots{state="used"}': 2,
    'pd_metadata_slots{state="quarantined"}': 1,
    "pd_kv_pages_on_host": 9,
    "pd_rooms_live": 2,
    "pd_requests_running": 2,
    "pd_requests_queued": 7,
    "pd_requests_queued_limit": 8,
    "pd_requests_retracted": 3,
    "pd_queue_oldest_wait_seconds": 1.5,
    "pd_quarantine_oldest_seconds": 0,
}


@pytest.fixture
def table() -> TransferTable:
    return TransferTable(Role.DECODE, 60.0, 100, Timeouts(300.0, 300.0))


@pytest.fixture
def handoffs(table: TransferTable) -> CollectorRegistry:
    handoffs, registry = TransferMetrics(), CollectorRegistry()
    table.listeners.append(handoffs.note_change)
    registry.register(handoffs)
    return registry


def open_room(table: TransferTable, room: BootstrapRoom, *states: TransferState) -> None:
    table.open(room, rid="r", prompt_digest=b"", deadline_s=60.0, now=0.0)
    for state in states:
        table.advance(room, state, 0.0)


def live(registry: CollectorRegistry) -> dict[str, float | None]:
    names = [state.name.lower() for state in TransferState if not state.is_final]
    return {name: registry.get_sample_value("pd_rooms", {"state": name}) for name in names}


async def test_what_is_scraped_is_what_the_engine_does_now(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, metrics.__name__)
    rooms = FakeRooms(OutputHub())
    rooms.to_do = BUSY
    async with metrics.served([EngineCollector(rooms)], LOOPBACK, 0), httpx.AsyncClient() as client:
        found = re.search(r"http://\S+/metrics", caplog.text)
        assert found is not None
        assert engine_samples((await client.get(found[0])).text) == ENGINE
        rooms.held = tuple(
            Held(room, (1,), Slot(0, 1), time.monotonic() - age, {}) for room, age in ((ONE, 90), (TWO, 5))
        )
        oldest_s = engine_samples((await client.get(found[0])).text)["pd_quarantine_oldest_seconds"]
        assert oldest_s == pytest.approx(90, abs=5)
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(found[0])


async def test_every_process_says_which_life_of_what_it_is() -> None:
    said = inspection_pb2.GetProcessResponse(
        instance=types_pb2.Instance(instance_id="decode-7", epoch=1),
        role=types_pb2.ROLE_DECODE,
        software_version="1.2",
        model="tiny",
    )
    registry = CollectorRegistry()
    registry.register(IdentityCollector(lambda: said))
    labels = {"instance_id": "decode-7", "role": "decode", "version": "1.2", "model": "tiny"}
    assert registry.get_sample_value("pd_process_info", labels) == 1


def test_live_rooms_are_counted_in_the_state_that_they_are_in(
    table: TransferTable, handoffs: CollectorRegistry
) -> None:
    open_room(table, ONE, TransferState.WAITING_FOR_INPUT)
    open_room(table, TWO, TransferState.WAITING_FOR_INPUT, TransferState.TRANSFERRING)
    open_room(table, THREE)
    table.advance(TWO, TransferState.TRANSFERRING, 1.0, progress=Progress(1, 2, 30))
    assert live(handoffs) == {"bootstrapping": 1, "waiting_for_input": 1, "transferring": 1}
    table.fail(ONE, PeerLost("gone"), 2.0)
    table.advance(TWO, TransferState.SUCCESS, 2.0)
    table.fail(THREE, PeerLost("gone"), 2.0)
    table.fail(THREE, PeerLost("again"), 3.0)
    table.sweep(1e6)
    assert live(handoffs) == {"bootstrapping": 0, "waiting_for_input": 0, "transferring": 0}


def test_a_failure_is_counted_once_where_it_happened(table: TransferTable, handoffs: CollectorRegistry) -> None:
    failed = "pd_rooms_failed_total"
    mismatch = {"state": "transferring", "reason": "DIGEST_MISMATCH"}
    assert handoffs.get_sample_value(failed, mismatch) == 0  # an increase from nothing would not be seen
    open_room(table, ONE, TransferState.WAITING_FOR_INPUT, TransferState.TRANSFERRING)
    for _ in range(2):
        table.fail(ONE, DigestMismatch("other bytes"), 1.0)
    table.abort(TWO, RoomAborted("by hand"), 1.0)
    assert handoffs.get_sample_value(failed, mismatch) == 1
    assert handoffs.get_sample_value(failed, {"state": "unknown", "reason": "ROOM_ABORTED"}) == 1


@pytest.mark.parametrize(("role", "direction"), [(Role.PREFILL, "sent"), (Role.DECODE, "received")])
def test_bytes_of_a_room_are_those_of_its_pages(role: Role, direction: str) -> None:
    """The metadata row travels too; of a room that decode had in its cache it is all that does."""
    table, handoffs, registry = (
        TransferTable(role, 60.0, 100, Timeouts(300.0, 300.0)),
        TransferMetrics(),
        CollectorRegistry(),
    )
    table.listeners.append(handoffs.note_change)
    registry.register(handoffs)
    for room, pages_bytes in ((ONE, 3000), (TWO, 0)):
        end_well(table, role, room, Progress(2, 3, pages_bytes + ROW_BYTES))
    end_well(table, role, THREE, Progress())  # nothing was handed over, as on a decode alone
    of = {"direction": direction}
    assert registry.get_sample_value("pd_transfer_total_bytes_sum", of) == 3000
    assert registry.get_sample_value("pd_transfer_total_bytes_count", of) == 2


def end_well(table: TransferTable, role: Role, room: BootstrapRoom, progress: Progress) -> None:
    table._put(table._fresh(room, 60.0, 0.0), TransferState.WAITING_FOR_INPUT, 0.0)
    table.advance(room, TransferState.SUCCESS, 1.0, progress=progress)


async def test_a_taken_port_is_an_error_that_names_the_option(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, metrics.__name__)
    async with metrics.served([], LOOPBACK, 0):
        port = int(caplog.text.rpartition(":")[2].partition("/")[0])
        with pytest.raises(InvalidRequest) as raised:
            await metrics.served([], LOOPBACK, port).__aenter__()
        assert raised.value.metadata == {"field": "metrics_port"}


async def test_without_a_port_nothing_is_served(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, metrics.__name__)
    async with metrics.served([], LOOPBACK, None):
        assert not caplog.text


async def test_the_errors_of_a_server_are_scraped_over_tls_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, metrics.__name__)
    files = Authority(tmp_path).issue("metrics", to="prefill")
    control = ControlServer([])
    control.errors.labels("pd.v1.Abort/AbortRoom", "INVALID_REQUEST").inc(2)
    context = ssl.create_default_context(cafile=files.ca)
    context.load_cert_chain(files.cert, files.key)
    async with metrics.served([control.errors], LOOPBACK, 0, files.tls()), httpx.AsyncClient(verify=context) as client:
        found = re.search(r"https://\S+/metrics", caplog.text)
        assert found is not None
        answer = await client.get(found[0], extensions={"sni_hostname": "metrics"})
    counted = samples(answer.text)
    assert counted['pd_rpc_errors_total{method="pd.v1.Abort/AbortRoom",reason="INVALID_REQUEST"}'] == 2
    await control.stop(grace_s=0.0)


def samples(text: str) -> dict[str, float]:
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def engine_samples(text: str) -> dict[str, float]:
    """Without what Python says of every process."""
    return {name: value for name, value in samples(text).items() if name.startswith("pd_")}
