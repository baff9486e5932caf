"""Settings of the engine processes as frozen values, and where they come from: default <- PD_* environment <- flag."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pd_common import addresses
from pd_common.errors import InvalidRequest
from pd_common.types import BootstrapAddress, RankPosition

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

_LEAST_S = {
    "drain_timeout_s": 0.0,
    "room_retention_s": 5.0,  # the longest that a call about a room, an offer say, is on its way
    "bootstrap_timeout_s": 3.0,  # the time in which a dead peer is noticed
    "waiting_timeout_s": 3.0,
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and how much of the machine it may take."""

    model: Path
    dtype: str
    device: str
    threads: int | None
    page_size: int
    kv_cache_tokens: int
    context_length: int | None

    @property
    def num_pages(self) -> int:
        """Pages in the pool."""
        return -(-self.kv_cache_tokens // self.page_size)


@dataclass(frozen=True, slots=True)
class ListenConfig:
    """Where the process listens, and the name under which others reach it.

    Raises:
        InvalidRequest: as `addresses.advertised_host`: nobody could.

    """

    host: str
    port: int
    advertise_host: str | None
    advertise_interface: str | None

    def __post_init__(self) -> None:
        _ = self.advertised_host  # refused now, not when a model has been loaded

    def advertised(self, bound_port: int) -> str:
        """host:port for others."""
        return BootstrapAddress(self.advertised_host, bound_port).target

    @property
    def advertised_host(self) -> str:
        """Name or address by which others reach this process."""
        return addresses.advertised_host(self.host, self.advertise_host, self.advertise_interface)


@dataclass(frozen=True, slots=True)
class RankConfig:
    """Where a prefill process stands among those that share one Bootstrap directory.

    Raises:
        InvalidRequest: there is no such place.

    """

    bootstrap: BootstrapAddress | None
    """None for this process's own."""
    dp_rank: int
    dp_size: int

    def __post_init__(self) -> None:
        if self.dp_rank >= self.dp_size:
            raise InvalidRequest(
                f"--dp-rank {self.dp_rank} is not one of --dp-size {self.dp_size}: they count from 0", field="dp_rank"
            )

    @property
    def position(self) -> RankPosition:
        """In the grid of ranks."""
        return RankPosition(self.dp_rank, self.dp_size)


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
    """How rooms end, in seconds: what each wait may take, and how long ended rooms stay on record.

    Raises:
        InvalidRequest: endless, or too short: rooms would be given up, or forgotten, while a word about them is still
            on its way or can be repeated.

    """

    drain_timeout_s: float
    room_retention_s: float
    bootstrap_timeout_s: float
    waiting_timeout_s: float

    def __post_init__(self) -> None:
        _require_times(self)


@dataclass(frozen=True, slots=True)
class DrainConfig:
    """How long a process goes on after it was told to end.

    Raises:
        InvalidRequest: endless, or less than nothing.

    """

    drain_timeout_s: float

    def __post_init__(self) -> None:
        _require_times(self)


def _require_times(settings: RoomConfig | DrainConfig) -> None:
    for field in fields(settings):
        seconds: float = getattr(settings, field.name)
        least = _LEAST_S[field.name]
        if not least <= seconds < math.inf:
            name = f"--{field.name.removesuffix('_s').replace('_', '-')}"
            raise InvalidRequest(
                f"{name} must be at least {least:g} seconds and end some day, not {seconds:g}", field=field.name
            )


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """Who may talk to this process: files of certificates (PEM) and of ticket keys, all of them or none."""

    tls_cert: Path | None
    tls_key: Path | None
    tls_ca: Path | None
    tls_verify_clients: bool
    ticket_key_file: Path | None


@dataclass(frozen=True, slots=True)
class LogConfig:
    """What is logged, and how it is written."""

    log_level: str
    log_format: str
    log_prompts: bool


def pick(cls: type[_C], options: Mapping[str, Any]) -> _C:
    """The settings of one kind out of all options, by field name."""
    return cls(**{field.name: options[field.name] for field in fields(cls)})


class _Address(click.ParamType[BootstrapAddress]):
    """HOST:PORT; an IPv6 host stands in brackets."""

    name = "HOST:PORT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> BootstrapAddress:
        if isinstance(value, BootstrapAddress):
            return value
        try:
            return addresses.parse_address(str(value), self.name)
        except InvalidRequest as error:
            self.fail(error.message, param, ctx)


ADDRESS = _Address()


def model_options(command: _F) -> _F:
    """--model and what goes with it."""
    return apply_options(
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
            "--context-length", type=click.IntRange(min=2),
            help="Most tokens of prompt and answer together.  [default: what the model and the KV pool can take]",
        ),
    )  # fmt: skip


def listen_options(port: int) -> Callable[[_F], _F]:
    """--host, --port, --advertise-host, --advertise-interface."""

    def decorate(command: _F) -> _F:
        return apply_options(
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
            click.option(
                "--advertise-interface", metavar="NAME",
                help="Network interface, as in eth0, by whose address others reach this process.",
            ),
        )  # fmt: skip

    return decorate


