"""Token ids to text, one token at a time, without ever showing half a character.

Knows only a decode function; the cost of a token does not depend on how many came before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

CONTEXT_TOKENS = 5
"""Prompt tokens looked at, because a decoder may write the first token of a text without its leading space."""

MAX_HELD_TOKENS = 16
LONGEST_CHARACTER_TOKENS = 4
"""UTF-8 needs at most four bytes, and a token is at least one byte."""

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Decodes a window: the tokens of the last finished piece (for context) and the tokens since.

    `_shown` characters of the window's text are out already. A replacement character at the end may be the first bytes
    of a character, so it is held back until more tokens decide.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._context = 0
        self._text = ""
        self._shown = 0
        self._restart(_context(decode, prompt))

    def add(self, token_id: int) -> str:
        """The text that is final now and was not before; often empty."""
        before = self._text
        self._window.append(token_id)
        self._text = self._decode(self._window)
        final = len(self._text.rstrip(_INCOMPLETE))
        if final < len(self._text):
            return self._hold(final)
        if self._text == before:
            # A special token: it would only make the window grow. But at the start it may be a space that the decoder
            # strips there, and needs to see before the next one.
            if before or len(self._window) > MAX_HELD_TOKENS:
                self._window.pop()
            return ""
        piece = self._text[self._shown :]
        if piece:
            self._restart(self._window[self._context :])
        return piece

    def flush(self) -> str:
        """The rest of the text at the end of the answer: what can no longer be completed is shown as it is."""
        piece = self._text[self._shown :]
        self._shown = len(self._text)
        return piece

    def _hold(self, final: int) -> str:
        """Shows what comes before the trailing replacement characters; when they go on, all but the last few tokens."""
        if len(self._window) - self._context > MAX_HELD_TOKENS:
            undecided = self._window[1 - LONGEST_CHARACTER_TOKENS :]
            piece = self._decode(self._window[: 1 - LONGEST_CHARACTER_TOKENS])[self._shown :]
            self._restart([])
            self._window, self._text = undecided, self._decode(undecided)
            return piece
        piece = self._text[self._shown : final]
        self._shown = max(self._shown, final)
        return piece

    def _restart(self, context: list[int]) -> None:
        """The next window begins with these tokens, whose text is out already."""
        self._window = context
        self._context = len(context)
        self._text = self._decode(context) if context else ""
        self._shown = len(self._text)


def _context(decode: Decode, prompt: Sequence[int]) -> list[int]:
    """The end of the prompt; not from the middle of a character on, where that would spoil its decoding."""
    for length in range(min(CONTEXT_TOKENS, len(prompt)), 0, -1):
        context = list(prompt[-length:])
        if not decode(context).endswith(_INCOMPLETE):
            return context
    return []
