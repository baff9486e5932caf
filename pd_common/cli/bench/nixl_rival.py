"""NIXL through its maker's Python API, as published or with a progress thread that sleeps between two looks."""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import os
import time
from typing import Any

import numpy as np

from pd_common.cli.bench.ends import NIXL_TUNED, EndSettings, Moved, Regions
from pd_common.errors import TransferFailed, TransportUnavailable
from pd_common.transport.base import Puts

_PACKAGE = "nixl_cu12"
_POLL_S = 0.0002
_TUNED_DELAY_US = 1000


def _agent(settings: EndSettings, side: str, regions: Regions) -> Any:
    """An agent with the UCX backend that knows the regions.

    Raises:
        TransportUnavailable: NIXL is not installed.

    """
    try:
        api = importlib.import_module(f"{_PACKAGE}._api")
    except ImportError as error:
        raise TransportUnavailable(f"nixl-cu12 cannot be imported: {error}") from error
    if settings.contender == NIXL_TUNED:
        _slow_progress_thread()
    agent = api.nixl_agent(f"bench-{side}-{os.getpid()}", api.nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(region.base, region.length, 0, "") for region in regions], "DRAM")
    return agent


def _slow_progress_thread() -> None:
    """Lets agents of this process be made with a delay: the Python API sets 0 itself and offers no option for it."""
    bindings: Any = importlib.import_module(f"{_PACKAGE}._bindings")

    class Delayed(bindings.nixlAgentConfig):  # type: ignore[misc]
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, _TUNED_DELAY_US if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = Delayed


class NixlSender:
    """One agent that writes to one other agent; looks for the end of a write five times a millisecond."""

    carrier = "ucx"
    """Which of UCX's transports is not told."""

    def __init__(self, settings: EndSettings, regions: Regions) -> None:
        self._agent = _agent(settings, "sender", regions)
        self._peer = ""
        self.library = f"nixl-cu12 {importlib.metadata.version('nixl-cu12')}"

    async def connect(self, address: bytes) -> None:
        self._peer = self._agent.add_remote_agent(address)

    async def write(self, puts: Puts) -> Moved:
        started = time.perf_counter()
        device = np.zeros_like(puts.lengths)
        local = self._agent.get_xfer_descs(np.stack((puts.local, puts.lengths, device), axis=1), "DRAM")
        remote = self._agent.get_xfer_descs(np.stack((puts.remote, puts.lengths, device), axis=1), "DRAM")
        handle = self._agent.initialize_xfer("WRITE", local, remote, self._peer)
        state = self._agent.transfer(handle)
        posted = time.perf_counter()
        while state == "PROC":
            await asyncio.sleep(_POLL_S)
            state = self._agent.check_xfer_state(handle)
        ended = time.perf_counter()
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise TransferFailed(f"NIXL ended a transfer with {state}")
        return Moved(posted - started, ended - started)


class NixlReceiver:
    """One agent whose metadata is the address."""

    def __init__(self, settings: EndSettings, regions: Regions) -> None:
        self._agent = _agent(settings, "receiver", regions)
        self.address: bytes = self._agent.get_agent_metadata()

    async def expect(self, puts: Puts) -> None:
        """Nothing: writes are one-sided."""
