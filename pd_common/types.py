"""Values that every layer shares: rooms, page lists, roles, and the layout of a paged KV pool.

Knows no network, no tensor library and no clock.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import NewType

BootstrapRoom = NewType("BootstrapRoom", int)
"""Identity of one request on router, prefill and decode: a non-zero unsigned 64-bit integer."""

PageIndices = tuple[int, ...]
"""Page ids of one pool, in prompt order."""

MAX_ROOM = 2**64 - 1
_OWN_ROOM_BITS = 53


def new_room() -> BootstrapRoom:
    """A number that nobody else has, as good as certainly; exact in a JSON number (I12)."""
    return BootstrapRoom(secrets.randbelow(2**_OWN_ROOM_BITS - 1) + 1)


class Role(StrEnum):
    """What a process does with a request."""

    PREFILL = "prefill"
    DECODE = "decode"
    ROUTER = "router"


class BufferKind(StrEnum):
    """What one registered buffer holds."""

    KEY = "key"
    VALUE = "value"
    KEY_VALUE = "key_value"
    """Both: layer by layer, the keys of a page before its values."""


class StateKind(StrEnum):
    """What a model keeps of a sequence besides keys and values."""

    RECURRENT = "recurrent"
    """Rows of fixed size for recurrent layers."""
    WINDOW = "window"
    """Pages of the last window of sliding-window layers."""


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """One buffer of a pool as a peer must see it: page `p` lies at `base + p * item_len_bytes`.

    A page holds the layers of `layer_ids` one after the other.
    """

    kind: BufferKind
    layer_ids: tuple[int, ...]
    item_len_bytes: int


@dataclass(frozen=True, slots=True)
class KvLayout:
    """All that two pools must have in common before a page may travel between them (I10).

    `model` is a digest of the configuration, the tokenizer and the weights' headers.
    """

    model: str
    dtype: str
    page_size: int
    layers: int
    kv_heads: int
    head_dim: int
    metadata_schema: int
    software_version: str
    buffers: tuple[BufferSpec, ...]
    state_kinds: tuple[StateKind, ...] = ()

    def first_mismatch(self, other: KvLayout) -> tuple[str, str, str] | None:
        """The first field that differs as (name, mine, theirs), or None when the pools can be paired."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs:
                return field.name, _shown(mine), _shown(theirs)
        return None

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all buffers (B_page)."""
        return sum(buffer.item_len_bytes for buffer in self.buffers)


def _shown(value: object) -> str:
    if not isinstance(value, tuple):
        return str(value)
    is_names = all(isinstance(each, str) for each in value)
    return ("+".join(value) or "none") if is_names else f"{len(value)} buffers"


@dataclass(frozen=True, slots=True)
class Instance:
    """One life of one process: a restart at the same address has the same address and a higher epoch.

    `epoch` is the start time of the process in microseconds since 1970.
    """

    instance_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class ProcessProof:
    """What is needed to prove from the same host that a process is gone (I2 for CMA writes)."""

    host_id: str
    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class RankPosition:
    """Where one rank stands in its role's grid."""

    dp_rank: int = 0
    dp_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    @property
    def ranks(self) -> int:
        """How many ranks make the grid complete."""
        return self.dp_size * self.tp_size * self.pp_size


@dataclass(frozen=True, slots=True)
class DataPlane:
    """How a rank's pages travel: library, the host that its writes come from, what the library offers there."""

    backend: str
    version: str
    host: str
    transports: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RankInfo:
    """What one rank tells the Bootstrap service about itself."""

    instance: Instance
    role: Role
    position: RankPosition
    control_address: str
    layout: KvLayout
    data_plane: DataPlane


@dataclass(frozen=True, slots=True)
class Topology:
    """All ranks of one service, ordered by position; none while a position is not held.

    `epoch` names this set of ranks: it rises whenever a rank comes, goes or is replaced.
    """

    ranks: tuple[RankInfo, ...]
    epoch: int


@dataclass(frozen=True, slots=True)
class BootstrapAddress:
    """The prefill a request is to meet: host and port of its Bootstrap service."""

    host: str
    port: int

    @property
    def target(self) -> str:
        """As a gRPC target; an IPv6 literal gets its brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
