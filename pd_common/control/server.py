"""One gRPC server for every process: standard health, reflection, typed errors, and a drain on SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Sequence
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
    page_allocation_pb2,
    page_allocation_pb2_grpc,
    transfer_status_pb2,
    transfer_status_pb2_grpc,
)

from pd_common.control.status import ErrorInterceptor
from pd_common.errors import InvalidRequest

_log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 * 2**20
"""Holds a prompt of several million tokens, or as many page ids."""

KEEPALIVE = (
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
"""A peer that does not answer at all is noticed in 4 s at the most, also between calls."""

_SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),  # a second process on the same port is a mistake, not load balancing
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
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


def _service(module: ModuleType, name: str, add: _Add, servicer: object) -> Service:
    return Service(module.DESCRIPTOR.services_by_name[name].full_name, add, servicer)


class ControlServer:
    """A gRPC server that is NOT_SERVING until `set_serving(True)`, overall (service "") and for each service."""

    def __init__(self, services: Sequence[Service]) -> None:
        self._server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=_SERVER_OPTIONS)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # missing in the stubs
        self._names = ["", *(service.name for service in services)]
        for service in services:
            service.add(service.servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*self._names[1:], health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self, host: str, port: int) -> int:
        """Listens; port 0 takes a free one. Gives the port.

        Raises:
            InvalidRequest: the address cannot be bound.

        """
        await self.set_serving(False)
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            bound = self._server.add_insecure_port(target)
        except RuntimeError as error:
            raise InvalidRequest(
                f"cannot listen on {target}: is the port in use, and does the host belong to this machine?",
                field="port",
            ) from error
        await self._server.start()
        return bound

    async def set_serving(self, serving: bool) -> None:
        """Answers standard health checks from now on."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, lets running ones end for `grace_s` seconds, then cancels them."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


async def until_signal() -> None:
    """Returns on SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
    _log.info("stopping")
