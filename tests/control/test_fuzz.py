"""I11: whatever anybody sends costs its sender a typed error, and the next room is served as if nothing had been."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pd.v1 import abort_pb2, bootstrap_pb2, generation_pb2, page_allocation_pb2, transfer_status_pb2, types_pb2

from pd_common.control import convert, server
from pd_common.control.abort_servicer import AbortServicer
from pd_common.control.bootstrap_servicer import BootstrapServicer
from pd_common.control.connection import Connection, dial_plain
from pd_common.control.generation_client import GenerationClient
from pd_common.control.registry import Registry
from pd_common.control.server import ControlServer
from pd_common.control.status import from_rpc_error
from pd_common.errors import Reason, RoomAborted
from pd_common.telemetry.tracing import Tracing
from pd_common.types import Role
from services.router.dispatch import Dispatcher
from services.router.open_requests import OpenRequests
from services.router.policy import LeastLoaded
from services.router.servicer import RouterGenerationServicer
from services.router.worker import Worker
from tests.control.hostile import changes, laid_over, messages
from tests.control.serving import LOOPBACK
from tests.services.pair import Pair, running, soon, until
from tests.services.tap import PassOn

STREAM_S = 0.02
"""After this time a caller leaves a stream that goes on."""
SUBSCRIBER = "stranger"
"""Whose rooms hostile requests submit."""

MODULES: tuple[Any, ...] = (bootstrap_pb2, page_allocation_pb2, transfer_status_pb2, abort_pb2, generation_pb2)
METHODS: tuple[MethodDescriptor, ...] = tuple(
    method
    for module in MODULES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
)
REGISTER = page_allocation_pb2.DESCRIPTOR.services_by_name["PageAllocation"].methods_by_name["RegisterReceiver"]
SERVED_BY = {
    "directory": {"Bootstrap"},  # of its own: whoever may register ranks may of course replace them
    "prefill": {"PageAllocation", "TransferStatus", "Abort", "Generation"},
    "decode": {"TransferStatus", "Abort", "Generation"},
    "router": {"Abort", "Generation"},
}
TARGETS = [
    (process, method)
    for process, services in SERVED_BY.items()
    for method in METHODS
    if method.containing_service.name in services
    for _ in range(4 if method.name in {"Submit", "RegisterReceiver", "AllocatePages", "ReportTransfer"} else 1)
]


class HostileCall:  # no dataclass: hypothesis would print every field in full
    """Bytes for one method, or a message, or what is to be changed in the genuine message of this method."""

    def __init__(self, process: str, method: MethodDescriptor, sent: bytes | Message, *, is_change: bool) -> None:
        self.process = process
        self.path = f"/{method.containing_service.full_name}/{method.name}"
        self.goes_on: bool = method.server_streaming
        self._sent = sent
        self._is_change = is_change

    def data(self, genuine: Mapping[str, Message]) -> bytes:
        """What travels; `genuine` holds messages by the name of their type."""
        if isinstance(self._sent, bytes):
            return self._sent
        model = genuine.get(self._sent.DESCRIPTOR.full_name)
        whole = self._sent if model is None or not self._is_change else laid_over(model, self._sent)
        return whole.SerializeToString()

    def __repr__(self) -> str:
        return f"{self.process} {self.path} {'changes ' * self._is_change}{self._sent!r}"[:500]


def genuine_call(process: str, method: MethodDescriptor) -> HostileCall:
    return HostileCall(process, method, message_factory.GetMessageClass(method.input_type)(), is_change=True)


@st.composite
def hostile_calls(draw: st.DrawFn) -> HostileCall:
    process, method = draw(st.sampled_from(TARGETS))
    kind = draw(st.sampled_from(["genuine", "change", "change", "change", "message", "damaged", "bytes"]))
    if kind == "genuine":
        return genuine_call(process, method)
    if kind == "change":
        return HostileCall(process, method, draw(changes(method.input_type)), is_change=True)
    if kind == "bytes":
        return HostileCall(process, method, draw(st.binary(max_size=64)), is_change=False)
    message = draw(messages(method.input_type))
    if kind == "message":
        return HostileCall(process, method, message, is_change=False)
    data = message.SerializeToString()
    place, junk = draw(st.integers(0, len(data))), draw(st.binary(min_size=1, max_size=4))
    return HostileCall(process, method, data[:place] + junk + data[place + len(junk) :], is_change=False)


class Attacked:
    """A pair behind a router, a directory, and a connection to each of the four."""

    def __init__(self, pair: Pair, genuine: dict[str, Message]) -> None:
        self.pair = pair
        self._genuine = genuine
        self._changed = asyncio.Event()

    async def start(self) -> None:
        addresses = {Role.PREFILL: self.pair.at_prefill.address, Role.DECODE: self.pair.at_decode.address}
        self._workers = [Worker(role, address, self._changed, dial_plain) for role, address in addresses.items()]
        policy = LeastLoaded(self._workers[:1], self._workers[1:])
        self._dispatcher = Dispatcher(policy, Tracing())
        self._control = ControlServer(
            [
                server.abort(AbortServicer(self._dispatcher)),
                server.generation(RouterGenerationServicer(self._dispatcher, OpenRequests())),
            ]
        )
        self._running = [asyncio.create_task(worker.run()) for worker in self._workers]
        await until(lambda: all(worker.is_live for worker in self._workers))
        (proven,) = policy.routes
        assert proven.lives is not None
        proven.note_probe(proven.lives, None)
        registry = Registry(Role.PREFILL, self.pair.prefill.instance.epoch)
        self._directory = ControlServer([server.bootstrap(BootstrapServicer(registry))])
        ports = {
            "prefill": addresses[Role.PREFILL].port,
            "decode": addresses[Role.DECODE].port,
            "router": await self._control.start(LOOPBACK, 0),
            "directory": await self._directory.start(LOOPBACK, 0),
        }
        self._connections = {name: Connection(f"{LOOPBACK}:{port}") for name, port in ports.items()}
        stranger: Any = self._genuine["pd.v1.RegisterReceiverRequest"]
        stranger.control_address = self._connections["directory"].address  # somebody answers, though to no avail
        for engine in ("prefill", "decode"):
            outputs = GenerationClient(self._connections[engine]).stream_outputs(SUBSCRIBER)
            await soon(anext(outputs))
            self._running.append(asyncio.create_task(_read(outputs)))

    async def suffer(self, call: HostileCall) -> None:
        """Asserts that it ends as a call may end."""
        error = await soon(_exchange(self._connections[call.process], call, call.data(self._genuine)))
        assert error is None or _is_honest(error, call), (call, error)

    async def end_what_is_left(self) -> None:
        """Rooms that hostile requests have opened, and that now wait for a counterpart."""
        for life in (self.pair.prefill, self.pair.decode):
            for transfer in life.transfers.live():
                await soon(life.service.abort(transfer.room, RoomAborted("the attack is over")))

    async def stop(self) -> None:
        await self._control.stop(grace_s=0.0)
        await self._directory.stop(grace_s=0.0)
        await self._dispatcher.close()
        assert not any(task.done() for task in self._running)
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        for connection in self._connections.values():
            await connection.close()
        for worker in self._workers:
            await worker.stop()


async def _read(outputs: AsyncIterator[object]) -> None:
    async for _ in outputs:
        pass


async def _exchange(connection: Connection, call: HostileCall, data: bytes) -> grpc.aio.AioRpcError | None:
    """How the call has failed."""

    async def once() -> AsyncIterator[bytes]:
        yield data

    made: Any = connection.channel.stream_stream(call.path)(once(), timeout=STREAM_S if call.goes_on else 5.0)  # type: ignore[call-arg]
    try:
        async for _ in made:
            pass
    except grpc.aio.AioRpcError as error:
        return error
    return None


def _is_honest(error: grpc.aio.AioRpcError, call: HostileCall) -> bool:
    """A reason of ours that is no defect, the end of a caller's patience with a stream, or what only engines do."""
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and call.goes_on:
        return True
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return call.process == "router"
    trailing: Any = error.trailing_metadata() or ()
    typed = any(key == "grpc-status-details-bin" for key, _ in trailing)
    return typed and from_rpc_error(error, "").reason is not Reason.INTERNAL


