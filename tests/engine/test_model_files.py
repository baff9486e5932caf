"""Which directories are accepted, what is said of the others, and when two directories count as the same model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BloomConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    T5Config,
)

from pd_common.engine.engine import Engine
from pd_common.engine.model_files import model_digest, read_config
from pd_common.errors import InvalidRequest
from tests.engine.conftest import load_directory
from tests.tiny_models import save_tiny_model, tiny_model


@pytest.fixture
def model_copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model(), tmp_path / "copy"))


def edit_json(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def directory_with(config: Any, tmp_path: Path) -> Path:
    config.save_pretrained(tmp_path)
    save_file({"unused": torch.zeros(1)}, tmp_path / "model.safetensors")
    return tmp_path


def test_no_such_directory(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no such directory"):
        load_directory(tmp_path / "absent")


def test_a_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"no config\.json"):
        load_directory(tmp_path)


def test_a_directory_without_safetensors(model_copy: Path) -> None:
    (model_copy / "model.safetensors").unlink()
    with pytest.raises(InvalidRequest, match="safetensors"):
        load_directory(model_copy)


def test_a_config_that_is_not_understood(model_copy: Path) -> None:
    edit_json(model_copy / "config.json", lambda config: config.update(model_type="no_such_model"))
    with pytest.raises(InvalidRequest, match="not understood"):
        load_directory(model_copy)


def test_code_that_comes_with_a_model_is_not_run(model_copy: Path) -> None:
    edit_json(
        model_copy / "config.json",
        lambda config: config.update(model_type="own", auto_map={"AutoConfig": "own_code.OwnConfig"}),
    )
    (model_copy / "own_code.py").write_text("raise SystemExit('the code was run')")
    with pytest.raises(InvalidRequest):
        load_directory(model_copy)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (BloomConfig(), "attention"),
        (T5Config(), "causal"),
        (Llama4TextConfig(), "chunks"),
        (LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}), "dynamic"),
    ],
    ids=["alibi", "encoder-decoder", "chunked attention", "rope that depends on the batch"],
)
def test_models_that_would_answer_wrongly_are_refused(config: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=why):
        read_config(directory_with(config, tmp_path))


def test_a_model_with_state_besides_keys_and_values_is_refused(tmp_path: Path) -> None:
    config = Lfm2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        layer_types=["conv", "full_attention"],
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(InvalidRequest, match="only 1 of the model's 2 layers"):
        load_directory(tmp_path)


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    config = BertConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(InvalidRequest, match="looks ahead"):
        load_directory(tmp_path)


def test_weights_that_do_not_fit_the_config_are_refused(model_copy: Path) -> None:
    edit_json(model_copy / "config.json", lambda config: config.update(intermediate_size=128))
    with pytest.raises(InvalidRequest, match="weights"):
        load_directory(model_copy)


def test_weights_that_are_missing_are_refused(model_copy: Path) -> None:
    """Transformers would fill them with random numbers and only warn."""
    weights = load_file(model_copy / "model.safetensors")
    del weights["model.layers.1.self_attn.o_proj.weight"]
    save_file(weights, model_copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidRequest, match=r"model\.layers\.1\.self_attn\.o_proj\.weight"):
        load_directory(model_copy)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"dtype": "int8"}, "int8 is not a data type"),
        ({"device": "warp"}, "warp is not a device"),
        ({"page_size": 0}, "page_size"),
        ({"num_pages": 0}, "num_pages"),
        ({"threads": 0}, "threads"),
    ],
)
def test_options_that_cannot_be_served(options: dict[str, Any], why: str) -> None:
    defaults: dict[str, Any] = {"page_size": 16, "num_pages": 4, "metadata_schema": 1, "software_version": "test"}
    with pytest.raises(InvalidRequest, match=why):
        Engine.load(tiny_model(), **(defaults | options))


def test_the_digest_survives_what_does_not_change_the_model(model_copy: Path) -> None:
    before = model_digest(model_copy)
    edit_json(model_copy / "config.json", lambda config: config.update(transformers_version="1.2.3"))
    weights = load_file(model_copy / "model.safetensors")
    (model_copy / "model.safetensors").unlink()
    names = sorted(weights)
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: weights[name] for name in part}, model_copy / f"model-{number}.safetensors")
    assert model_digest(model_copy) == before == model_digest(tiny_model())


def test_the_digest_tells_models_apart(model_copy: Path, tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path / "finetuned", seed=8)
    digests = {model_digest(tmp_path / "finetuned"), model_digest(model_copy)}
    edit_json(model_copy / "tokenizer.json", lambda tokenizer: tokenizer.update(added_tokens=[]))
    digests.add(model_digest(model_copy))
    edit_json(model_copy / "config.json", lambda config: config.update(rms_norm_eps=0.1))
    digests.add(model_digest(model_copy))
    assert len(digests) == 4
