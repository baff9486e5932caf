"""The workers that there are now: one for each address, made, run and dropped as addresses come and go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any

from pd_common.aio import Tasks
from pd_common.control.connection import Dial
from pd_common.types import BootstrapAddress, Role
from services.router import discovery
from services.router.discovery import Lookup, Resolve, reconcile
from services.router.policy import LeastLoaded
from services.router.sources import DnsName, Source
from services.router.worker import Worker

_log = logging.getLogger(__name__)


class Workers:
    """Keeps the policy's workers to what their sources say, and their streams running; `changed` is for each worker."""

    def __init__(
        self,
        sources: Mapping[Role, Sequence[Source]],
        policy: LeastLoaded,
        changed: asyncio.Event,
        dial: Dial,
        resolve: Resolve = discovery.resolve,
    ) -> None:
        self._sources = sources
        self._policy = policy
        self._changed = changed
        self._dial = dial
        self._looked = asyncio.Event()
        names = dict.fromkeys(name for of_role in sources.values() for name in of_role if isinstance(name, DnsName))
        self._lookups = {name: Lookup(name, resolve, self._looked) for name in names}
        self._streams = Tasks()
        self._known: dict[Worker, asyncio.Task[None]] = {}
        self._troubles: tuple[str, ...] = ()

    def works(self) -> dict[str, Coroutine[Any, Any, None]]:
        """What must live as long as the process, by names for a person."""
        lookups = {f"lookup of {name.target}": lookup.run() for name, lookup in self._lookups.items()}
        return {**lookups, "workers": self._run(), "streams": self._streams.watch()}

    async def close(self) -> None:
        """Closes their connections, when nobody runs them any more."""
        for worker in self._known:
            await worker.stop()

    async def _run(self) -> None:
        """Ends only by cancellation, and all streams with it."""
        try:
            while True:
                self._looked.clear()
                await self._follow()
                await self._looked.wait()
        finally:
            await self._streams.close()

    async def _follow(self) -> None:
        """Once: what the sources say now becomes true."""
        changes = {role: reconcile(self._of(role), self._addresses(role)) for role in self._sources}
        over = [(worker, self._known.pop(worker)) for of_role in changes.values() for worker in of_role.over]
        for role, of_role in changes.items():
            for address in of_role.new:
                worker = Worker(role, address, self._changed, self._dial)
                self._known[worker] = self._streams.start(f"stream of {worker}", worker.run())
        troubles = tuple(lookup.trouble for lookup in self._lookups.values() if lookup.trouble)
        if over or troubles != self._troubles or any(of_role.new for of_role in changes.values()):
            self._troubles = troubles
            self._policy.use(self._of(Role.PREFILL), self._of(Role.DECODE), troubles)
        for worker, stream in over:
            _log.info("%s is forgotten: it is gone, and no name stands for it any more", worker)
            await self._streams.end(stream)
            await worker.stop()

    def _of(self, role: Role) -> tuple[Worker, ...]:
        return tuple(worker for worker in self._known if worker.role is role)

    def _addresses(self, role: Role) -> Iterator[BootstrapAddress]:
        for source in self._sources[role]:
            yield from (source,) if isinstance(source, BootstrapAddress) else self._lookups[source].addresses
