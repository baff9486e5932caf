"""pdctl health: whether one process is ready, or alive, as an exit code. Loads little: probes run it all the time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pd_common import config
from pd_common.cli.certificate import certificate_options, open_certificate
from pd_common.control.status import why_unreached
from pd_common.control.tls import Tls, name_of
from pd_common.errors import InvalidRequest
from pd_common.types import BootstrapAddress, Role

_Status = health_pb2.HealthCheckResponse.ServingStatus


@click.command(context_settings=config.CONTEXT)
@click.argument("process", metavar="HOST:PORT", type=config.ADDRESS)
@click.option("--service", default="", help="liveness: whether it can go on; without it: whether it takes requests.")
@click.option(
    "--timeout", "timeout_s", default=2.0, type=click.FloatRange(min=0, min_open=True),
    help="Seconds in which it must answer.",
)  # fmt: skip
@click.option(
    "--plaintext", is_flag=True, help="No TLS, whatever certificate the environment names: for a --health-port."
)
@certificate_options
def health(*, process: BootstrapAddress, service: str, timeout_s: float, plaintext: bool, **certificate: Any) -> None:
    """Ask one process whether it is ready.

    Exit code 0 when it says SERVING; 1, and a line that says why, when it says something else or nothing.
    """
    try:
        tls = None if plaintext else open_certificate(certificate)
    except InvalidRequest as error:
        raise click.ClickException(error.message) from error
    status = _Status.Name(_ask(process.target, service, time.monotonic() + timeout_s, tls))
    click.echo(status)
    if status != "SERVING":
        raise click.exceptions.Exit(1)


def _ask(address: str, service: str, deadline_s: float, tls: Tls | None) -> int:
    """The status it says. Under TLS a process answers only who knows its role: so all are tried."""
    trouble = grpc.StatusCode.UNKNOWN, ""
    for channel in _channels(address, tls):
        with channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service=service)
            try:
                status: int = stub.Check(request, timeout=max(deadline_s - time.monotonic(), 0.0)).status
                return status
            except grpc.RpcError as error:
                trouble = error.code(), error.details() or ""
        if trouble[0] is not grpc.StatusCode.UNAVAILABLE:
            break
    raise click.ClickException(_why(*trouble, address, service))


def _channels(address: str, tls: Tls | None) -> Iterator[grpc.Channel]:
    if tls is None:
        yield grpc.insecure_channel(address)
        return
    for role in Role:
        options = (("grpc.ssl_target_name_override", name_of(role)),)
        yield grpc.secure_channel(address, tls.channel_credentials(), options)


def _why(code: grpc.StatusCode, details: str, address: str, service: str) -> str:
    match code:
        case grpc.StatusCode.NOT_FOUND:
            return f"no such service at {address}: {service}"
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"nobody answers at {address} in time"
        case grpc.StatusCode.UNAVAILABLE:
            return f"nobody answers at {address}: {why_unreached(details)}"
        case _:
            return f"{address}: {code.name}: {details}"
