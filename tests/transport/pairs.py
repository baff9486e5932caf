"""A sender and a receiver of each kind, behind one face, for tests that any transport must pass."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pd_common.config import TransportConfig
from pd_common.transport.base import InboundPort, MemoryRegion, Puts, Transport

BUFFER_BYTES = 1 << 20
_ROOT = Path(__file__).parents[2]
CARRIERS: dict[str, dict[str, str]] = {"cma": {}, "tcp": {"UCX_TLS": "tcp,self"}}
"""Environment with which UCX carries by this transport on one host."""
MODULES = {"nixl": "nixl_cu12", "ucx-py": "ucp"}
"""What has to be importable for a backend that is an optional extra."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One way in which a sender and a receiver can be put together."""

    backend: str
    environment: dict[str, str] = field(default_factory=dict)
    own_process: bool = False
    """The receiver has a process of its own."""


KINDS = {
    "loopback": Kind("loopback"),
    "ucx-cma": Kind("ucx"),
    "ucx-tcp": Kind("ucx", CARRIERS["tcp"]),
    "process-cma": Kind("ucx", own_process=True),
    "process-tcp": Kind("ucx", CARRIERS["tcp"], own_process=True),
    "ucx-py-cma": Kind("ucx-py"),
    "ucx-py-tcp": Kind("ucx-py", CARRIERS["tcp"]),
    "process-ucx-py": Kind("ucx-py", own_process=True),
    "process-ucx-py-tcp": Kind("ucx-py", CARRIERS["tcp"], own_process=True),
    "mooncake": Kind("mooncake", {"MC_TCP_BIND_ADDRESS": "127.0.0.1"}),
    "process-mooncake": Kind("mooncake", {"MC_TCP_BIND_ADDRESS": "127.0.0.1"}, own_process=True),
    "nixl": Kind("nixl"),
    "nixl-tcp": Kind("nixl", CARRIERS["tcp"]),
    "process-nixl": Kind("nixl", own_process=True),
    "process-nixl-tcp": Kind("nixl", CARRIERS["tcp"], own_process=True),
}


def transport_config(backend: str) -> TransportConfig:
    """A backend with nothing else asked for; `ucx-py` is the backend ucx through that binding."""
    name, binding = ("ucx", backend) if backend == "ucx-py" else (backend, "own")
    return TransportConfig(transfer_backend=name, ucx_library="wheel", ucx_binding=binding, ib_device=None, digest=True)


class Memory:
    """A buffer of this process and its region."""

    def __init__(self, size_bytes: int = BUFFER_BYTES) -> None:
        self.bytes: NDArray[np.uint8] = np.zeros(size_bytes, dtype=np.uint8)

    @property
    def region(self) -> MemoryRegion:
        return MemoryRegion(self.bytes.ctypes.data, self.bytes.nbytes)

    @property
    def base(self) -> int:
        return self.region.base


class Receiver(Protocol):
    """One buffer, offered through any number of ports."""

    base: int

    async def listen(self) -> bytes: ...

    async def fence(self, address: bytes) -> None: ...

    async def read(self, offset: int, length: int) -> bytes: ...

    async def holds_when_flagged(self, flag_offset: int, value: int, data_offset: int, data_length: int) -> bool: ...


class LocalReceiver:
    """In this process, with a transport of its own."""

    def __init__(self, transport: Transport, size_bytes: int = BUFFER_BYTES) -> None:
        self.memory = Memory(size_bytes)
        self.base = self.memory.base
        self._transport = transport
        self._ports: dict[bytes, InboundPort] = {}
        transport.register(self.memory.region)

    async def listen(self) -> bytes:
        port = self._transport.listen([self.memory.region])
        self._ports[port.address] = port
        return port.address

    async def fence(self, address: bytes) -> None:
        await self._ports[address].fence()

    async def read(self, offset: int, length: int) -> bytes:
        return self.memory.bytes[offset : offset + length].tobytes()

    async def holds_when_flagged(self, flag_offset: int, value: int, data_offset: int, data_length: int) -> bool:
        while self.memory.bytes[flag_offset] != value:  # noqa: ASYNC110 - memory has no event
            await asyncio.sleep(0)
        return bool((self.memory.bytes[data_offset : data_offset + data_length] == value).all())


class ProcessReceiver:
    """In a process of its own, which can be stopped and killed."""

    def __init__(
        self,
        environment: dict[str, str],
        size_bytes: int = BUFFER_BYTES,
        backend: str = "ucx",
        run_by: Sequence[str] = (),
    ) -> None:
        self._process = subprocess.Popen(
            [*run_by, sys.executable, "-m", "tests.transport.peer_process", backend, str(size_bytes)],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self._ports: dict[bytes, int] = {}
        self.base = 0
        self.call("fill", value=0)

    def tell(self, call: str, **arguments: Any) -> None:
        """Sends a command and does not wait for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"call": call, **arguments}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        while (line := self._process.stdout.readline()).startswith("["):  # UCX's own log lines
            pass
        return json.loads(line)

    def call(self, call: str, **arguments: Any) -> Any:
        self.tell(call, **arguments)
        return self.answer()

    async def listen(self) -> bytes:
        self.call("fill", value=0)
        answer = self.call("listen")
        self.base = answer["base"]
        address = bytes.fromhex(answer["address"])
        self._ports[address] = answer["port"]
        return address

    async def fence(self, address: bytes) -> None:
        self.fence_and_checksum(address)

    def fence_and_checksum(self, address: bytes) -> int:
        return int(self.call("fence", port=self._ports[address]))

    async def read(self, offset: int, length: int) -> bytes:
        return bytes.fromhex(self.call("read", offset=offset, length=length))

    async def holds_when_flagged(self, flag_offset: int, value: int, data_offset: int, data_length: int) -> bool:
        arguments = {"flag_offset": flag_offset, "value": value, "data_offset": data_offset, "data_length": data_length}
        return bool(await asyncio.to_thread(self.call, "holds_when_flagged", **arguments))

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


class Pair:
    """A sender in this process and a receiver, not connected yet."""

    def __init__(self, sender: Transport, receiver: Receiver) -> None:
        self.sender = sender
        self.receiver = receiver
        self.source = Memory()
        self.source.bytes[:] = np.random.default_rng(1).integers(1, 256, BUFFER_BYTES, dtype=np.uint8)
        sender.register(self.source.region)

    def puts(self, *ranges: tuple[int, int, int]) -> Puts:
        """Ranges of (offset in the source, offset in the receiver's buffer, length)."""
        columns = np.array(ranges, dtype=np.int64).reshape(-1, 3).T
        return Puts(columns[0] + self.source.base, columns[1] + self.receiver.base, columns[2])