def rank_options(command: _F) -> _F:
    """Where a prefill process stands among those that share one Bootstrap directory."""
    return apply_options(
        command,
        click.option(
            "--bootstrap", type=ADDRESS, help="Directory to register with.  [default: this process's own]",
        ),
        click.option(
            "--dp-rank", default=0, type=click.IntRange(min=0), help="Data-parallel rank of this process, from 0.",
        ),
        click.option(
            "--dp-size", default=1, type=click.IntRange(min=1),
            help="Data-parallel ranks that share the directory.",
        ),
    )  # fmt: skip


def transport_options(command: _F) -> _F:
    """What carries the pages."""
    return apply_options(
        command,
        click.option(
            "--transfer-backend", "--disaggregation-transfer-backend", "transfer_backend", default="ucx",
            type=click.Choice(["ucx", "nixl", "mooncake", "fake"]),
            help="Library that moves pages; fake moves none, for measuring handshakes; its answers mean nothing.",
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
    """What is logged, and how it is written."""
    return apply_options(
        command,
        click.option(
            "--log-level", default="info", type=click.Choice(["debug", "info", "warning", "error"]),
            help="Least severe line to log: debug has each state of a room, info each end, warning what has to be "
            "looked into.",
        ),
        click.option(
            "--log-format", default="text", type=click.Choice(["text", "json"]),
            help="How lines are written, on standard error: for people, or as one JSON object each.",
        ),
        click.option(
            "--log-prompts/--no-log-prompts", default=False,
            help="Log every prompt too; without it no line holds any part of one.",
        ),
    )  # fmt: skip


def metrics_options(command: _F) -> _F:
    """Where Prometheus finds this process."""
    return apply_options(
        command,
        click.option(
            "--metrics-port", type=click.IntRange(0, 65535),
            help="HTTP port that serves /metrics on --host; 0 takes a free one and logs it.  [default: none]",
        ),
    )  # fmt: skip


def probe_options(command: _F) -> _F:
    """Where probes that hold no certificate find this process's health."""
    return apply_options(
        command,
        click.option(
            "--health-port", type=click.IntRange(0, 65535),
            help="gRPC port on --host with standard health and nothing else, never TLS, for probes that hold no "
            "certificate; 0 takes a free one and logs it.  [default: none]",
        ),
    )  # fmt: skip


def drain_options(command: _F) -> _F:
    """How long a process goes on after it was told to end."""
    return apply_options(
        command,
        click.option(
            "--drain-timeout", "drain_timeout_s", default=30.0, type=float, envvar="PD_DRAIN_TIMEOUT",
            help="Seconds that running requests get to end after SIGTERM.",
        ),
    )  # fmt: skip


def room_options(command: _F) -> _F:
    """How rooms end."""
    return apply_options(
        command,
        drain_options,
        click.option(
            "--room-retention", "room_retention_s", default=300.0, type=float, envvar="PD_ROOM_RETENTION",
            help="Seconds for which an ended room can still be inspected, and its number cannot be used again.",
        ),
        click.option(
            "--bootstrap-timeout", "--disaggregation-bootstrap-timeout", "bootstrap_timeout_s", default=300.0,
            type=float, envvar=["PD_BOOTSTRAP_TIMEOUT", "PD_DISAGGREGATION_BOOTSTRAP_TIMEOUT"],
            help="Seconds in which the two sides of a room must have met and set memory aside.",
        ),
        click.option(
            "--waiting-timeout", "--disaggregation-waiting-timeout", "waiting_timeout_s", default=300.0,
            type=float, envvar=["PD_WAITING_TIMEOUT", "PD_DISAGGREGATION_WAITING_TIMEOUT"],
            help="Seconds that a room may wait for the next chunk once pages are offered; each chunk begins them anew.",
        ),
    )  # fmt: skip


def security_options(command: _F) -> _F:
    """Who may talk to this process."""
    path = click.Path(path_type=Path)
    return apply_options(
        command,
        click.option("--tls-cert", type=path, help="This process's certificates, PEM: turns TLS on.  [default: none]"),
        click.option("--tls-key", type=path, help="The certificate's private key, PEM.  [default: none]"),
        click.option("--tls-ca", type=path, help="Certificates of who may sign for others, PEM.  [default: none]"),
        click.option(
            "--tls-verify-clients/--no-tls-verify-clients", default=True,
            help="With TLS: whether a caller needs a certificate, which also says what it may call.",
        ),
        click.option(
            "--ticket-key-file", type=path,
            help="Keys that sign and check tickets of rooms, one a line; the first signs.  [default: none]",
        ),
    )  # fmt: skip


def apply_options(command: _F, *options: Callable[[_F], _F]) -> _F:
    """The command with these options, in this order."""
    for option in reversed(options):
        command = option(command)
    return command
