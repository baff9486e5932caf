"""Text to token ids and back, for one model directory's tokenizer.

Knows no request; incremental decoding is in detokenizer.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer

from pd_common.errors import InvalidRequest
from pd_common.generation import ChatMessage


class Tokenizer:
    """A directory's tokenizer and chat template."""

    def __init__(self, directory: Path) -> None:
        """Raises InvalidRequest when the tokenizer's files cannot be read, or only by code that they bring along."""
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, ImportError, KeyError) as error:
            raise InvalidRequest(f"cannot load the tokenizer in {directory}: {error}", directory=directory) from error

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` works."""
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text, with the special tokens that the tokenizer puts around a prompt."""
        return tuple(self._tokenizer(text).input_ids)

    def apply_chat_template(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """Token ids of a conversation, up to the point where the assistant's next turn begins.

        Raises:
            InvalidRequest: there is no template, or it refuses these messages.

        """
        if not self.has_chat_template:
            raise InvalidRequest("this model has no chat template; send a prompt instead of messages")
        try:
            text = self._tokenizer.apply_chat_template(
                [asdict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, TypeError) as error:
            raise InvalidRequest(f"the model's chat template refuses these messages: {error}") from error
        # The template writes the special tokens itself.
        return tuple(self._tokenizer(text, add_special_tokens=False).input_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out, nothing tidied: "a ." stays "a ."."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text
