"""What the engine offers besides tokens: text, limits, layout, and its one thread."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from pathlib import Path

import pytest
import torch

from pd_common.engine.batch import Batch, BatchItem
from pd_common.engine.request import Sequence
from pd_common.errors import InternalError, InvalidRequest, PromptTooLong
from pd_common.generation import ChatMessage, ModelInfo
from pd_common.types import BufferKind, BufferSpec
from tests.engine.conftest import LoadEngine, load_directory
from tests.engine.loop import generate_alone, make_request
from tests.tiny_models import CONTEXT_LENGTH, VOCAB_SIZE, tiny_model


def test_model_info_and_limits(load_engine: LoadEngine) -> None:
    engine = load_engine("llama", 16)
    assert engine.model_info == ModelInfo(
        name="tiny-llama",
        context_length=CONTEXT_LENGTH,
        max_request_tokens=CONTEXT_LENGTH,
        vocab_size=VOCAB_SIZE,
        page_size=16,
        has_chat_template=True,
    )


async def test_a_small_pool_limits_requests() -> None:
    engine = load_directory(tiny_model(), page_size=16, num_pages=3)
    assert engine.model_info.max_request_tokens == 48
    await engine.close()


async def test_the_context_can_be_made_shorter() -> None:
    engine = load_directory(tiny_model(), page_size=16, num_pages=4, context_length=64)
    assert (engine.model_info.context_length, engine.model_info.max_request_tokens) == (64, 64)
    engine.validate(make_request([1] * 60, 4))
    with pytest.raises(PromptTooLong, match="context has room for 64"):
        engine.validate(make_request([1] * 60, 5))
    await engine.close()


@pytest.mark.parametrize(
    ("num_pages", "context_length", "why"),
    [
        (80, CONTEXT_LENGTH + 1, "--context-length is 513 tokens, but the model was made for 512"),
        (4, 65, "--context-length is 65 tokens, but --kv-cache-tokens has room for 64"),
    ],
)
def test_a_context_that_model_or_pool_cannot_take_is_refused(num_pages: int, context_length: int, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        load_directory(tiny_model(), page_size=16, num_pages=num_pages, context_length=context_length)


async def test_pages_travel_through_host_memory(load_engine: LoadEngine) -> None:
    engine = load_engine()
    size = engine.pool.kv_item_lens[0]
    for layer in engine.pool.layers:
        rows = engine.pool.layer(layer.layer_id).key
        rows.copy_(torch.randn(rows.shape))
    before = b"".join(bytes(engine.pool.read_pages(page, 1)) for page in (5, 3))
    copy = await engine.save_pages((5, 3))
    await engine.zero_pages((3, 5))
    await engine.load_pages(copy, (3, 6))
    assert bytes(engine.pool.read_pages(3, 1)) == before[:size]
    assert bytes(engine.pool.read_pages(6, 1)) == before[size:]
    assert not any(engine.pool.read_pages(5, 1))


def test_layout_describes_the_pool(load_engine: LoadEngine) -> None:
    layout = load_engine("llama", 16).layout
    assert (layout.dtype, layout.page_size, layout.layers) == ("float32", 16, 3)
    assert (layout.kv_heads, layout.head_dim, layout.software_version) == (2, 16, "test")
    page_bytes = 3 * 2 * 16 * 2 * 16 * 4
    assert layout.buffers == (BufferSpec(BufferKind.KEY_VALUE, (0, 1, 2), page_bytes),)
    assert layout.page_bytes == page_bytes


def test_layouts_match_between_two_engines_of_one_model_only(load_engine: LoadEngine) -> None:
    first, second = load_engine("llama", 16, 0).layout, load_engine("llama", 16, 1).layout
    assert first.first_mismatch(second) is None
    for other, field in ((load_engine("llama", 1), "page_size"), (load_engine("qwen2", 16), "model")):
        mismatch = first.first_mismatch(other.layout)
        assert mismatch is not None
        assert mismatch[0] == field


def test_text_to_tokens_and_back(load_engine: LoadEngine) -> None:
    engine = load_engine()
    tokens = engine.tokenize("to be 👍")
    builder = engine.new_answer(make_request(tokens, 50))
    assert "".join(builder.accept(token_id).text for token_id in tokens) == "to be 👍"


def test_chat_template(load_engine: LoadEngine) -> None:
    engine = load_engine()
    tokens = engine.apply_chat_template([ChatMessage("user", "hello")])
    assert tokens == engine.tokenize("<user>hello\n<assistant>")


def test_what_a_chat_template_refuses_is_an_invalid_request(load_engine: LoadEngine) -> None:
    with pytest.raises(InvalidRequest, match="unknown role"):
        load_engine().apply_chat_template([ChatMessage("wizard", "hello")])


async def test_a_model_without_tokenizer_is_served_by_token_ids(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tiny_model(), tmp_path / "bare", ignore=shutil.ignore_patterns("token*", "chat*")))
    engine = load_directory(directory)
    assert not engine.model_info.has_chat_template
    with pytest.raises(InvalidRequest, match="token ids"):
        engine.tokenize("text")
    with pytest.raises(InvalidRequest, match="token ids"):
        engine.apply_chat_template([ChatMessage("user", "hello")])
    with pytest.raises(InvalidRequest, match="stop_token_ids"):
        engine.validate(make_request([1], stop=("x",)))
    (job,) = await generate_alone(engine, [make_request([1, 2, 3], 4)])
    builder = engine.new_answer(make_request([1, 2, 3], 4, ignore_eos=True))
    assert [builder.accept(token_id).text for token_id in job.token_ids] == [""] * 4
    await engine.close()


async def test_a_model_without_chat_template(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tiny_model(), tmp_path / "plain", ignore=shutil.ignore_patterns("chat*")))
    engine = load_directory(directory)
    assert not engine.model_info.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template"):
        engine.apply_chat_template([ChatMessage("user", "hello")])
    await engine.close()


async def test_end_tokens_come_from_the_generation_config(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tiny_model(), tmp_path / "two-ends"))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    engine = load_directory(directory)
    for token_id, ends in ((7, True), (9, True), (0, False)):
        assert engine.new_answer(make_request([1])).accept(token_id).is_last is ends
    await engine.close()


async def test_the_event_loop_is_free_while_a_step_runs(load_engine: LoadEngine) -> None:
    engine = load_engine()
    sequence = Sequence(make_request([1, 2, 3]))
    sequence.pages.extend([0])
    threads: list[str] = []
    forward = engine._runner.forward
    may_compute = threading.Event()

    def waiting_forward(batch: Batch) -> object:
        threads.append(threading.current_thread().name)
        assert may_compute.wait(timeout=60)
        return forward(batch)

    engine._runner.forward = waiting_forward  # type: ignore[method-assign, assignment]
    try:
        step = asyncio.create_task(engine.step(Batch([BatchItem(sequence, 0, 3, samples=True)])))
        await asyncio.sleep(0)
        may_compute.set()
        assert len(await step) == 1
    finally:
        del engine._runner.forward
    assert threads[0].startswith("engine")


async def test_steps_without_samples_return_nothing(load_engine: LoadEngine) -> None:
    sequence = Sequence(make_request([1, 2, 3]))
    sequence.pages.extend([0])
    assert await load_engine().step(Batch([BatchItem(sequence, 0, 2, samples=False)])) == ()


async def test_close_ends_the_thread() -> None:
    engine = load_directory(tiny_model())
    await engine.close()
    with pytest.raises(InternalError, match="engine thread is closed"):
        await engine.step(Batch([BatchItem(Sequence(make_request([1])), 0, 1, samples=True)]))
