"""The five ways in which a sender and a receiver can be put together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from pd_common.transport.base import Transport
from pd_common.transport.loopback import LoopbackNetwork, LoopbackTransport
from pd_common.transport.ucx.transport import UcxTransport
from tests.transport.pairs import CARRIERS, LocalReceiver, Pair, ProcessReceiver


@pytest.fixture(autouse=True)
def _no_ucx_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    monkeypatch.setenv("UCX_LOG_LEVEL", "fatal")


@pytest.fixture(scope="module")
def peers() -> Iterator[dict[str, ProcessReceiver]]:
    """One process per carrier, shared by the tests of a module that leave it alive."""
    started: dict[str, ProcessReceiver] = {}
    yield started
    for peer in started.values():
        peer.kill()


@pytest.fixture(params=["loopback", "ucx-cma", "ucx-tcp", "process-cma", "process-tcp"])
async def pair(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, peers: dict[str, ProcessReceiver]
) -> AsyncIterator[Pair]:
    kind, _, carrier = str(request.param).partition("-")
    transports: list[Transport] = []
    if kind == "loopback":
        network = LoopbackNetwork()
        transports = [LoopbackTransport(network), LoopbackTransport(network)]
        made = Pair(transports[0], LocalReceiver(transports[1]))
    else:
        for name, value in CARRIERS[carrier].items():
            monkeypatch.setenv(name, value)
        transports.append(UcxTransport())
        if kind == "ucx":
            transports.append(UcxTransport())
            made = Pair(transports[0], LocalReceiver(transports[1]))
        else:
            peer = peers.get(carrier) or ProcessReceiver(CARRIERS[carrier])
            peers[carrier] = peer
            made = Pair(transports[0], peer)
    yield made
    for transport in transports:
        await transport.close()