def record(pair: Pair) -> dict[str, Message]:
    """What genuine processes send each other from now on, the last of each type; some are made up from those."""
    genuine: dict[str, Message] = {}

    async def note(request: Message, pass_on: PassOn) -> Any:
        genuine[request.DESCRIPTOR.full_name] = type(request).FromString(request.SerializeToString())
        return await pass_on()

    for method in ("RegisterRank", "RegisterReceiver", "AllocatePages", "ReportTransfer", "Submit"):
        pair.at_prefill.tap.rules[method] = pair.at_decode.tap.rules[method] = note
    return genuine


def complete(genuine: dict[str, Message], pair: Pair) -> None:
    """Adds the types that no tap has seen. What decode says is said by a stranger of another name and address.

    Who takes those of a decode that lives can end its pairing: only certificates help against that.
    """
    prefill, stranger = convert.instance_to(pair.prefill.instance), types_pb2.Instance(instance_id="stranger", epoch=7)
    submit: Any = genuine["pd.v1.SubmitRequest"]
    submit.subscriber = SUBSCRIBER
    register: Any = genuine["pd.v1.RegisterReceiverRequest"]
    allocate: Any = genuine["pd.v1.AllocatePagesRequest"]
    register.receiver.CopyFrom(stranger)
    allocate.receiver.CopyFrom(stranger)
    ends: dict[str, Any] = {"receiver": stranger, "sender": prefill, "registration": register.registration}
    for message in (
        bootstrap_pb2.RenewLeaseRequest(instance=prefill),
        bootstrap_pb2.UnregisterRankRequest(instance=prefill),
        bootstrap_pb2.RegisterDpRankRequest(bootstrap_room=1, dp_rank=0),
        page_allocation_pb2.HoldReceiverRequest(**ends),
        page_allocation_pb2.SendCanaryRequest(**ends, page=0, seed=bytes(range(16))),
        transfer_status_pb2.GetTransferRequest(bootstrap_room=901),
        abort_pb2.AbortRoomRequest(bootstrap_room=1, message="stop"),
        submit.request,
    ):
        genuine[message.DESCRIPTOR.full_name] = message


@asynccontextmanager
async def attacked() -> AsyncIterator[Attacked]:
    """Serves a room before and after, and leaves nothing behind."""
    pair = Pair()
    genuine = record(pair)
    async with running(pair):
        await pair.serve(901)
        complete(genuine, pair)
        target = Attacked(pair, dict(genuine))
        await target.start()
        await target.suffer(genuine_call("prefill", REGISTER))  # as a stranger with memory of its own
        try:
            yield target
        finally:
            await target.stop()
        await target.end_what_is_left()
        await pair.serve(902)


@settings(
    max_examples=25,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(calls=st.lists(hostile_calls(), min_size=20, max_size=40))
async def test_no_message_hurts_anybody_but_its_sender(calls: list[HostileCall]) -> None:
    async with attacked() as target:
        for call in calls:
            await target.suffer(call)
