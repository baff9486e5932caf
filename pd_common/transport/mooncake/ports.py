"""Which tcp ports an engine listens on, and how they are kept from ever being used again.

A peer that was cut off in the middle of a batch connects again to the same port number by itself, as soon as something
listens there, and goes on writing. Were that a later engine, it would take the rest in: it knows the same memory.
"""

from __future__ import annotations

import logging
import socket
import threading
from pathlib import Path

_log = logging.getLogger(__name__)

_LISTENING = "0A"

changing = threading.Lock()
"""Held while an engine of this process takes ports or gives them up."""


def listening_ports() -> frozenset[int]:
    """Every tcp port on which this process listens."""
    inodes = {link[len("socket:[") : -1] for link in _open_files() if link.startswith("socket:[")}
    ports = set()
    for table in ("tcp", "tcp6"):
        path = Path("/proc/self/net") / table
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            fields = line.split()
            if fields[3] == _LISTENING and fields[9] in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return frozenset(ports)


def hold(ports: frozenset[int]) -> None:
    """Takes ports out of use for as long as this process lives; connecting to them is refused. One socket each."""
    for port in ports:
        taken = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
        try:
            if taken.family is socket.AF_INET6:
                taken.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have just ended are no bar
            taken.bind(("", port))
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            taken.listen(1)
            taken.shutdown(socket.SHUT_RDWR)  # still bound, and closed to everybody
        except OSError as error:
            taken.close()
            _log.info("port %d is in use elsewhere already: %s", port, error)
        else:
            taken.detach()  # nobody closes it


def _open_files() -> list[str]:
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(entry.readlink()))
        except OSError:  # closed since it was listed
            continue
    return links
