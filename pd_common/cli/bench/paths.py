"""The ways that bytes can take between two processes of one host, as environment and place of the two ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from pd_common.cli.bench.netns import veth_pair
from pd_common.errors import TransportUnavailable


class PathName(StrEnum):
    """As the command line calls them."""

    HOST = "host"
    TCP = "tcp"
    NETNS = "netns"


TITLES = {
    PathName.HOST: "one host, the library's own choice",
    PathName.TCP: "one host, tcp on loopback",
    PathName.NETNS: "two network namespaces, tcp over a veth pair",
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where one end runs: its address, the environment it gets, and the words that start its command there."""

    host: str = "127.0.0.1"
    environment: dict[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Path:
    """A way from a sender to a receiver."""

    name: PathName
    sender: Place
    receiver: Place


@dataclass(frozen=True, slots=True)
class Paths:
    """Those that are there, and why others are not."""

    open: tuple[Path, ...]
    skipped: dict[PathName, str]


@contextmanager
def open_paths(names: Sequence[PathName]) -> Iterator[Paths]:
    """Makes the namespaces that are needed, for as long as the block runs."""
    found: list[Path] = []
    skipped: dict[PathName, str] = {}
    with ExitStack() as stack:
        for name in names:
            try:
                found.append(_netns(stack) if name is PathName.NETNS else _plain(name))
            except TransportUnavailable as error:
                skipped[name] = error.message
        yield Paths(tuple(found), skipped)


def _plain(name: PathName) -> Path:
    place = _tcp_place("127.0.0.1", "lo") if name is PathName.TCP else Place()
    return Path(name, place, place)


def _netns(stack: ExitStack) -> Path:
    pair = stack.enter_context(veth_pair())
    near = _tcp_place(pair.near_host, pair.near_device)
    return Path(PathName.NETNS, near, _tcp_place(pair.far_host, pair.far_device, pair.far_prefix))


def _tcp_place(host: str, device: str, prefix: tuple[str, ...] = ()) -> Place:
    """Everything goes over tcp and this device: what UCX (also the one in NIXL) and Mooncake need to know for that."""
    environment = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": device, "MC_TCP_BIND_ADDRESS": host}
    return Place(host, environment, prefix)
