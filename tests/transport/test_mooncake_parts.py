from __future__ import annotations

import numpy as np
import pytest

from pd_common.errors import InvalidRequest
from pd_common.transport.base import MemoryRegion, Puts
from pd_common.transport.mooncake.address import target_of
from pd_common.transport.mooncake.write import split
from pd_common.transport.offer import KeylessOffer

pytestmark = pytest.mark.mooncake

PROBE = MemoryRegion(4096, 64)


def test_a_target_is_a_host_and_a_port() -> None:
    assert target_of(KeylessOffer(b"10.0.0.1:15000", PROBE, ())) == "10.0.0.1:15000"


@pytest.mark.parametrize(
    "peer", [b"", b"10.0.0.1", b"10.0.0.1:0", b"10.0.0.1:65536", b"etcd://10.0.0.1:2379", b"a b:15000"]
)
def test_anything_else_is_no_target(peer: bytes) -> None:
    with pytest.raises(InvalidRequest):
        target_of(KeylessOffer(peer, PROBE, ()))


def test_a_write_is_cut_by_count_and_by_bytes_and_loses_nothing() -> None:
    lengths = np.array([0, 1, 40 << 20, 40 << 20, 100 << 20, 0, *[8] * 2500])
    starts = np.cumsum(lengths) - lengths
    batches = list(split(Puts(starts, starts + 7, lengths)))
    assert [len(batch.lengths) for batch in batches] == [2, 1, 1, 1024, 1024, 452]
    flat = [each for batch in batches for each in zip(batch.local, batch.remote, batch.lengths, strict=True)]
    kept = lengths > 0
    assert flat == list(zip(starts[kept].tolist(), (starts[kept] + 7).tolist(), lengths[kept].tolist(), strict=True))
