"""Addresses of processes: host:port in words, and which address of this host others are told. Sends nothing."""

from __future__ import annotations

import ipaddress
import re
import socket

import ifaddr

from pd_common.errors import InvalidRequest
from pd_common.types import BootstrapAddress

_HOST_PORT = re.compile(r"(?:\[(?P<ipv6>[^\[\]\s]+)\]|(?P<name>[^:\[\]\s]+)):(?P<port>[0-9]{1,5})")

_IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


def parse_address(text: str, field: str) -> BootstrapAddress:
    """HOST:PORT; an IPv6 host stands in brackets.

    Raises:
        InvalidRequest: it is not that, names `field`.
    """
    parts = _HOST_PORT.fullmatch(text)
    if parts is None or not 0 < int(parts["port"]) < 65536:
        raise InvalidRequest(f"{text!r} is not HOST:PORT (an IPv6 host stands in brackets)", field=field)
    return BootstrapAddress(parts["ipv6"] or parts["name"], int(parts["port"]))


def is_wildcard(host: str) -> bool:
    """It means every address of a host, so nobody can connect to it."""
    address = _literal(host)
    return host == "" or (address is not None and address.is_unspecified)


def advertised_host(bind: str, host: str | None, interface: str | None) -> str:
    """What others are told: `host` if given, else the address of `interface` if given, else where the process listens.

    For a process that listens on every address, `own_address` is the last resort.

    Raises:
        InvalidRequest: nobody could connect to it, or there is nothing to tell; says what to give.
    """
    if host is None and interface is not None:
        return _of_interface(interface, bind)
    if host is None and not is_wildcard(bind):
        return _bare(bind)
    chosen = own_address() if host is None else _bare(host)
    if chosen is None:
        raise InvalidRequest(
            "this host has no address that others could reach: give --advertise-host", field="advertise_host"
        )
    if is_wildcard(chosen):
        raise InvalidRequest(f"{chosen!r} cannot be advertised: give --advertise-host", field="advertise_host")
    return chosen


def own_address() -> str | None:
    """A guess: the address of this host that its name stands for, else the first; IPv4 before IPv6.

    Never loopback or link-local: None when there is no other. The name is looked up only where there is a choice.
    """
    addresses = sorted((address for of_one in _interfaces().values() for address in of_one), key=_is_ipv6)
    if len(addresses) < 2:
        return addresses[0] if addresses else None
    named = _addresses_of_own_name()
    return next((address for address in addresses if address in named), addresses[0])


def _of_interface(name: str, bind: str) -> str:
    interfaces = _interfaces()
    if name not in interfaces:
        raise InvalidRequest(
            f"there is no network interface {name!r}, there are {', '.join(interfaces)}", field="advertise_interface"
        )
    addresses, listening = interfaces[name], _literal(bind)
    if not addresses:
        raise InvalidRequest(
            f"network interface {name!r} has no address that others could reach", field="advertise_interface"
        )
    if listening is None or listening.is_unspecified:
        return addresses[0]
    if str(listening) not in addresses:
        raise InvalidRequest(
            f"--host {bind} is not an address of network interface {name!r}: {', '.join(addresses)}",
            field="advertise_interface",
        )
    return str(listening)


def _interfaces() -> dict[str, tuple[str, ...]]:
    """The addresses by which others may reach this host, by interface, IPv4 first."""
    return {
        str(adapter.nice_name): tuple(
            sorted((address for ip in adapter.ips if (address := _reachable(ip)) is not None), key=_is_ipv6)
        )
        for adapter in ifaddr.get_adapters(include_unconfigured=True)
    }


def _reachable(ip: ifaddr.IP) -> str | None:
    address = ipaddress.ip_address(ip.ip if isinstance(ip.ip, str) else ip.ip[0])
    return None if address.is_loopback or address.is_link_local or address.is_unspecified else str(address)


def _addresses_of_own_name() -> set[str]:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:  # a name that stands for nothing is no hint
        return set()
    return {str(address[0]) for *_, address in found}


def _literal(host: str) -> _IpAddress | None:
    """None for a name."""
    try:
        return ipaddress.ip_address(_bare(host))
    except ValueError:
        return None


def _bare(host: str) -> str:
    return host.strip("[]")


def _is_ipv6(address: str) -> bool:
    return ":" in address
