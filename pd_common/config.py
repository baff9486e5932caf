"""Settings of the engine processes as frozen values, and where they come from: default <- PD_* environment <- flag."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pd_common.errors import InvalidRequest
from pd_common.types import BootstrapAddress

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_F = TypeVar("_F", bound=Callable[..., Any])
_C = TypeVar("_C", bound="DataclassInstance")

CONTEXT = {
    "auto_envvar_prefix": "PD",
    "help_option_names": ["-h", "--help"],
    "max_content_width": 110,
    "show_default": True,
}
"""click settings of every command: `--page-size` is also `PD_PAGE_SIZE`."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and how much of the machine it may take."""

    model: Path
    dtype: str
    device: str
    threads: int | None
    page_size: int
    kv_cache_tokens: int
    max_running_requests: int

    @property
    def num_pages(self) -> int:
        """Pages in the pool."""
        return -(-self.kv_cache_tokens // self.page_size)


@dataclass(frozen=True, slots=True)
class ListenConfig:
    """Where the process listens, and the name under which others reach it."""

    host: str
    port: int
    advertise_host: str | None

    def advertised(self, bound_port: int) -> str:
        """host:port for others. Raises as `advertised_host`."""
        host = self.advertised_host
        return f"[{host}]:{bound_port}" if ":" in host else f"{host}:{bound_port}"

    @property
    def advertised_host(self) -> str:
        """What was asked for, else the bind address, else a guess from this host's name.

        Raises:
            InvalidRequest: the address would be a wildcard: nobody could connect to it.

        """
        host = self.advertise_host or (self.host if not _is_wildcard(self.host) else _own_address())
        host = host.strip("[]")
        if _is_wildcard(host):
            raise InvalidRequest(f"{host} cannot be advertised: give --advertise-host", field="advertise_host")
        return host


@dataclass(frozen=True, slots=True)
class TransportConfig:
    """What carries the pages."""

    transfer_backend: str
    ucx_library: str
    ucx_binding: str
    ib_device: str | None
    digest: bool


@dataclass(frozen=True, slots=True)
class RoomConfig:
    """How rooms end: seconds that running rooms get when the process stops, and that ended rooms stay on record."""

    drain_timeout_s: float
    room_retention_s: float


def pick(cls: type[_C], options: Mapping[str, Any]) -> _C:
    """The settings of one kind out of all options, by field name."""
    return cls(**{field.name: options[field.name] for field in fields(cls)})


_HOST_PORT = re.compile(r"(?:\[(?P<ipv6>[^\[\]\s]+)\]|(?P<name>[^:\[\]\s]+)):(?P<port>[0-9]{1,5})")


class _Address(click.ParamType[BootstrapAddress]):
    """HOST:PORT; an IPv6 host stands in brackets."""

    name = "HOST:PORT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> BootstrapAddress:
        if isinstance(value, BootstrapAddress):
            return value
        parts = _HOST_PORT.fullmatch(str(value))
        if parts is None or not 0 < int(parts["port"]) < 65536:
            self.fail(f"{value!r} is not HOST:PORT (an IPv6 host stands in brackets)", param, ctx)
        return BootstrapAddress(parts["ipv6"] or parts["name"], int(parts["port"]))


ADDRESS = _Address()


def model_options(command: _F) -> _F:
    """--model and what goes with it."""
    return _apply(
        command,
        click.option(
            "--model", "--model-path", "model", required=True, type=click.Path(path_type=Path),
            help="Hugging Face model directory: config.json, safetensors, tokenizer.",
        ),
        click.option("--dtype", default="auto", help="Type of weights and KV: auto, float32, bfloat16, float16."),
        click.option("--device", default="auto", help="Where to compute: auto, cpu, cuda, cuda:1 ..."),
        click.option(
            "--threads", type=click.IntRange(min=1),
            help="CPU threads of one engine step.  [default: PyTorch's choice]",
        ),
        click.option(
            "--page-size", default=16, type=click.IntRange(1, 65536),
            help="Tokens in one page of the KV pool. Prefill and decode must agree.",
        ),
        click.option(
            "--kv-cache-tokens", "--max-total-tokens", "kv_cache_tokens", default=65536, type=click.IntRange(min=1),
            help="Tokens that the KV pool holds.",
        ),
        click.option(
            "--max-running-requests", default=32, type=click.IntRange(min=1), help="Requests in one engine step.",
        ),
    )  # fmt: skip


def listen_options(port: int) -> Callable[[_F], _F]:
    """--host, --port, --advertise-host."""

    def decorate(command: _F) -> _F:
        return _apply(
            command,
            click.option("--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0 or :: for all."),
            click.option(
                "--port", "--disaggregation-bootstrap-port", "port", default=port, type=click.IntRange(0, 65535),
                help="gRPC port; 0 takes a free one and prints it.",
            ),
            click.option(
                "--advertise-host",
                help="Name or address by which others reach this process.  [default: --host, or this host's own]",
            ),
        )  # fmt: skip

    return decorate


def transport_options(command: _F) -> _F:
    """What carries the pages."""
    return _apply(
        command,
        click.option(
            "--transfer-backend", "--disaggregation-transfer-backend", "transfer_backend", default="ucx",
            type=click.Choice(["ucx", "nixl", "mooncake", "fake"]),
            help="Library that moves pages; fake moves none and serves only requests whose bootstrap host is 2.2.2.2.",
        ),
        click.option(
            "--ucx-library", default="wheel", help="Which UCX: wheel (libucx-cu12), system, or a path of libucp.so.",
        ),
        click.option(
            "--ucx-binding", default="own", type=click.Choice(["own", "ucx-py"]),
            help="How UCX is called: by this project's own binding, or by an installed ucx-py.",
        ),
        click.option(
            "--ib-device", "--disaggregation-ib-device", "ib_device",
            help="Network devices that carry pages, as in mlx5_0 or mlx5_0,mlx5_1.  [default: the library's choice]",
        ),
        click.option(
            "--digest/--no-digest", default=True, help="Check a digest of all pages before the first decoded token.",
        ),
    )  # fmt: skip


def log_options(command: _F) -> _F:
    """How much is logged."""
    levels = click.Choice(["debug", "info", "warning", "error"])
    return _apply(command, click.option("--log-level", default="info", type=levels, help="Least severe line to log."))


def metrics_options(command: _F) -> _F:
    """Where Prometheus finds this process."""
    return _apply(
        command,
        click.option(
            "--metrics-port", type=click.IntRange(0, 65535),
            help="HTTP port that serves /metrics on --host; 0 takes a free one and logs it.  [default: none]",
        ),
    )  # fmt: skip


def room_options(command: _F) -> _F:
    """How rooms end."""
    return _apply(
        command,
        click.option(
            "--drain-timeout", "drain_timeout_s", default=30.0, type=click.FloatRange(min=0), envvar="PD_DRAIN_TIMEOUT",
            help="Seconds that running requests get to end after SIGTERM.",
        ),
        click.option(
            "--room-retention", "room_retention_s", default=300.0, type=click.FloatRange(min=1),
            envvar="PD_ROOM_RETENTION",
            help="Seconds for which an ended room can still be inspected, and its number cannot be used again.",
        ),
    )  # fmt: skip


def _apply(command: _F, *options: Callable[[_F], _F]) -> _F:
    for option in reversed(options):
        command = option(command)
    return command


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def _own_address() -> str:
    """The address of this host's own name; no packet leaves the host for this."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError as error:
        raise InvalidRequest(
            "this host's own address is unknown: give --advertise-host", field="advertise_host"
        ) from error
