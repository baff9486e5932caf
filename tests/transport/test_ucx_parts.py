"""The parts of the UCX transport that need no UCX: address bytes, region look-up, the life of the progress thread."""

from __future__ import annotations

import os
from concurrent.futures import Future
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_common.errors import InternalError, InvalidRequest, PdError, TransferFailed
from pd_common.transport.base import MemoryRegion
from pd_common.transport.frame import MAX_ADDRESS_BYTES
from pd_common.transport.regions import RegionTable
from pd_common.transport.ucx.address import OfferedRegion, PortAddress
from pd_common.transport.ucx.binding import UCXWorker
from pd_common.transport.ucx.progress import ProgressThread, settled

offers = st.builds(
    OfferedRegion,
    st.builds(MemoryRegion, st.integers(0, 2**62), st.integers(1, 2**62)),
    st.binary(min_size=1, max_size=40),
)
addresses = st.builds(
    PortAddress,
    st.binary(min_size=1, max_size=300),
    offers,
    st.lists(offers, max_size=5).map(lambda found: tuple(sorted(found, key=lambda each: each.region.base))),
)


@given(addresses)
def test_an_address_survives_the_wire(address: PortAddress) -> None:
    assert PortAddress.parse(address.pack()) == address


@given(st.binary(max_size=400))
def test_noise_is_no_address(noise: bytes) -> None:
    with pytest.raises(InvalidRequest):
        PortAddress.parse(noise)


@given(addresses, st.data())
def test_a_changed_address_is_refused(address: PortAddress, data: st.DataObject) -> None:
    packed = bytearray(address.pack())
    packed[data.draw(st.integers(0, len(packed) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(InvalidRequest):
        PortAddress.parse(bytes(packed))


@given(addresses, st.data())
def test_a_cut_address_is_refused(address: PortAddress, data: st.DataObject) -> None:
    packed = address.pack()
    with pytest.raises(InvalidRequest):
        PortAddress.parse(packed[: data.draw(st.integers(0, len(packed) - 1))])


@pytest.mark.parametrize("region", [MemoryRegion(2**63, 1), MemoryRegion(5, 2**63), MemoryRegion(5, 0)])
def test_an_impossible_region_is_refused_even_when_well_packed(region: MemoryRegion) -> None:
    fine = OfferedRegion(MemoryRegion(0, 1), b"k")
    address = PortAddress(b"w", fine, (OfferedRegion(region, b"k"),))
    with pytest.raises(InvalidRequest):
        PortAddress.parse(address.pack())
    with pytest.raises(InvalidRequest):
        PortAddress.parse(replace(address, worker=b"", offered=()).pack())


def test_an_address_has_a_bound() -> None:
    offer = OfferedRegion(MemoryRegion(0, 1), b"k")
    with pytest.raises(InvalidRequest):
        PortAddress(b"w", offer, (offer,) * 5000).pack()
    with pytest.raises(InvalidRequest):
        PortAddress(b"w" * MAX_ADDRESS_BYTES, offer, ()).pack()


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), max_size=5),
    st.lists(st.tuples(st.integers(-5, 220), st.integers(-3, 30)), max_size=6),
)
def test_ranges_are_found_as_by_trying_every_region(
    shape: list[tuple[int, int]], ranges: list[tuple[int, int]]
) -> None:
    regions, end = [], 0
    for gap, length in shape:
        regions.append(MemoryRegion(end + gap, length))
        end += gap + length
    found = RegionTable(regions[::-1]).find(*(np.array(column, dtype=np.int64) for column in _columns(ranges)))
    expected = [
        [index for index, each in enumerate(regions) if _within(start, length, each)] for start, length in ranges
    ]
    if all(expected):
        assert found is not None
        assert all(index in candidates for index, candidates in zip(found.tolist(), expected, strict=True))
    else:
        assert found is None


def _columns(ranges: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [start for start, _ in ranges], [length for _, length in ranges]


def _within(start: int, length: int, region: MemoryRegion) -> bool:
    if length == 0 and start == region.base + region.length:
        return True
    return length >= 0 and region.base <= start < region.base + region.length >= start + length


@pytest.mark.parametrize(
    "regions",
    [
        (MemoryRegion(0, 10), MemoryRegion(9, 5)),
        (MemoryRegion(-1, 10),),
        (MemoryRegion(0, 0),),
        (MemoryRegion(2**62, 2**62),),
    ],
)
def test_regions_that_make_no_table(regions: tuple[MemoryRegion, ...]) -> None:
    with pytest.raises(InvalidRequest):
        RegionTable(regions)


class _Broken:
    """What a defect on the progress thread looks like."""

    waiting = False

    def __init__(self) -> None:
        self.worker = cast("UCXWorker", self)
        self.event_fd = os.eventfd(0)
        self.error: Future[PdError] = Future()

    def drive(self) -> bool:
        raise ZeroDivisionError

    def close(self) -> Future[None]:
        return settled()

    def abandon(self, error: PdError) -> None:
        self.error.set_result(error)


def test_a_defect_on_the_thread_reaches_everyone_who_waits() -> None:
    thread = ProgressThread("broken")
    broken = _Broken()
    added = thread.submit(lambda: thread.add(broken))
    assert isinstance(broken.error.result(timeout=20), InternalError)
    added.result(timeout=20)
    with pytest.raises(InternalError, match="progress thread died"):
        thread.died.result(timeout=20)
    with pytest.raises(InternalError):
        thread.submit(lambda: None).result(timeout=20)
    assert not thread.closed
    thread.stop()
    os.close(broken.event_fd)


def test_a_stopped_thread_refuses_commands() -> None:
    thread = ProgressThread("stopped")
    assert thread.submit(lambda: 7).result(timeout=20) == 7
    thread.stop()
    thread.stop()
    assert thread.closed
    assert not thread.died.done()
    with pytest.raises(TransferFailed):
        thread.submit(lambda: 7).result(timeout=20)
