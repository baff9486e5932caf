"""One gRPC server for every process: standard health, reflection, typed errors, and a drain on SIGTERM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from pd.v1 import (
    abort_pb2,
    abort_pb2_grpc,
    bootstrap_pb2,
    bootstrap_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    inspection_pb2,
    inspection_pb2_grpc,
    page_allocation_pb2,
    page_allocation_pb2_grpc,
    transfer_status_pb2,
    transfer_status_pb2_grpc,
)
from prometheus_client import Counter

from pd_common.control import health_port, ports
from pd_common.control.access import Access
from pd_common.control.guard import Guard
from pd_common.control.tickets import TicketKeys
from pd_common.control.tls import Tls
from pd_common.errors import Reason

MAX_MESSAGE_BYTES = 64 * 2**20
"""Holds a prompt of several million tokens, or as many page ids."""
MAX_CALLS = 16_384
"""At one time: more are refused with RESOURCE_EXHAUSTED. This also bounds who watches and who subscribes."""
MAX_CALLS_OF_CONNECTION = 4096
"""At one time: more wait at the caller. A router needs two for each room that starts or stops, and one stream."""

LIVENESS = "liveness"
"""Name for standard health checks: whether to start the process anew. Readiness is under the other names."""

KEEPALIVE = (
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1500),
    ("grpc.http2.ping_timeout_ms", 1500),  # its default, a minute, overrides the line above
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
"""A peer that does not answer at all is noticed in 2.5 s, also between calls."""

_SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),  # a second process on the same port is a mistake, not load balancing
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_concurrent_streams", MAX_CALLS_OF_CONNECTION),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    *KEEPALIVE,
)


class _Add(Protocol):
    def __call__(self, servicer: Any, server: grpc.aio.Server) -> None: ...


@dataclass(frozen=True, slots=True)
class Service:
    """A servicer with what is needed to add and to name it."""

    name: str
    add: _Add
    servicer: object


def bootstrap(servicer: bootstrap_pb2_grpc.BootstrapServicer) -> Service:
    return _service(bootstrap_pb2, "Bootstrap", bootstrap_pb2_grpc.add_BootstrapServicer_to_server, servicer)


def page_allocation(servicer: page_allocation_pb2_grpc.PageAllocationServicer) -> Service:
    add = page_allocation_pb2_grpc.add_PageAllocationServicer_to_server
    return _service(page_allocation_pb2, "PageAllocation", add, servicer)


def transfer_status(servicer: transfer_status_pb2_grpc.TransferStatusServicer) -> Service:
    add = transfer_status_pb2_grpc.add_TransferStatusServicer_to_server
    return _service(transfer_status_pb2, "TransferStatus", add, servicer)


def abort(servicer: abort_pb2_grpc.AbortServicer) -> Service:
    return _service(abort_pb2, "Abort", abort_pb2_grpc.add_AbortServicer_to_server, servicer)


def generation(servicer: generation_pb2_grpc.GenerationServicer) -> Service:
    return _service(generation_pb2, "Generation", generation_pb2_grpc.add_GenerationServicer_to_server, servicer)


def inspection(servicer: inspection_pb2_grpc.InspectionServicer) -> Service:
    return _service(inspection_pb2, "Inspection", inspection_pb2_grpc.add_InspectionServicer_to_server, servicer)


def _service(module: ModuleType, name: str, add: _Add, servicer: object) -> Service:
    return Service(module.DESCRIPTOR.services_by_name[name].full_name, add, servicer)


class ControlServer:
    """A gRPC server with standard health. Readiness is that of "" and of each service: NOT_SERVING until
    `set_serving(True)`. Liveness is that of LIVENESS: SERVING until `fail`, whatever peers, queues and drains do.
    """

    def __init__(self, services: Sequence[Service], tls: Tls | None = None, keys: TicketKeys | None = None) -> None:
        """Asks callers for a certificate of their role as `tls` says, and for tickets where there are `keys`."""
        self._tls = tls
        self.errors = Counter("pd_rpc_errors", "Calls answered with an error.", ["method", "reason"], registry=None)
        guard = Guard(Access(tls is not None and tls.verifies_clients, keys), self._count)
        self._server = grpc.aio.server(interceptors=[guard], options=_SERVER_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # missing in the stubs
        self._names = ["", *(service.name for service in services)]
        self._ready = self._withdrawn = False
        self._live = True
        self._telling = asyncio.Lock()
        for service in services:
            service.add(service.servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*self._names[1:], health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self, host: str, port: int, option: str = "port") -> int:
        """Listens; port 0 takes a free one. Gives the port. `option` has set it: the error when it is taken says so.

        Raises:
            InvalidRequest: the address cannot be bound.

        """
        await self.set_serving(False)
        bound = ports.bind_grpc(self._server, host, port, option, self._tls)
        await self._server.start()
        return bound

    @asynccontextmanager
    async def listening(
        self, host: str, port: int, probes_port: int | None = None, option: str = "port"
    ) -> AsyncIterator[int]:
        """As `start`; whatever ends the block, nobody is served after it. `stop` in the block ends calls gently.

        Health is answered to the end of the block, at `probes_port` as well if there is one: health_port.py.
        """
        bound = await self.start(host, port, option)
        try:
            async with health_port.answering(self._health, host, probes_port):
                yield bound
        finally:
            await self.stop(grace_s=0.0)

    def _count(self, method: str, reason: Reason) -> None:
        self.errors.labels(method.removeprefix("/"), reason.value).inc()

    @property
    def is_live(self) -> bool:
        """Every supervised part lives."""
        return self._live

    async def set_serving(self, serving: bool) -> None:
        """Whether new requests are welcome, as far as the caller knows."""
        self._ready = serving
        await self._tell()

    async def withdraw(self) -> None:
        """Not ready from now on, whatever is said later."""
        self._withdrawn = True
        await self._tell()

    async def fail(self) -> None:
        """Neither ready nor live from now on."""
        self._live = False
        await self.withdraw()

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, lets running ones end for `grace_s` seconds, then cancels them."""
        await self.withdraw()
        await self._server.stop(grace_s)

    async def _tell(self) -> None:
        """One at a time, so that the last word is the present state's."""
        async with self._telling:
            await self._health.set(LIVENESS, _status(self._live))
            for name in self._names:
                await self._health.set(name, _status(self._ready and not self._withdrawn))


def _status(good: bool) -> health_pb2.HealthCheckResponse.ServingStatus:
    return health_pb2.HealthCheckResponse.SERVING if good else health_pb2.HealthCheckResponse.NOT_SERVING
