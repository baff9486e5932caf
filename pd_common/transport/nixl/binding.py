"""One NIXL agent and its calls as typed methods; the one place where NIXL's errors become ours.

An agent is used by one thread only: NIXL's own lock is off, and its endpoints vanish under a caller when a thread of
NIXL's finds the peer gone. That is why an agent that writes has no progress thread.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pd_common.errors import PdError, PeerLost, TransferFailed
from pd_common.transport.base import MemoryRegion
from pd_common.transport.nixl.library import NixlLibrary

_BACKEND = "UCX"
_PROGRESS_DELAY_US = 20_000
"""How long NIXL's progress thread sleeps when no event wakes it (it rounds up to milliseconds; 0 would spin)."""

Descriptors = NDArray[np.int64]
"""Rows of (address, bytes, device)."""


class NixlError(Exception):
    """A call to NIXL failed."""

    def __init__(self, message: str, *, disconnected: bool = False) -> None:
        super().__init__(message)
        self.disconnected = disconnected


def pd_error(error: NixlError) -> PdError:
    """What a failure means to those who know nothing of NIXL."""
    if error.disconnected:
        return PeerLost(f"the receiver is gone: {error}")
    return TransferFailed(f"NIXL failed: {error}")


class NixlAgent:
    """One agent with one UCX worker. `receives`: its own thread of NIXL lets writes come in, woken by events."""

    def __init__(self, library: NixlLibrary, parameters: Mapping[str, str], *, receives: bool) -> None:
        """Starts the agent, which takes about 20 ms. `parameters` are those of NIXL's UCX plugin.

        Raises:
            NixlError: UCX does not start.
        """
        self._nixl = library.binding
        self._failures: tuple[type[Exception], ...] = (RuntimeError, *_errors(self._nixl))
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = receives
        config.pthrDelay = _PROGRESS_DELAY_US
        self.name = secrets.token_hex(8)
        self._agent = self._call(self._nixl.nixlAgent, self.name, config)
        try:
            self._backends = [self._call(self._agent.createBackend, _BACKEND, dict(parameters))]
        except NixlError:
            self.close()
            raise

    def register(self, region: MemoryRegion) -> None:
        descriptors = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, np.array([[region.base, region.length, 0]]))
        self._call(self._agent.registerMem, descriptors, self._backends)

    def metadata(self) -> bytes:
        """How to reach this agent, and the keys of all that is registered so far."""
        return bytes(self._call(self._agent.getLocalMD))

    def connect(self, metadata: bytes) -> str:
        """The name of the peer that the metadata describes.

        Raises:
            NixlError: NIXL cannot make sense of the bytes, or has no transport that reaches the peer.
        """
        name = self._call(self._agent.loadRemoteMD, metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def prepare_write(self, peer: str, local: Descriptors, remote: Descriptors) -> int:
        """A handle for writes that all belong together; nothing moves yet."""
        lists = [self._nixl.nixlXferDList(self._nixl.DRAM_SEG, each) for each in (local, remote)]
        return int(self._call(self._agent.createXferReq, self._nixl.NIXL_WRITE, *lists, peer, "", self._backends))

    def post(self, handle: int) -> bool:
        """Starts the writes; whether all of them are visible remotely already."""
        return bool(self._call(self._agent.postXferReq, handle) == self._nixl.NIXL_SUCCESS)

    def is_done(self, handle: int) -> bool:
        """Lets everything move on; whether all writes of the handle are visible remotely."""
        return bool(self._call(self._agent.getXferStatus, handle) == self._nixl.NIXL_SUCCESS)

    def release(self, handle: int) -> None:
        self._call(self._agent.releaseXferReq, handle)

    def progress(self) -> None:
        """Lets everything move on, so that a lost peer is noticed."""
        self._call(self._agent.getNotifs, {}, self._backends)

    def close(self) -> None:
        """Ends every connection and lets go of all memory, threads and descriptors; harmless when that is done."""
        self._agent = None  # the binding has no call for it: the agent ends with its last reference

    def _call(self, function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except self._failures as error:
            del function  # else the error would keep the agent alive for as long as somebody keeps the error
            gone = isinstance(error, self._nixl.nixlRemoteDisconnectError)
            raise NixlError(str(error), disconnected=gone) from error


def _errors(binding: Any) -> list[type[Exception]]:
    found = [getattr(binding, name) for name in dir(binding) if name.endswith("Error")]
    return [each for each in found if isinstance(each, type) and issubclass(each, Exception)]
