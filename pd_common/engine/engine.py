"""One model served from one thread: steps, text and validation for whoever schedules.

Knows no network, no role and no queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from pd_common.engine.batch import Batch
from pd_common.engine.model_files import has_tokenizer
from pd_common.engine.output import AnswerBuilder
from pd_common.engine.request import Limits, validate_request
from pd_common.engine.runner import ModelRunner
from pd_common.engine.sampler import SampledToken, Sampler
from pd_common.engine.tokenizer import Tokenizer
from pd_common.errors import InvalidRequest
from pd_common.generation import ChatMessage, GenerationRequest, ModelInfo
from pd_common.kv.pages import PageAllocator
from pd_common.kv.pool import KVPool
from pd_common.threads import CallThread
from pd_common.types import KvLayout


class Engine:
    """All tensor work runs in the engine thread, one step at a time; everything else belongs to the event loop.

    While a step runs, its caller must not free pages of its sequences.
    """

    def __init__(
        self, name: str, runner: ModelRunner, tokenizer: Tokenizer | None, layout: KvLayout, thread: CallThread
    ) -> None:
        self._name = name
        self._runner = runner
        self._tokenizer = tokenizer
        self._sampler = Sampler(runner.eos_token_ids)
        self._thread = thread
        self.layout = layout
        self.pages = PageAllocator(runner.pool.num_pages)
        self.limits = Limits(
            context_length=runner.context_length,
            pool_tokens=runner.pool.num_tokens,
            vocab_size=runner.vocab_size,
            has_tokenizer=tokenizer is not None,
        )

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        page_size: int,
        num_pages: int,
        metadata_schema: int,
        software_version: str,
        dtype: str = "auto",
        device: str = "auto",
        threads: int | None = None,
        context_length: int | None = None,
    ) -> Engine:
        """Loads a Hugging Face model directory; blocks until the model is ready to step.

        `dtype`, `device` and `context_length` are as `ModelRunner` takes them. `threads` is how many CPU threads a step
        may use in this process (None: torch's own choice).

        Raises:
            InvalidRequest: the directory or an option cannot be served; the message says what to do.

        """
        for option, value in (("page_size", page_size), ("num_pages", num_pages), ("threads", threads)):
            if value is not None and value < 1:
                raise InvalidRequest(f"{option} is {value}, it must be at least 1", option=option, value=value)
        if threads is not None:
            torch.set_num_threads(threads)
        thread = CallThread("engine")
        try:
            load = partial(ModelRunner, directory, page_size, num_pages, dtype, device, context_length)
            runner = thread.submit(load).result()
            tokenizer = Tokenizer(directory) if has_tokenizer(directory) else None
        except BaseException:
            thread.stop()
            raise
        return cls(
            directory.resolve().name, runner, tokenizer, runner.layout(metadata_schema, software_version), thread
        )

    @property
    def pool(self) -> KVPool:
        """The pool behind `pages`."""
        return self._runner.pool

    @property
    def model_info(self) -> ModelInfo:
        """What a client or a router must know; the model's name is its directory's."""
        return ModelInfo(
            name=self._name,
            context_length=self.limits.context_length,
            max_request_tokens=self.limits.max_request_tokens,
            vocab_size=self.limits.vocab_size,
            page_size=self.pool.page_size,
            has_chat_template=self._tokenizer is not None and self._tokenizer.has_chat_template,
        )

    async def step(self, batch: Batch) -> tuple[SampledToken, ...]:
        """Computes the batch's KV and draws a token for each item that samples, in order.

        The computation cannot be interrupted: a caller that is cancelled here must still treat the batch's pages as in
        use until the next step or `close` returns.

        Raises:
            InternalError: the model's numbers are broken, or the thread has died.

        """
        return await self._thread.run(partial(self._run, batch))

    async def zero_pages(self, pages: Sequence[int]) -> None:
        """Makes pages zeros again: no earlier owner's KV is left in them. Cannot be interrupted, as `step`."""
        await self._thread.run(partial(self.pool.zero, pages))

    async def save_pages(self, pages: Sequence[int]) -> torch.Tensor:
        """A copy of pages in host memory, one row each. Cannot be interrupted, as `step`."""
        return await self._thread.run(partial(self.pool.save, pages))

    async def load_pages(self, copy: torch.Tensor, pages: Sequence[int]) -> None:
        """Writes rows that `save_pages` gave into these pages, one each. Cannot be interrupted, as `step`."""
        await self._thread.run(partial(self.pool.load, copy, pages))

    def validate(self, request: GenerationRequest) -> None:
        """Raises as `validate_request` does, against this engine's limits."""
        validate_request(request, self.limits)

    def new_answer(self, request: GenerationRequest, cached_tokens: int = 0) -> AnswerBuilder:
        """The builder of one validated request's answer."""
        decode = None if self._tokenizer is None else self._tokenizer.decode
        return AnswerBuilder(request, self._runner.eos_token_ids, decode, cached_tokens)

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Token ids of a prompt. Raises InvalidRequest when the model has no tokenizer."""
        return self._text_codec().encode(text)

    def apply_chat_template(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """Token ids of a conversation. Raises InvalidRequest when there is no template or it refuses the messages."""
        return self._text_codec().apply_chat_template(messages)

    async def watch(self) -> None:
        """Raises InternalError when the thread has died, or hangs in one step; otherwise it never returns."""
        await self._thread.watch()

    async def close(self) -> None:
        """Waits for the step in progress, if any, and ends the thread."""
        await asyncio.to_thread(self._thread.stop)

    def _run(self, batch: Batch) -> tuple[SampledToken, ...]:
        return self._sampler.sample(self._runner.forward(batch), batch.draws)

    def _text_codec(self) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidRequest("this model has no tokenizer; send token ids instead of text")
        return self._tokenizer
