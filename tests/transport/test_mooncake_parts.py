from __future__ import annotations

import dataclasses
import struct

import numpy as np
import pytest

from pd_common.errors import InvalidRequest
from pd_common.transport.base import MemoryRegion, Puts
from pd_common.transport.mooncake import address
from pd_common.transport.mooncake.address import PortAddress
from pd_common.transport.mooncake.write import split

pytestmark = pytest.mark.mooncake

PROBE = MemoryRegion(4096, 64)
PORT = PortAddress("10.0.0.1:15000", PROBE, (MemoryRegion(1 << 20, 100), MemoryRegion(1 << 30, 7)))


def test_an_address_survives_the_wire_sorted() -> None:
    shuffled = dataclasses.replace(PORT, offered=PORT.offered[::-1])
    assert PortAddress.parse(shuffled.pack()) == PORT


@pytest.mark.parametrize(
    "change",
    [
        {"target": ""},
        {"target": "10.0.0.1"},
        {"target": "10.0.0.1:0"},
        {"target": "10.0.0.1:65536"},
        {"target": "etcd://10.0.0.1:2379"},
        {"target": "a b:15000"},
        {"probe": MemoryRegion(4096, 0)},
        {"offered": (MemoryRegion((1 << 63) - 1, 2),)},
    ],
    ids=str,
)
def test_impossible_addresses_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        PortAddress.parse(dataclasses.replace(PORT, **change).pack())  # type: ignore[arg-type]


@pytest.mark.parametrize("body", [b"", b"\0" * 5, struct.pack("<HI", 9999, 1), struct.pack("<HI", 0, 0)])
def test_well_framed_nonsense_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        PortAddress.parse(address._FRAME.seal(body))


def test_a_write_is_cut_by_count_and_by_bytes_and_loses_nothing() -> None:
    lengths = np.array([0, 1, 40 << 20, 40 << 20, 100 << 20, 0, *[8] * 2500])
    starts = np.cumsum(lengths) - lengths
    batches = list(split(Puts(starts, starts + 7, lengths)))
    assert [len(batch.lengths) for batch in batches] == [2, 1, 1, 1024, 1024, 452]
    flat = [each for batch in batches for each in zip(batch.local, batch.remote, batch.lengths, strict=True)]
    kept = lengths > 0
    assert flat == list(zip(starts[kept].tolist(), (starts[kept] + 7).tolist(), lengths[kept].tolist(), strict=True))
