"""Names of Services inside the test cluster; stands for CoreDNS, of which Debian has no package.

Answers A for NAME.NAMESPACE.svc.cluster.local, as the API server has it at that moment: the ClusterIP, or every
address of the endpoints if the Service has none. IPv4 over UDP, nothing cached, no other names.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from pathlib import Path
from typing import Any

from tests.cluster.api import Api
from tests.cluster.settings import DOMAIN, NODE_ADDRESS, Layout

HEADER = struct.Struct("!6H")
RECORD = struct.Struct("!HHHIH4s")
A, INTERNET = 1, 1
RESPONSE, RECURSION_DESIRED = 0x8400, 0x0100  # an answer with authority; what was asked is said again
NO_ERROR, SERVER_FAILURE, NO_SUCH_NAME = 0, 2, 3
NAME_OF_THE_QUESTION = 0xC000 | HEADER.size


def main() -> None:
    api = Api(Layout(Path(sys.argv[1])))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listening:
        listening.bind((NODE_ADDRESS, 53))
        while True:
            query, sender = listening.recvfrom(512)
            listening.sendto(answer(query, api), sender)


def answer(query: bytes, api: Api) -> bytes:
    number, flags, *_ = HEADER.unpack_from(query)
    name, end = _name(query, HEADER.size)
    kind, _ = struct.unpack_from("!HH", query, end)
    try:
        addresses = _addresses(name, api)
        code = NO_SUCH_NAME if addresses is None else NO_ERROR
    except OSError as failed:
        print(f"{name}: {failed}", flush=True)
        addresses, code = None, SERVER_FAILURE
    records = [
        RECORD.pack(NAME_OF_THE_QUESTION, A, INTERNET, 0, 4, ipaddress.ip_address(address).packed)
        for address in (addresses or []) if kind == A
    ]  # fmt: skip
    header = HEADER.pack(number, RESPONSE | flags & RECURSION_DESIRED | code, 1, len(records), 0, 0)
    return header + query[HEADER.size : end + 4] + b"".join(records)


def _name(query: bytes, at: int) -> tuple[str, int]:
    """The name that starts here, and where it ends."""
    labels = []
    while length := query[at]:
        labels.append(query[at + 1 : at + 1 + length].decode("ascii"))
        at += 1 + length
    return ".".join(labels).lower(), at + 1


def _addresses(name: str, api: Api) -> list[str] | None:
    """None if there is no such Service. Endpoints that are not ready are none, unless the Service wants them to be."""
    service_name, _, rest = name.partition(".")
    namespace, _, domain = rest.partition(".")
    if domain != f"svc.{DOMAIN}":
        return None
    place = f"/api/v1/namespaces/{namespace}"
    service = api.get(f"{place}/services/{service_name}")
    if service is None:
        return None
    if service["spec"]["clusterIP"] != "None":
        return [service["spec"]["clusterIP"]]
    endpoints: dict[str, Any] = api.get(f"{place}/endpoints/{service_name}") or {}
    return [place["ip"] for subset in endpoints.get("subsets") or [] for place in subset.get("addresses") or []]


if __name__ == "__main__":
    main()
