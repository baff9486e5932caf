from __future__ import annotations

import socket
from typing import Any

import ifaddr
import pytest

from pd_common import addresses
from pd_common.config import ListenConfig
from pd_common.errors import InvalidRequest

ANY = ("0.0.0.0", "::", "[::]", "")  # noqa: S104


def adapter(name: str, *ips: str) -> ifaddr.Adapter:
    found = [ifaddr.IP((ip, 0, 0) if ":" in ip else ip, 24, name) for ip in ips]
    return ifaddr.Adapter(name, name, found)


LOOPBACK = adapter("lo", "127.0.0.1", "::1")
ETH0 = adapter("eth0", "fe80::1", "fd00::7", "10.0.0.7")
ETH1 = adapter("eth1", "192.0.2.9")
IPV6_ONLY = adapter("eth2", "fe80::2", "fd00::8")
DOWN = adapter("eth3")
LINK_LOCAL = adapter("eth4", "169.254.1.1", "fe80::3")


class Host:
    """What this host is; `lookups` counts how often its name was looked up."""

    lookups = 0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.adapters = [LOOPBACK, ETH0, ETH1]
        self.named: list[str] | None = None
        monkeypatch.setattr(ifaddr, "get_adapters", lambda **_: self.adapters)
        monkeypatch.setattr(socket, "getaddrinfo", self._getaddrinfo)

    def _getaddrinfo(self, *_: Any, **__: Any) -> list[Any]:
        self.lookups += 1
        if self.named is None:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in self.named]


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


def advertised(bind: str, host: str | None = None, interface: str | None = None) -> str:
    return ListenConfig(bind, 0, host, interface).advertised(5)


@pytest.mark.parametrize(
    ("bind", "given", "interface", "expected"),
    [
        ("127.0.0.1", None, None, "127.0.0.1:5"),
        ("prefill-0.svc", None, None, "prefill-0.svc:5"),
        ("::1", None, None, "[::1]:5"),
        ("[fd00::7]", None, None, "[fd00::7]:5"),
        ("0.0.0.0", "10.9.9.9", None, "10.9.9.9:5"),  # noqa: S104
        ("0.0.0.0", "10.9.9.9", "eth1", "10.9.9.9:5"),  # noqa: S104
        ("10.0.0.7", "prefill-0.svc", None, "prefill-0.svc:5"),
        ("::", "[fd00::9]", None, "[fd00::9]:5"),
        ("::", "fd00::9", None, "[fd00::9]:5"),
        ("0.0.0.0", "127.0.0.1", None, "127.0.0.1:5"),  # noqa: S104
        ("0.0.0.0", None, "eth1", "192.0.2.9:5"),  # noqa: S104
        ("0.0.0.0", None, "eth0", "10.0.0.7:5"),  # noqa: S104
        ("fd00::7", None, "eth0", "[fd00::7]:5"),
        ("prefill-0.svc", None, "eth1", "192.0.2.9:5"),
    ],
)
def test_what_was_asked_for_wins_over_the_interface_and_that_over_where_the_process_listens(
    bind: str, given: str | None, interface: str | None, expected: str, host: Host
) -> None:
    assert advertised(bind, given, interface) == expected
    assert host.lookups == 0


@pytest.mark.parametrize("bind", ANY)
@pytest.mark.parametrize(
    ("adapters", "named", "expected"),
    [
        ([LOOPBACK, ETH0, ETH1], ["192.0.2.9"], "192.0.2.9:5"),
        ([LOOPBACK, ETH0, ETH1], ["fd00::7"], "[fd00::7]:5"),
        ([LOOPBACK, ETH0, ETH1], ["127.0.1.1"], "10.0.0.7:5"),
        ([LOOPBACK, ETH0, ETH1], ["198.51.100.1"], "10.0.0.7:5"),
        ([LOOPBACK, ETH0, ETH1], None, "10.0.0.7:5"),
        ([LOOPBACK, IPV6_ONLY, ETH1], None, "192.0.2.9:5"),
        ([LINK_LOCAL, DOWN, ETH1], ["169.254.1.1"], "192.0.2.9:5"),
        ([LOOPBACK, IPV6_ONLY], None, "[fd00::8]:5"),
    ],
)
def test_a_process_that_listens_everywhere_tells_an_address_of_this_host(
    bind: str, adapters: list[ifaddr.Adapter], named: list[str] | None, expected: str, host: Host
) -> None:
    """The one that its name stands for, unless that is not an address of an interface that others can reach."""
    host.adapters, host.named = adapters, named
    assert advertised(bind) == expected


def test_a_name_is_not_looked_up_where_there_is_no_choice(host: Host) -> None:
    host.adapters = [LOOPBACK, ETH1, LINK_LOCAL]
    assert advertised("::") == "192.0.2.9:5"
    assert host.lookups == 0


def test_loopback_and_link_local_are_never_guessed(host: Host) -> None:
    host.adapters, host.named = [LOOPBACK, LINK_LOCAL, DOWN], ["127.0.0.1"]
    with pytest.raises(InvalidRequest, match="give --advertise-host") as raised:
        advertised("0.0.0.0")  # noqa: S104
    assert raised.value.metadata == {"field": "advertise_host"}
    assert addresses.own_address() is None


@pytest.mark.parametrize("wildcard", ANY)
def test_a_wildcard_is_never_told(wildcard: str) -> None:
    with pytest.raises(InvalidRequest, match="give --advertise-host"):
        advertised("127.0.0.1", wildcard)


@pytest.mark.parametrize(
    ("bind", "interface", "said"),
    [
        ("0.0.0.0", "eth9", "there are lo, eth0, eth1, eth3"),  # noqa: S104
        ("0.0.0.0", "eth3", "has no address"),  # noqa: S104
        ("0.0.0.0", "lo", "has no address that others could reach"),  # noqa: S104
        ("127.0.0.1", "eth0", "--host 127.0.0.1 is not an address of network interface 'eth0': 10.0.0.7, fd00::7"),
    ],
)
def test_an_interface_that_cannot_be_told_is_refused_with_what_there_is(
    bind: str, interface: str, said: str, host: Host
) -> None:
    host.adapters = [LOOPBACK, ETH0, ETH1, DOWN]
    with pytest.raises(InvalidRequest, match=said) as raised:
        advertised(bind, None, interface)
    assert raised.value.metadata == {"field": "advertise_interface"}


def test_the_interfaces_of_a_real_host_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(InvalidRequest, match=r"there are .*\blo\b"):
        advertised("0.0.0.0", None, "no-such-interface")  # noqa: S104
