"""A receiver's end for one peer, run by the progress thread: a worker whose destruction ends what comes in by it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from pd_common.errors import PdError
from pd_common.transport.base import MemoryRegion
from pd_common.transport.ucx.address import OfferedRegion, PortAddress
from pd_common.transport.ucx.interface import Context, MemoryHandle, Worker
from pd_common.transport.ucx.progress import ProgressThread, settled


class Inbound:
    """Invariant: the worker lives, and is driven, until `close`."""

    waiting = False

    def __init__(self, thread: ProgressThread, worker: Worker) -> None:
        self.worker = worker
        self._thread = thread
        self._open = True
        thread.add(self)

    @staticmethod
    def open(
        thread: ProgressThread,
        context: Context,
        regions: Sequence[MemoryRegion],
        memories: Sequence[MemoryHandle],
    ) -> tuple[Inbound, bytes]:
        """A new end and its packed address. `regions` begins with that for probes; `memories` hold them, in that order.

        Raises:
            UCXError: there is no worker or no key to be had.
        """
        offers = [OfferedRegion(region, memory.pack_rkey()) for region, memory in zip(regions, memories, strict=True)]
        inbound = Inbound(thread, context.create_worker())
        return inbound, PortAddress(inbound.worker.address(), offers[0], tuple(offers[1:])).pack()

    def drive(self) -> bool:
        return self.worker.progress()

    def abandon(self, error: PdError) -> None:
        """Nobody waits for anything here."""

    def close(self) -> Future[None]:
        """Destroys the worker; harmless when that is done."""
        if self._open:
            self._open = False
            self._thread.remove(self)
            self.worker.destroy()
        return settled()
