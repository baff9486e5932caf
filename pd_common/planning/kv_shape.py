"""What a model keeps of each token: told by its config.json, by a person, or by both together.

Knows the names of fields, no tensor library: numbers of a model that is not here can be worked out as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from pd_common.errors import InvalidRequest

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""Bytes of a number. The engine of this project keeps the first three."""

_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
_UNEVEN = ("kv_lora_rank", "multi_query", "new_decoder_architecture", "v_head_dim", "global_head_dim")
"""Fields of models whose keys and values are not simply layers x KV heads x head dimension."""


@dataclass(frozen=True, slots=True)
class KvShape:
    """Each of `layers` layers keeps `kv_heads` keys and as many values of `head_dim` numbers per token.

    Raises:
        InvalidRequest: there is no such model; `field` in the metadata names the field.

    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim"):
            if (value := getattr(self, name)) < 1:
                raise InvalidRequest(f"{_flag(name)} is {value}; it must be at least 1", field=name)
        if self.dtype not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise InvalidRequest(f"{self.dtype} is not a data type of KV; known are {known}", field="dtype")

    @property
    def head_bytes(self) -> int:
        """One key, or one value, of one head."""
        return self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def planes(self) -> int:
        """The keys of each layer and the values of each layer."""
        return 2 * self.layers

    def item_bytes(self, page_size: int) -> int:
        """One page of the keys, or of the values, of one layer."""
        return page_size * self.kv_heads * self.head_bytes

    def page_bytes(self, page_size: int) -> int:
        """One page of all layers, keys and values (B_page)."""
        return self.planes * self.item_bytes(page_size)


@dataclass(frozen=True, slots=True)
class KvFields:
    """As much of a shape as somebody has said."""

    layers: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    dtype: str | None = None

    def or_else(self, other: KvFields) -> KvFields:
        """What is not said here is taken from the other."""
        mine = {field.name: getattr(self, field.name) for field in fields(self)}
        return KvFields(**{name: getattr(other, name) if value is None else value for name, value in mine.items()})

    def complete(self) -> KvShape:
        """Raises InvalidRequest when something is missing; it says which options would say it."""
        layers, kv_heads, head_dim, dtype = self.layers, self.kv_heads, self.head_dim, self.dtype
        if layers is None or kv_heads is None or head_dim is None or dtype is None:
            missing = [_flag(field.name) for field in fields(self) if getattr(self, field.name) is None]
            raise InvalidRequest(f"the model is not known: give also {', '.join(missing)}", fields=",".join(missing))
        return KvShape(layers, kv_heads, head_dim, dtype)


def fields_of_config(config: Mapping[str, object]) -> KvFields:
    """What a Hugging Face config.json says, read as the engine reads it; a field may be missing.

    Raises:
        InvalidRequest: it has values that cannot be, or describes a model whose layers do not all keep the same.

    """
    nested = config.get("text_config")
    text: Mapping[str, object] = nested if isinstance(nested, dict) else config
    _refuse_uneven(text)
    heads = _number(text, "num_attention_heads")
    head_dim, hidden = _number(text, "head_dim"), _number(text, "hidden_size")
    if head_dim is None and heads is not None and hidden is not None:
        head_dim = hidden // heads
    return KvFields(
        layers=_number(text, "num_hidden_layers"),
        kv_heads=_number(text, "num_key_value_heads") or heads,
        head_dim=head_dim,
        dtype=_dtype(config) or _dtype(text) or "float32",
    )


def _dtype(config: Mapping[str, object]) -> str | None:
    stated = config.get("dtype") or config.get("torch_dtype")
    return None if stated is None else str(stated).removeprefix("torch.")


def _number(config: Mapping[str, object], name: str) -> int | None:
    value = config.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or value < 1:
        raise InvalidRequest(f"config.json says {name} is {value!r}, which is not a count", field=name)
    return value


def _refuse_uneven(config: Mapping[str, object]) -> None:
    uneven = [name for name in _UNEVEN if config.get(name)]
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and not _ATTENTION_LAYERS.issuperset(map(str, kinds)):
        uneven.append("layer_types")
    if uneven:
        raise InvalidRequest(
            f"config.json has {uneven[0]}: what such a model keeps of a token is not layers x KV heads x head "
            "dimension, so it cannot be worked out from it; give --layers, --kv-heads, --head-dim and --dtype "
            "that come to the same, without --model",
            field=uneven[0],
        )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
