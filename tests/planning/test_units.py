from __future__ import annotations

import pytest

from pd_common.errors import InvalidRequest
from pd_common.planning.units import parse_bytes, parse_bytes_per_s, show_bytes, show_seconds

KIB, MIB, GIB = 2**10, 2**20, 2**30


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [("25GB/s", 25e9), ("200Gb/s", 25e9), ("200 Gbit/s", 25e9), ("200Gbps", 25e9), ("1.5GiB/s", 1.5 * GIB),
     ("8Kib/s", 1024), ("100MB/s", 1e8), ("8b/s", 1)],
)  # fmt: skip
def test_bits_are_not_bytes_and_thousands_are_not_1024s(text: str, bytes_per_s: float) -> None:
    assert parse_bytes_per_s(text) == bytes_per_s


@pytest.mark.parametrize("text", ["25", "GB/s", "25GB", "25mB/s", "-1GB/s", "25G/s", "25GB/h"])
def test_a_speed_without_its_units_is_none(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a speed"):
        parse_bytes_per_s(text)


@pytest.mark.parametrize(("text", "size"), [("80GiB", 80 * GIB), ("80GB", 80e9), ("0.5 KiB", 512), ("7B", 7)])
def test_sizes_are_read(text: str, size: float) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["80", "80G", "80Gi", "80Gb", "0.4B", "0GiB"])
def test_a_size_without_its_unit_is_none(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a size"):
        parse_bytes(text)


def test_numbers_are_shown_in_few_digits() -> None:
    assert [show_bytes(size) for size in (0, 1023, 32 * KIB, 1.875 * GIB, 1020 * MIB, 5000 * 2**40)] == [
        "0 B", "1,023 B", "32 KiB", "1.875 GiB", "1,020 MiB", "5,000 TiB",
    ]  # fmt: skip
    assert [show_seconds(seconds) for seconds in (4.35e-8, 1.64e-4, 0.08053, 0.99996, 3.0, 4321.0)] == [
        "43.5 ns", "164 us", "80.5 ms", "1,000 ms", "3 s", "4,320 s",
    ]  # fmt: skip
