"""Standard health on a port of its own, for probes that hold no certificate: a kubelet's gRPC probe knows no TLS."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pd_common.control import ports
from pd_common.control.rooms import Call
from pd_common.types import BootstrapAddress

_log = logging.getLogger(__name__)

_CHECKS = 64
"""At one time, each over as soon as the event loop gets to it."""

_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 1024),
    ("grpc.max_concurrent_streams", 8),
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.max_connection_idle_ms", 10_000),  # and no count: whoever held so many connections would keep probes out
)


@asynccontextmanager
async def answering(servicer: health_pb2_grpc.HealthServicer, host: str, port: int | None) -> AsyncIterator[None]:
    """Answers Check meanwhile, and nothing else: a Watch would last, and enough of them would keep probes out.

    Port 0 takes a free one and logs it; without a port nothing is served.

    Raises:
        InvalidRequest: the port cannot be bound.

    """
    if port is None:
        yield
        return

    async def check(data: bytes, context: Call) -> health_pb2.HealthCheckResponse:
        try:
            request = health_pb2.HealthCheckRequest.FromString(data)
        except DecodeError:  # read here: gRPC would log a traceback for whoever sends it
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "these bytes are no HealthCheckRequest")
        return await servicer.Check(request, context)

    server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=_CHECKS)
    handler = grpc.unary_unary_rpc_method_handler(check, None, health_pb2.HealthCheckResponse.SerializeToString)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(health.SERVICE_NAME, {"Check": handler}),))
    bound = ports.bind_grpc(server, host, port, "health_port")
    await server.start()
    _log.info("health on %s, without TLS", BootstrapAddress(host, bound).target)
    try:
        yield
    finally:
        await server.stop(grace=None)
