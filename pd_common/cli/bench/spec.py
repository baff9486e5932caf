"""What a child process is told at its start, and how requests name a case."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pd_common.cli.bench.ends import EndSettings
from pd_common.cli.bench.work import Case, Layout, Order, Work

LINE_BYTES = 1 << 24
"""Longest line between the bench and a child: an address with its keys."""

Reply = dict[str, Any]
Handler = Callable[..., Awaitable[Reply]]


class Side(StrEnum):
    """What a child is."""

    SENDER = "sender"
    RECEIVER = "receiver"
    ENGINE = "engine"


@dataclass(frozen=True, slots=True)
class Spec:
    """What a child is told at its start. `staging_bytes` is the size of its staging buffer; 0: none."""

    side: Side
    end: EndSettings
    work: Work
    staging_bytes: int

    @classmethod
    def parse(cls, text: str) -> Spec:
        """The reverse of `json.dumps(asdict(spec))`."""
        fields = json.loads(text)
        return cls(
            side=Side(fields["side"]),
            end=EndSettings(**fields["end"]),
            work=Work(**fields["work"]),
            staging_bytes=fields["staging_bytes"],
        )


def case_of(request: Mapping[str, Any]) -> Case:
    """The case that a request names."""
    return Case(Layout(request["layout"]), Order(request["order"]))
