"""Tensors on a GPU as source and destination. UCX finds the kind of memory by its address; nothing here names it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from pd_common.transport.base import MemoryRegion, Puts
from pd_common.transport.ucx.transport import UcxTransport

PAGES, PAGE_BYTES = 64, 32 * 1024
SIZE = PAGES * PAGE_BYTES
_ROOT = Path(__file__).parents[2]
_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device, or this torch has no CUDA")
DEVICES = [
    ("cpu", "cpu"),
    pytest.param("cuda", "cuda", marks=_GPU),
    pytest.param("cuda", "cpu", marks=_GPU),
    pytest.param("cpu", "cuda", marks=_GPU),
]
"""Of the source and the destination; the first shows that these tests are right where there is no GPU."""


@pytest.fixture
async def transports() -> AsyncIterator[tuple[UcxTransport, UcxTransport]]:
    made = UcxTransport(), UcxTransport()
    yield made
    for transport in made:
        await transport.close()


@pytest.fixture
def peers() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for peer in started:
        peer.kill()
        peer.communicate()


def random_pages(device: str) -> torch.Tensor:
    pages = torch.randint(0, 256, (PAGES, PAGE_BYTES), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    moved = pages.to(device)
    if moved.is_cuda:
        torch.cuda.synchronize()
    return moved


def region_of(tensor: torch.Tensor) -> MemoryRegion:
    return MemoryRegion(tensor.data_ptr(), tensor.nbytes)


def shuffled(source: int, destination: int, order: torch.Tensor) -> Puts:
    """Page i goes to page `order[i]`."""
    numbers = np.arange(PAGES, dtype=np.int64)
    return Puts(numbers * PAGE_BYTES + source, order.numpy() * PAGE_BYTES + destination, np.full(PAGES, PAGE_BYTES))


def started(device: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.transport.cuda_peer", device, str(SIZE)],
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.mark.parametrize(("source_on", "destination_on"), DEVICES)
async def test_pages_arrive_in_this_process(
    source_on: str, destination_on: str, transports: tuple[UcxTransport, UcxTransport]
) -> None:
    sender, receiver = transports
    source, destination = (
        random_pages(source_on),
        torch.zeros((PAGES, PAGE_BYTES), dtype=torch.uint8).to(destination_on),
    )
    sender.register(region_of(source))
    receiver.register(region_of(destination))
    channel = await sender.connect(receiver.listen([region_of(destination)]).address)
    order = torch.randperm(PAGES, generator=torch.Generator().manual_seed(6))
    receipt = await channel.write(shuffled(source.data_ptr(), destination.data_ptr(), order))
    assert receipt.bytes == SIZE
    assert torch.equal(destination.cpu()[order], source.cpu())


@pytest.mark.parametrize(("source_on", "destination_on"), DEVICES)
async def test_pages_arrive_in_another_process(
    source_on: str,
    destination_on: str,
    transports: tuple[UcxTransport, UcxTransport],
    peers: list[subprocess.Popen[str]],
) -> None:
    """Over cuda_ipc where both are on GPUs of one host."""
    sender, _ = transports
    source = random_pages(source_on)
    sender.register(region_of(source))
    peer = started(destination_on)
    peers.append(peer)
    assert peer.stdin is not None
    assert peer.stdout is not None
    there = json.loads(peer.stdout.readline())
    channel = await sender.connect(bytes.fromhex(there["address"]))
    await channel.write(shuffled(source.data_ptr(), there["base"], torch.arange(PAGES).flip(0)))
    peer.stdin.write("\n")
    peer.stdin.flush()
    assert int(peer.stdout.readline()) == int(source.cpu().to(torch.int64).sum())
