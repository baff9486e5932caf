"""One answer as its client sees it: tokens in, pieces of text out, and the one place where stop rules are evaluated.

Knows no engine step and no network.
"""

from __future__ import annotations

from dataclasses import replace

from pd_common.engine.detokenizer import Decode, Detokenizer
from pd_common.generation import FinishReason, GenerationRequest, Output, SamplingParams, TokenLogprob, Usage


class AnswerBuilder:
    """Fed with every sampled token, in order, until a piece is the last one.

    The concatenated text never contains a stop string, nor the token that ended the answer.
    """

    def __init__(
        self,
        request: GenerationRequest,
        eos_token_ids: frozenset[int],
        decode: Decode | None,
        cached_tokens: int = 0,
    ) -> None:
        """`decode` is None for a model without tokenizer: then all text is empty."""
        self._request = request
        self._stop_token_ids = _stop_token_ids(request.sampling, eos_token_ids)
        self._decode = decode
        self._text = (
            None if decode is None else _StoppableText(Detokenizer(decode, request.prompt), request.sampling.stop)
        )
        self._cached_tokens = cached_tokens
        self._completion_tokens = 0

    def accept(self, token_id: int, logprob: TokenLogprob | None = None) -> Output:
        """The piece that this token finishes; the last piece carries reason and usage."""
        self._completion_tokens += 1
        if token_id in self._stop_token_ids and self._completion_tokens > self._request.sampling.min_new_tokens:
            rest, _ = self._finished_text()
            return self._piece(token_id, logprob, rest, FinishReason.STOP, token_id)
        text, stopped_by = self._new_text(token_id)
        if stopped_by is not None:
            return self._piece(token_id, logprob, text, FinishReason.STOP, stopped_by)
        if self._completion_tokens < self._request.sampling.max_new_tokens:
            return self._piece(token_id, logprob, text, None, None)
        rest, stopped_by = self._finished_text()
        finish = FinishReason.LENGTH if stopped_by is None else FinishReason.STOP
        return self._piece(token_id, logprob, text + rest, finish, stopped_by)

    def _new_text(self, token_id: int) -> tuple[str, str | None]:
        if self._text is None:
            return "", None
        may_stop = self._completion_tokens >= self._request.sampling.min_new_tokens
        return self._text.add(token_id, may_stop=may_stop)

    def _finished_text(self) -> tuple[str, str | None]:
        return ("", None) if self._text is None else self._text.finish()

    def _piece(
        self,
        token_id: int,
        logprob: TokenLogprob | None,
        text: str,
        finish: FinishReason | None,
        matched_stop: str | int | None,
    ) -> Output:
        usage = None
        if finish is not None:
            usage = Usage(len(self._request.prompt), self._completion_tokens, self._cached_tokens)
        return Output(
            room=self._request.room,
            token_ids=(token_id,),
            text=text,
            logprobs=() if logprob is None else (self._with_text(logprob),),
            finish=finish,
            matched_stop=matched_stop,
            usage=usage,
        )

    def _with_text(self, logprob: TokenLogprob) -> TokenLogprob:
        """Each token's own text, here where there is a tokenizer."""
        if self._decode is None:
            return logprob
        top = tuple(replace(each, text=self._decode([each.token_id])) for each in logprob.top)
        return replace(logprob, top=top, text=self._decode([logprob.token_id]))


class _StoppableText:
    """Text that is held back as long as it could be the beginning of a stop string."""

    def __init__(self, detokenizer: Detokenizer, stop: tuple[str, ...]) -> None:
        self._detokenizer = detokenizer
        self._stop = stop
        self._held = ""

    def add(self, token_id: int, *, may_stop: bool) -> tuple[str, str | None]:
        """New text that may be shown, and the stop string that ends it; one that is complete too early is only text."""
        self._held += self._detokenizer.add(token_id)
        stopped_by = self._cut() if may_stop else None
        return self._release(0 if stopped_by else self._possible_stop()), stopped_by

    def finish(self) -> tuple[str, str | None]:
        """The remainder, and the stop string that ends it."""
        self._held += self._detokenizer.flush()
        stopped_by = self._cut()
        return self._release(0), stopped_by

    def _cut(self) -> str | None:
        """Drops the text from a stop string on, and says which it was."""
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if not found:
            return None
        # The first to be complete, and of several that end together the longest: however tokens cut the text.
        _, at, stop = min(found)
        self._held = self._held[:at]
        return stop

    def _possible_stop(self) -> int:
        """Characters at the end that could be the beginning of a stop string."""
        return max((_overlap(self._held, stop) for stop in self._stop), default=0)

    def _release(self, keep: int) -> str:
        split = len(self._held) - keep
        text, self._held = self._held[:split], self._held[split:]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)


def _stop_token_ids(sampling: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    own = frozenset(sampling.stop_token_ids)
    return own if sampling.ignore_eos else own | eos_token_ids
