"""What the transport needs of a UCX binding, and how UCX's failures become this project's.

Two bindings fit: `binding` (our own, through cffi) and `ucx_py` (on the retired package of that name). The names are
ucx-py's. No object here is shared between threads, and each is released by its owner in the reverse order of making.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from pd_common.errors import PdError, PeerLost, TransferFailed
from pd_common.transport.ucx.library import UCXLibrary
from pd_common.transport.ucx.sgl import GatheredPuts

OK: Final = 0
_UNREACHABLE, _TIMED_OUT, _NOT_CONNECTED, _CONNECTION_RESET, _ENDPOINT_TIMEOUT = -6, -20, -24, -25, -80
GONE: Final = frozenset({_UNREACHABLE, _TIMED_OUT, _NOT_CONNECTED, _CONNECTION_RESET, _ENDPOINT_TIMEOUT})
_RESOURCE = re.compile(r"flags \S+ ([\w-]+)/(\S+)")
_LANE = re.compile(r"\b([a-z][\w-]*)/(\S+)")  # not MB/s
UNKNOWN_CARRIER: Final = "unknown"


class UCXError(Exception):
    """A UCX call failed; `status` is its ucs_status_t."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(f"{message} (UCX status {status})")
        self.status = status


def pd_error(error: UCXError) -> PdError:
    """The one place where UCX's failures become this project's."""
    kind = PeerLost if error.status in GONE else TransferFailed
    return kind(f"UCX: {error}", ucx_status=error.status)


@dataclass(frozen=True, slots=True)
class Resource:
    """A transport on a device, for example `rc_mlx5` on `mlx5_0:1`, `tcp` on `eth0` or `cma` on `memory`."""

    transport: str
    device: str


def resources_in(printed: str) -> tuple[Resource, ...]:
    """The resources that UCX lists when it prints a context."""
    return tuple(Resource(transport, device) for transport, device in _RESOURCE.findall(printed))


def carrier_in(described: str) -> str:
    """Who carries a request, from UCX's words for it: `cma`, `tcp/eth0`, or `tcp/eth0+tcp/eth1` over two rails.

    The words are for example `... zero-copy 52% on tcp/eth0 and 48% on tcp/eth1 22.3 MB/s 28.3 us`.
    """
    lanes = [
        transport if device == "memory" else f"{transport}/{device}" for transport, device in _LANE.findall(described)
    ]
    return "+".join(dict.fromkeys(lanes)) or UNKNOWN_CARRIER


class MemoryHandle(Protocol):
    """One registered range of this process's memory."""

    put_params: Any
    """What a put out of this range passes to `put_nbx`."""
    traced_put_params: Any
    """The same for a put whose request can be described while it lasts, where the binding can do that."""

    def pack_rkey(self) -> bytes:
        """The key that a peer needs in order to write here."""

    def unmap(self) -> None:
        """Ends the registration."""


class Rkey(Protocol):
    """A peer's range as one endpoint may write it; `handle` is what `put_nbx` takes."""

    handle: Any

    def destroy(self) -> None:
        """Must come before the endpoint is closed for good."""


class Endpoint(Protocol):
    """The way to one peer's worker. Requests are the binding's own; a false one is done already."""

    @property
    def failure(self) -> UCXError | None:
        """Why nothing may be posted any more."""

    def unpack_rkey(self, packed: bytes) -> Rkey:
        """Makes a peer's key usable here."""

    def put_nbx(self, puts: Iterable[tuple[int, int, int, Any, Any]], requests: deque[Any]) -> None:
        """Posts puts of (local address, length, remote address, rkey handle, put_params); keeps what is not done."""

    def put_gathered(self, puts: GatheredPuts, requests: deque[Any]) -> None:
        """Posts them in one call, which must have been found to work; keeps its request. `puts` must outlive that."""

    def reap(self, requests: deque[Any]) -> UCXError | None:
        """Frees finished requests from the front, up to the first that is not; the first failure among them."""

    def take(self, request: Any) -> int | None:
        """The status of a flush or a close, which is freed with it; None while it is in progress."""

    def flush_nbx(self) -> Any:
        """Starts a flush: when it is done, everything posted before is visible remotely."""

    def close_nbx(self) -> Any:
        """Starts a forced close: outstanding requests finish as cancelled."""

    def error(self, status: int, doing: str) -> UCXError:
        """A failure in UCX's words."""


class Worker(Protocol):
    """One communication instance: what is destroyed together with it can neither send nor receive any more."""

    event_fd: int

    def address(self) -> bytes:
        """What a peer's `create_endpoint` needs."""

    def describe(self, request: Any) -> str:
        """UCX's own words for how it carries a request that is not freed yet; empty when the binding cannot tell."""

    def progress(self) -> bool:
        """Moves everything of this worker on, without waiting; False when there was nothing to do."""

    def arm(self) -> bool:
        """Whether `event_fd` will tell of the next event; False when there is one already."""

    def create_endpoint(self, address: bytes) -> Endpoint:
        """Starts to connect to a worker's address."""

    def destroy(self) -> None:
        """Ends everything that goes through this worker."""


class Context(Protocol):
    """One UCX instance; everything else is made from it and must be gone before `close`."""

    gathers: bool
    """Whether its endpoints have `put_gathered`."""

    @property
    def resources(self) -> tuple[Resource, ...]:
        """The transports and devices that this process may use."""

    def map(self, base: int, length: int) -> MemoryHandle:
        """Registers `length` bytes from address `base`, of host or GPU memory."""

    def create_worker(self) -> Worker: ...

    def close(self) -> None:
        """Ends UCX in this process."""


class Binding(Protocol):
    """Opens UCX with options of `ucp_config_modify`."""

    def __call__(self, library: UCXLibrary, options: Mapping[str, str]) -> Context:
        """A context for one-sided writes with wake-up.

        Raises:
            UCXError: UCX does not start.
            TransportUnavailable: the package behind the binding is not installed.
        """
