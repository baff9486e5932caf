"""What lies in a Hugging Face model directory: is it one that this engine can serve, and which model is it.

Reads files only; nothing is fetched, and no code from the directory is run.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM

from pd_common.errors import InvalidRequest

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")

_VOLATILE_CONFIG_KEYS = {"transformers_version", "_name_or_path", "dtype", "torch_dtype"}
_BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}
_SAMPLE_BYTES = 64


def has_tokenizer(directory: Path) -> bool:
    """Whether the directory brings a tokenizer; without one the model is served by token ids alone."""
    return any((directory / name).is_file() for name in TOKENIZER_FILES)


def read_config(directory: Path) -> Any:
    """The directory's transformers configuration.

    Raises:
        InvalidRequest: the directory is missing or incomplete, or the model needs what this engine does not do.

    """
    _check_files(directory)
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        raise _refused(directory, f"its config.json is not understood by transformers: {error}") from error
    _check_supported(directory, config)
    return config


def model_digest(directory: Path) -> str:
    """Digest of configuration, tokenizer, and name, type, shape and a sample of every weight, however they are sharded.

    The sample tells two fine-tunings of one model apart without reading all of it.
    """
    digest = hashlib.sha256()
    config = _read_json(directory / "config.json")
    digest.update(_canonical({key: value for key, value in config.items() if key not in _VOLATILE_CONFIG_KEYS}))
    if (tokenizer := directory / "tokenizer.json").is_file():
        digest.update(_canonical(_read_json(tokenizer)))
    weights = sorted(weight for file in _weight_files(directory) for weight in _weights(file))
    digest.update(_canonical(weights))
    return digest.hexdigest()


def _check_files(directory: Path) -> None:
    if not directory.is_dir():
        raise _refused(directory, "there is no such directory; name one with config.json and *.safetensors")
    if not (directory / "config.json").is_file():
        raise _refused(directory, "it has no config.json; name a Hugging Face model directory")
    if not _weight_files(directory):
        raise _refused(directory, "it has no *.safetensors; convert the weights with save_pretrained first")


def _check_supported(directory: Path, config: Any) -> None:
    model_type = getattr(config, "model_type", "unknown")
    if type(config) not in AutoModelForCausalLM._model_mapping:  # noqa: SLF001 - the only list of causal-LM classes
        raise _refused(directory, f"{model_type} is not a causal language model")
    model_class = AutoModelForCausalLM._model_mapping[type(config)]  # noqa: SLF001
    # Some multi-modal types map to several classes; all of them are refused or accepted together.
    classes = model_class if isinstance(model_class, tuple) else (model_class,)
    if not all(cls._supports_attention_backend for cls in classes):
        raise _refused(
            directory, f"transformers' {model_type} does not let its attention be replaced; take another model"
        )
    text = config.get_text_config()
    if getattr(text, "max_position_embeddings", None) is None:
        raise _refused(directory, "its config.json does not say how long a context may be (max_position_embeddings)")
    if getattr(text, "attention_chunk_size", None) is not None:
        raise _refused(directory, f"{model_type} attends in chunks, which is not supported")
    if rope := _BATCH_DEPENDENT_ROPE & set(_rope_types(getattr(text, "rope_parameters", None))):
        raise _refused(
            directory, f"rope type {min(rope)} makes a request's numbers depend on its neighbours in the batch"
        )


def _rope_types(parameters: Any) -> Iterator[str]:
    """All values of `rope_type`: there is one set of parameters, or one per kind of layer."""
    if not isinstance(parameters, Mapping):
        return
    for key, value in parameters.items():
        if key == "rope_type":
            yield str(value)
        elif isinstance(value, Mapping):
            yield from _rope_types(value)


def _weight_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def _weights(file: Path) -> Iterator[tuple[str, str, list[int], str]]:
    """Name, type, shape and the middle bytes (hex) of each tensor in a safetensors file."""
    with file.open("rb") as stream:
        (header_bytes,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(header_bytes))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            stream.seek(8 + header_bytes + max(begin, (begin + end - _SAMPLE_BYTES) // 2))
            yield name, entry["dtype"], entry["shape"], stream.read(min(_SAMPLE_BYTES, end - begin)).hex()


def _read_json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def _refused(directory: Path, why: str) -> InvalidRequest:
    return InvalidRequest(f"cannot serve {directory}: {why}", directory=directory)
