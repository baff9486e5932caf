"""Where workers are: addresses that were given, and names that are looked up again and again."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

from pd_common.threads import CallThread
from pd_common.types import BootstrapAddress
from services.router.sources import DnsName

_log = logging.getLogger(__name__)

_AGAIN_S = 2.0
_SLOW_S = 5.0
"""A lookup that takes longer is said to be slow; it is waited for all the same."""

Resolve = Callable[[str, int], Sequence[BootstrapAddress]]
"""Every address of a name now, none for a name that stands for nothing; OSError when nobody can say. May block."""


def resolve(name: str, port: int) -> Sequence[BootstrapAddress]:
    """As this host looks up names. Of a name that has both it gives the IPv4 addresses: either would be one worker."""
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in {socket.EAI_NONAME, socket.EAI_NODATA}:
            return ()
        raise
    families = {family for family, *_ in found}
    wanted = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
    return sorted(
        {BootstrapAddress(str(address[0]), port) for family, *_, address in found if family == wanted},
        key=lambda address: address.host,
    )


class Lookup:
    """What one name stands for: as it was found last, whatever has become of the name service since."""

    def __init__(self, name: DnsName, resolve: Resolve, looked: asyncio.Event) -> None:
        """`looked` is set after every look, whatever it has brought."""
        self.name = name
        self.addresses: tuple[BootstrapAddress, ...] = ()
        self.trouble = f"{name.target} is being looked up"
        """What is the matter with it, for a person; empty when all is well."""
        self._resolve = resolve
        self._looked = looked

    async def run(self) -> None:
        """Ends only by cancellation."""
        thread = CallThread(f"lookup of {self.name.target}")  # its own: nobody waits for a name service that is slow
        try:
            while True:
                await self._look_up(thread)
                await asyncio.sleep(_AGAIN_S)
        finally:
            thread.end()

    async def _look_up(self, thread: CallThread) -> None:
        looking = asyncio.wrap_future(thread.submit(partial(self._resolve, self.name.host, self.name.port)))
        try:
            if not (await asyncio.wait((looking,), timeout=_SLOW_S))[0]:
                self._note(self.addresses, f"{self.name.target} cannot be looked up: no answer for {_SLOW_S:g} s")
            found = tuple(await looking)
        except OSError as error:
            self._note(self.addresses, f"{self.name.target} cannot be looked up: {error.strerror or error}")
        else:
            self._note(found, "" if found else f"{self.name.target} stands for no address")
        finally:
            looking.cancel()

    def _note(self, addresses: tuple[BootstrapAddress, ...], trouble: str) -> None:
        if trouble and trouble != self.trouble:  # said once, not at every attempt
            _log.warning("%s", trouble)
        self.addresses, self.trouble = addresses, trouble
        self._looked.set()


class Known(Protocol):
    """A worker, as far as its coming and going is concerned."""

    @property
    def address(self) -> BootstrapAddress: ...

    @property
    def is_live(self) -> bool: ...

    @property
    def open_rooms(self) -> int: ...


K = TypeVar("K", bound=Known)


class Changes(NamedTuple, Generic[K]):
    """What is to be done about the workers of a role."""

    new: tuple[BootstrapAddress, ...]
    over: tuple[K, ...]


def reconcile(known: Iterable[K], wanted: Iterable[BootstrapAddress]) -> Changes[K]:
    """Addresses without a worker, each once; and workers without an address that have ended as well.

    A name may drop a process that drains, or one that is only not ready: as long as it is connected, or has a room, it
    is none of the name's business.
    """
    workers, addresses = tuple(known), tuple(dict.fromkeys(wanted))
    at = {worker.address for worker in workers}
    return Changes(
        tuple(address for address in addresses if address not in at),
        tuple(
            worker
            for worker in workers
            if worker.address not in addresses and not worker.is_live and not worker.open_rooms
        ),
    )
