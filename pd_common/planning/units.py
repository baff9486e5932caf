"""Sizes and speeds as people write them, and as they like to read them.

Bytes (B) and bits (b), thousands (GB) and 1024s (GiB) are told apart, and nothing is guessed.
"""

from __future__ import annotations

import re
from decimal import Decimal

from pd_common.errors import InvalidRequest

_NUMBER = r"\s*(?P<number>\d+(\.\d+)?)\s*(?P<prefix>[kKMGTP]i?)?"
_SIZE = re.compile(rf"{_NUMBER}B\s*")
_SPEED = re.compile(rf"{_NUMBER}(?P<unit>B|b|bit)(/s|ps)\s*")
_POWERS = {prefix: power for power, prefix in enumerate("KMGTP", start=1)}
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_BITS = 8


def parse_bytes(text: str) -> int:
    """A size, as in 80GiB or 80GB.

    Raises:
        InvalidRequest: it is none, or less than a byte.

    """
    if (found := _SIZE.fullmatch(text)) and (size := int(_scaled(found))) > 0:
        return size
    raise InvalidRequest(f"{text!r} is not a size: say 80GiB (of 1024 MiB) or 80GB (of 1000 MB)", size=text)


def parse_bytes_per_s(text: str) -> float:
    """A speed, as in 25GB/s or 200Gb/s, in bytes per second.

    Raises:
        InvalidRequest: it is none, or it is 0.

    """
    if (found := _SPEED.fullmatch(text)) and (speed := float(_scaled(found))) > 0:
        return speed if found["unit"] == "B" else speed / _BITS
    raise InvalidRequest(
        f"{text!r} is not a speed: say bytes with a large B, as in 25GB/s, or bits with a small b, as in 200Gb/s",
        speed=text,
    )


def show_bytes(size: float) -> str:
    """In four digits and 1024s, as in 1.875 GiB."""
    power = 0
    while size >= 1024 and power < len(_BINARY) - 1:
        size /= 1024
        power += 1
    return f"{_rounded(size, 4)} {_BINARY[power]}"


def show_seconds(seconds: float) -> str:
    """In three digits, as in 80.5 ms."""
    for limit_s, factor, unit in (1e-6, 1e9, "ns"), (1e-3, 1e6, "us"), (1.0, 1e3, "ms"):
        if seconds < limit_s:
            return f"{_rounded(seconds * factor, 3)} {unit}"
    return f"{_rounded(seconds, 3)} s"


def _rounded(value: float, digits: int) -> str:
    return f"{float(f'{value:.{digits}g}'):,.10g}"


def _scaled(found: re.Match[str]) -> Decimal:
    prefix = found["prefix"] or ""
    base = 1024 if prefix.endswith("i") else 1000
    factor: int = base ** _POWERS.get(prefix.removesuffix("i").upper(), 0)
    return Decimal(found["number"]) * factor
