"""The ways in which a sender and a receiver can be put together."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator, Iterator

import pytest

from pd_common.errors import TransportUnavailable
from pd_common.transport.backends import open_transport
from pd_common.transport.base import Transport
from pd_common.transport.loopback import LoopbackNetwork, LoopbackTransport
from pd_common.transport.mooncake.library import load_library
from tests.transport.pairs import KINDS, MODULES, Kind, LocalReceiver, Pair, ProcessReceiver, transport_config


def foreign(backend: str) -> list[pytest.MarkDecorator]:
    """NIXL and Mooncake bring libraries of their own, which share no process with other tests."""
    return [getattr(pytest.mark, backend)] if backend in {"nixl", "mooncake"} else []


@pytest.fixture(autouse=True)
def _no_ucx_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    monkeypatch.setenv("UCX_LOG_LEVEL", "fatal")


@pytest.fixture(scope="module")
def peers() -> Iterator[dict[str, ProcessReceiver]]:
    """One process per kind, shared by the tests of a module that leave it alive."""
    started: dict[str, ProcessReceiver] = {}
    yield started
    for peer in started.values():
        peer.kill()


def skip_unless_importable(backend: str) -> None:
    """Skips where an optional extra is not installed."""
    if backend == "mooncake":
        try:
            load_library()
        except TransportUnavailable as missing:
            pytest.skip(missing.message)
    module = MODULES.get(backend)
    if module is not None and importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed: it comes with the extra `{backend}`")


def _two_transports(kind: Kind) -> list[Transport]:
    if kind.backend == "loopback":
        network = LoopbackNetwork()
        return [LoopbackTransport(network), LoopbackTransport(network)]
    return [open_transport(transport_config(kind.backend)) for _ in range(1 if kind.own_process else 2)]


@pytest.fixture(params=[pytest.param(name, marks=foreign(kind.backend)) for name, kind in KINDS.items()])
async def pair(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, peers: dict[str, ProcessReceiver]
) -> AsyncIterator[Pair]:
    name = str(request.param)
    kind = KINDS[name]
    skip_unless_importable(kind.backend)
    for variable, value in kind.environment.items():
        monkeypatch.setenv(variable, value)
    transports = _two_transports(kind)
    if not kind.own_process:
        yield Pair(transports[0], LocalReceiver(transports[1]))
    else:
        if name not in peers:
            peers[name] = ProcessReceiver(kind.environment, backend=kind.backend)
        yield Pair(transports[0], peers[name])
    for transport in transports:
        await transport.close()
