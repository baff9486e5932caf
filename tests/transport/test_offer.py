"""The address of a port whose regions need no keys: it survives the wire, and no other bytes pass for one."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_common.errors import InvalidRequest
from pd_common.transport.base import MemoryRegion
from pd_common.transport.frame import MAX_ADDRESS_BYTES, Frame
from pd_common.transport.offer import KeylessOffer

FRAME = Frame(b"TEST", 1, "test port")

regions = st.builds(MemoryRegion, st.integers(0, 2**62), st.integers(1, 2**62))
addresses = st.builds(
    KeylessOffer,
    st.binary(min_size=1, max_size=300),
    regions,
    st.lists(regions, max_size=5).map(lambda found: tuple(sorted(found, key=lambda each: each.base))),
)


@given(addresses)
def test_an_address_survives_the_wire(address: KeylessOffer) -> None:
    assert KeylessOffer.parse(address.pack(FRAME), FRAME) == address


@given(st.binary(max_size=400))
def test_noise_is_no_address(noise: bytes) -> None:
    with pytest.raises(InvalidRequest):
        KeylessOffer.parse(noise, FRAME)


@given(st.binary(max_size=200))
def test_noise_in_a_whole_frame_is_no_address_or_a_sound_one(noise: bytes) -> None:
    try:
        address = KeylessOffer.parse(FRAME.seal(noise), FRAME)
    except InvalidRequest:
        return
    assert address.peer
    assert all(0 < each.length <= 2**63 - each.base for each in (address.probe, *address.offered))


@given(addresses, st.data())
def test_a_changed_or_cut_address_is_refused(address: KeylessOffer, data: st.DataObject) -> None:
    packed = bytearray(address.pack(FRAME))
    position = data.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(InvalidRequest):
        KeylessOffer.parse(bytes(packed[:position]), FRAME)
    packed[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(InvalidRequest):
        KeylessOffer.parse(bytes(packed), FRAME)


def test_an_impossible_region_is_refused_even_when_well_packed() -> None:
    for base, length in ((2**63, 1), (5, 2**63), (5, 0)):
        body = struct.pack("<II", 1, 2) + b"m" + struct.pack("<QQQQ", 0, 1, base, length)
        with pytest.raises(InvalidRequest):
            KeylessOffer.parse(FRAME.seal(body), FRAME)


def test_an_address_has_a_bound() -> None:
    region = MemoryRegion(0, 1)
    with pytest.raises(InvalidRequest):
        KeylessOffer(b"m", region, (region,) * 5000).pack(FRAME)
    with pytest.raises(InvalidRequest):
        KeylessOffer(b"m" * MAX_ADDRESS_BYTES, region, ()).pack(FRAME)
