"""Bandwidth of the UCX transport between two processes of one host, beside a one-thread memcpy of the same bytes.

28 layers x K and V, 512 pages of 32 KiB each: contiguous (one descriptor per buffer) and shuffled (one per page), over
what UCX chooses by itself and over tcp, interleaved.

Run: python tests/benchmarks/transfer_bench.py [--rounds 5] [--layers 28]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pd_common.transport.base import Channel, MemoryRegion, Puts
from pd_common.transport.ucx.transport import UcxTransport

PAGES = 512
PAGE_BYTES = 32 * 1024
PATHS = {"host": {}, "tcp": {"UCX_TLS": "tcp,self"}}
"""Environment of each path: what UCX chooses on one host, and tcp alone."""


@dataclass(frozen=True, slots=True)
class Pool:
    """`layers` x 2 buffers of PAGES pages, as one array of shape (buffers, pages, bytes)."""

    pages: NDArray[np.uint8]

    @staticmethod
    def filled(layers: int, seed: int) -> Pool:
        page = np.random.default_rng(seed).integers(0, 256, (1, PAGES, PAGE_BYTES), dtype=np.uint8)
        return Pool(np.repeat(page, 2 * layers, axis=0))

    @property
    def region(self) -> MemoryRegion:
        return MemoryRegion(self.pages.ctypes.data, self.pages.nbytes)

    def checksum(self) -> int:
        return zlib.adler32(self.pages.data)


@dataclass(frozen=True, slots=True)
class Layout:
    """Which destination page each source page goes to, the same in every buffer."""

    name: str
    order: NDArray[np.int64]

    def puts(self, source: int, destination: int, buffers: int) -> Puts:
        """One put per run of pages that lie in order on both sides."""
        starts = np.flatnonzero(np.diff(self.order, prepend=self.order[0] - 2) != 1)
        runs = np.diff(starts, append=PAGES)
        buffer = np.repeat(np.arange(buffers), len(starts)) * PAGES
        local = source + (buffer + np.tile(starts, buffers)) * PAGE_BYTES
        remote = destination + (buffer + np.tile(self.order[starts], buffers)) * PAGE_BYTES
        return Puts(local, remote, np.tile(runs, buffers) * PAGE_BYTES)

    def expected(self, pool: Pool) -> Pool:
        pages = np.empty_like(pool.pages)
        pages[:, self.order] = pool.pages
        return Pool(pages)


@dataclass(slots=True)
class Samples:
    """Seconds and posting seconds of one path and layout."""

    descriptors: int
    seconds: list[float]
    posting: list[float]


class Receiver:
    """The other process: prints its address and where its pool lies, then a checksum for every line it reads."""

    def __init__(self, layers: int, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--receive", "--layers", str(layers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )
        base, address = self._line().split()
        self.base = int(base)
        self.address = bytes.fromhex(address)

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def checksum(self) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write("checksum\n")
        self._process.stdin.flush()
        return int(self._line())

    def close(self) -> None:
        self._process.communicate()


async def receive(layers: int) -> None:
    pool = Pool(np.zeros((2 * layers, PAGES, PAGE_BYTES), dtype=np.uint8))
    pool.pages.fill(1)
    transport = UcxTransport()
    transport.register(pool.region)
    port = transport.listen([pool.region])
    print(pool.region.base, port.address.hex(), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(await asyncio.to_thread(pool.checksum), flush=True)
    await transport.close()


def memcpy(source: Pool, destination: Pool, layout: Layout) -> float:
    """Seconds that one thread needs for the same copies."""
    puts = layout.puts(source.region.base, destination.region.base, len(source.pages))
    flat_source, flat_destination = source.pages.reshape(-1), destination.pages.reshape(-1)
    start = ((puts.local - source.region.base).tolist(), (puts.remote - destination.region.base).tolist())
    began = time.perf_counter()
    for at, to, length in zip(*start, puts.lengths.tolist(), strict=True):
        flat_destination[to : to + length] = flat_source[at : at + length]
    return time.perf_counter() - began


async def measure(layers: int, rounds: int) -> None:
    source, scratch = Pool.filled(layers, seed=0), Pool.filled(layers, seed=1)
    shuffled = np.random.default_rng(2).permutation(PAGES)
    layouts = (Layout("contiguous", np.arange(PAGES)), Layout("shuffled", shuffled))
    transports, receivers, channels = [], {}, {}
    for path, environment in PATHS.items():
        receivers[path] = Receiver(layers, environment)
        os.environ.update(environment)
        transport = UcxTransport()
        for name in environment:
            del os.environ[name]
        transport.register(source.region)
        transports.append(transport)
        channels[path] = await transport.connect(receivers[path].address)
    samples: dict[tuple[str, str], Samples] = {}
    for _ in range(rounds + 1):
        for layout in layouts:
            seconds = memcpy(source, scratch, layout)
            add(samples, ("memcpy", layout.name), 0, seconds, 0.0)
            for path, channel in channels.items():
                await sample(samples, path, layout, source, receivers[path], channel)
    for path, receiver in receivers.items():
        if receiver.checksum() != layouts[-1].expected(source).checksum():
            raise SystemExit(f"{path}: the bytes that arrived are not those that were sent")
        receiver.close()
    for transport in transports:
        await transport.close()
    report(samples, source.pages.nbytes, {path: channel.carrier for path, channel in channels.items()})


async def sample(
    samples: dict[tuple[str, str], Samples],
    path: str,
    layout: Layout,
    source: Pool,
    receiver: Receiver,
    channel: Channel,
) -> None:
    puts = layout.puts(source.region.base, receiver.base, len(source.pages))
    receipt = await channel.write(puts)
    add(samples, (path, layout.name), receipt.descriptors, receipt.seconds, receipt.posting_seconds)


def add(
    samples: dict[tuple[str, str], Samples], key: tuple[str, str], descriptors: int, seconds: float, posting: float
) -> None:
    """The first sample of each kind only warms up."""
    if key not in samples:
        samples[key] = Samples(descriptors, [], [])
        return
    samples[key].seconds.append(seconds)
    samples[key].posting.append(posting)


def report(samples: dict[tuple[str, str], Samples], total_bytes: int, carriers: dict[str, str]) -> None:
    print(f"{total_bytes / 1e6:.0f} MB, medians")
    print(f"{'path':16} {'layout':11} {'puts':>6} {'GB/s':>6} {'posting ms':>10} {'x memcpy':>8}")
    for (path, layout), each in samples.items():
        middle: Callable[[list[float]], float] = statistics.median
        rate = total_bytes / middle(each.seconds) / 1e9
        ratio = middle(samples["memcpy", layout].seconds) / middle(each.seconds)
        name = f"{path} ({carriers[path]})" if path in carriers else path
        posting = middle(each.posting) * 1e3
        print(f"{name:16} {layout:11} {each.descriptors:6} {rate:6.2f} {posting:10.1f} {ratio:8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    work = receive(arguments.layers) if arguments.receive else measure(arguments.layers, arguments.rounds)
    asyncio.run(work)


if __name__ == "__main__":
    main()
