from __future__ import annotations

import ast
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from pd.v1 import page_allocation_pb2, page_allocation_pb2_grpc

from pd_common.control import server
from pd_common.control.abort_servicer import AbortServicer
from pd_common.control.connection import Connection
from pd_common.control.generation_client import GenerationClient
from pd_common.control.generation_servicer import EngineGenerationServicer
from pd_common.control.outputs import OutputHub
from pd_common.control.server import MAX_MESSAGE_BYTES, ControlServer
from pd_common.errors import CapacityExceeded, InvalidRequest, PdError
from pd_common.types import BootstrapRoom
from tests.control.fake_rooms import MODEL, FakeModel, FakeRooms
from tests.control.serving import LOOPBACK

NO_MESSAGE = [b"\xff", b"\x08", b"\x0a\x05ab", b"\x0a\x02\xff\xfe\x12\x02\xff\xfe", b"\x00"]


class EchoingServicer(page_allocation_pb2_grpc.PageAllocationServicer):
    """Answers each message of a stream; `ended` says how many there were before it ended."""

    def __init__(self) -> None:
        self.ended: list[int] = []

    async def HoldReceiver(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: ARG002, N802
        received = 0
        try:
            async for _ in request_iterator:
                received += 1
                yield page_allocation_pb2.HoldReceiverResponse()
        finally:
            self.ended.append(received)


@pytest.fixture
async def echoing() -> EchoingServicer:
    return EchoingServicer()  # type: ignore[abstract]


@pytest.fixture
async def control(echoing: EchoingServicer, rooms: FakeRooms, hub: OutputHub) -> AsyncIterator[ControlServer]:
    services = [
        server.page_allocation(echoing),
        server.abort(AbortServicer(rooms)),
        server.generation(EngineGenerationServicer(rooms, hub, FakeModel())),
    ]
    control = ControlServer(services)
    yield control
    await control.stop(grace_s=0.0)


@pytest.fixture
async def connection(control: ControlServer) -> AsyncIterator[Connection]:
    connection = Connection(f"{LOOPBACK}:{await control.start(LOOPBACK, 0)}")
    yield connection
    await connection.close()


def counted(control: ControlServer) -> dict[tuple[str, str], float]:
    """The errors answered so far, by method and reason."""
    (metric,) = control.errors.collect()
    return {
        (sample.labels["method"], sample.labels["reason"]): sample.value
        for sample in metric.samples
        if sample.name == "pd_rpc_errors_total"
    }


async def send(connection: Connection, method: str, *messages: bytes) -> list[bytes]:
    """What comes of these bytes, whatever kind of call it is."""

    async def all_of_them() -> AsyncIterator[bytes]:
        for message in messages:
            yield message

    call: Any = connection.channel.stream_stream(f"/pd.v1.{method}")  # type: ignore[call-arg]
    with connection.typed_errors():
        return [response async for response in call(all_of_them(), timeout=10)]


@pytest.mark.parametrize("method", ["Abort/AbortRoom", "Generation/Submit", "Generation/Generate"])
@pytest.mark.parametrize("data", NO_MESSAGE, ids=repr)
async def test_bytes_that_are_no_message_are_an_invalid_request(
    control: ControlServer, connection: Connection, method: str, data: bytes
) -> None:
    """I11: and it costs nobody but their sender anything."""
    with pytest.raises(InvalidRequest, match=method) as raised:
        await send(connection, method, data)
    assert raised.value.metadata == {"field": "request"}
    assert counted(control) == {(f"pd.v1.{method}", "INVALID_REQUEST"): 1.0}
    assert await GenerationClient(connection).get_model() == MODEL


@pytest.mark.parametrize("data", NO_MESSAGE[:2], ids=repr)
async def test_such_bytes_end_a_stream_in_its_middle(
    control: ControlServer, connection: Connection, echoing: EchoingServicer, data: bytes
) -> None:
    with pytest.raises(InvalidRequest):
        await send(connection, "PageAllocation/HoldReceiver", b"", b"", data, b"")
    assert echoing.ended == [2]
    assert counted(control) == {("pd.v1.PageAllocation/HoldReceiver", "INVALID_REQUEST"): 1.0}


async def test_a_stream_without_a_message_and_one_with_many_are_both_served(connection: Connection) -> None:
    assert await send(connection, "PageAllocation/HoldReceiver") == []
    assert await send(connection, "PageAllocation/HoldReceiver", b"", b"", b"") == [b"", b"", b""]


async def test_what_goes_on_record_is_short(connection: Connection, rooms: FakeRooms) -> None:
    """Whoever aborts rooms that nobody knows would otherwise fill the memory with messages."""
    await GenerationClient(connection).abort_room(BootstrapRoom(5), "m" * 1_000_000)
    _, error = rooms.aborted.get_nowait()
    assert error.message == "m" * 1000


async def test_each_error_is_counted_under_its_method_and_reason(
    control: ControlServer, connection: Connection
) -> None:
    client = GenerationClient(connection)
    for _ in range(3):
        with pytest.raises(InvalidRequest):
            await client.abort_room(BootstrapRoom(0), "no such room can be")
    with pytest.raises(InvalidRequest):
        await client.tokenize_chat([])
    await client.get_model()
    assert counted(control) == {
        ("pd.v1.Abort/AbortRoom", "INVALID_REQUEST"): 3.0,
        ("pd.v1.Generation/Tokenize", "INVALID_REQUEST"): 1.0,
    }


async def test_a_name_of_a_caller_adds_nothing_to_the_count(control: ControlServer, connection: Connection) -> None:
    """Whoever invents methods would otherwise fill the memory with their names."""
    with pytest.raises(PdError):
        await send(connection, "Abort/Invented", b"")
    assert counted(control) == {}


async def test_a_message_that_is_too_large_is_refused(control: ControlServer) -> None:
    address = f"{LOOPBACK}:{await control.start(LOOPBACK, 0)}"
    boundless = grpc.aio.insecure_channel(address, options=[("grpc.max_send_message_length", -1)])
    connection = Connection(address, boundless)
    with pytest.raises(CapacityExceeded):
        await send(connection, "Abort/AbortRoom", bytes(MAX_MESSAGE_BYTES + 1))
    assert await GenerationClient(connection).get_model() == MODEL
    await connection.close()


async def test_metadata_that_is_too_large_is_refused(connection: Connection) -> None:
    call: Any = connection.channel.unary_unary("/pd.v1.Generation/GetModel")  # type: ignore[call-arg]
    with pytest.raises(CapacityExceeded), connection.typed_errors():
        await call(b"", metadata=[("x-much", "x" * 2**17)], timeout=10)
    assert await GenerationClient(connection).get_model() == MODEL


# --- nothing that comes from the network is ever run ---

ROOT = Path(__file__).parents[2]
RUNS_CODE = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
RUNS_CODE_WHEN_CALLED = {"eval", "exec", "compile", "__import__", "torch.load", "numpy.load", "np.load", "yaml.load"}


def source_files() -> Iterator[Path]:
    for package in ("pd_common", "services", "proto"):
        yield from (ROOT / package).rglob("*.py")


def dangers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in RUNS_CODE)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            if node.module.partition(".")[0] in RUNS_CODE:
                yield node.module
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in RUNS_CODE_WHEN_CALLED:
            yield ast.unparse(node)


def test_no_source_file_can_run_what_it_reads() -> None:
    found = [f"{path}: {danger}" for path in source_files() for danger in dangers(ast.parse(path.read_text()))]
    assert found == []


@pytest.mark.parametrize(
    "source", ["import pickle", "import os, marshal", "from pickle import loads", "torch.load(p)", "x = eval('1')"]
)
def test_the_search_finds_what_it_looks_for(source: str) -> None:
    assert len(list(dangers(ast.parse(source)))) == 1
