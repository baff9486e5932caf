from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from pd_common.engine.detokenizer import CONTEXT_TOKENS, MAX_HELD_TOKENS, Detokenizer
from tests.tiny_models import EOS_ID, byte_level_tokenizer

TEXTS = (
    "to be or not to be",
    "  two leading, two trailing  ",
    "Grüße aus Köln, naïve café",
    "你好、世界。再见",
    "👍🏽 thumbs and a family 👨‍👩‍👧‍👦, flags 🇩🇪🇯🇵",
    "العربية עברית हिन्दी ไทย",
    "line\n\n\tindented ",
    "a real replacement character \N{REPLACEMENT CHARACTER} in the middle",
)


@cache
def byte_level() -> Tokenizer:
    tokenizer: Tokenizer = byte_level_tokenizer().backend_tokenizer
    return tokenizer


@cache
def sentencepiece_like() -> Tokenizer:
    """As Llama 2's: spaces are a visible mark, unknown characters fall back to bytes, the first space is not shown."""
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdefghijklmnopqrstuvwxyz,",
        "▁t",
        "▁to",
        "be",
    ]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[("▁", "t"), ("▁t", "o"), ("b", "e")],
            byte_fallback=True,
            unk_token=pieces[0],
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def decode_with(tokenizer: Tokenizer) -> Callable[[Sequence[int]], str]:
    return lambda token_ids: tokenizer.decode(list(token_ids), skip_special_tokens=True)


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {"byte level": byte_level, "sentencepiece": sentencepiece_like}


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return token_ids


def stream(tokenizer: Tokenizer, prompt: Sequence[int], answer: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(decode_with(tokenizer), prompt)
    return [*(detokenizer.add(token_id) for token_id in answer), detokenizer.flush()]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_the_text_and_no_piece_has_half_a_character(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    pieces = stream(tokenizer, (), encode(tokenizer, text))
    shown = text.removeprefix(" ") if kind == "sentencepiece" else text
    assert "".join(pieces) == shown
    assert "".join(pieces).count("\N{REPLACEMENT CHARACTER}") == text.count("\N{REPLACEMENT CHARACTER}")


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=60)
@given(before=st.text(max_size=12), after=st.text(max_size=30))
def test_prompt_and_answer_join_without_a_seam(kind: str, before: str, after: str) -> None:
    """The leading space of an answer is there, because the prompt came before it."""
    tokenizer = TOKENIZERS[kind]()
    decode = decode_with(tokenizer)
    prompt, answer = encode(tokenizer, "to" + before), encode(tokenizer, after)
    assert decode(prompt) + "".join(stream(tokenizer, prompt, answer)) == decode([*prompt, *answer])


def test_a_word_is_shown_with_its_leading_space() -> None:
    tokenizer = sentencepiece_like()
    prompt, answer = encode(tokenizer, "to be"), encode(tokenizer, " or not")
    assert "".join(stream(tokenizer, prompt, answer)) == " or not"
    assert "".join(stream(tokenizer, (), answer)) == "or not"


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_every_character_appears_with_its_last_token(kind: str) -> None:
    """An emoji is four bytes, so four tokens: nothing, nothing, nothing, all of it."""
    tokenizer = TOKENIZERS[kind]()
    pieces = stream(tokenizer, (), encode(tokenizer, "a👍b"))
    assert pieces == ["a", "", "", "", "👍", "b", ""]


def test_text_before_an_unfinished_character_is_not_held_back() -> None:
    pieces = stream(byte_level(), (), encode(byte_level(), "né"))
    assert pieces[0] == "n"
    assert pieces[-2:] == ["é", ""]


def test_an_answer_cut_inside_a_character_shows_a_replacement_at_the_end() -> None:
    ids = encode(byte_level(), "ok 👍")[:-1]
    assert "".join(stream(byte_level(), (), ids)) == "ok \N{REPLACEMENT CHARACTER}"


def test_a_prompt_cut_inside_a_character_does_not_swallow_the_answer() -> None:
    ids = encode(byte_level(), "👍 fine")
    text = "".join(stream(byte_level(), ids[:2], ids[2:]))
    assert text.endswith(" fine")


def test_special_tokens_are_invisible() -> None:
    ids = encode(byte_level(), "to be")
    with_special = [EOS_ID, *ids[:1], EOS_ID, EOS_ID, *ids[1:], EOS_ID]
    assert "".join(stream(byte_level(), (), with_special)) == "to be"


def test_random_tokens_give_the_text_of_all_of_them() -> None:
    """Most of it is not valid UTF-8: where nothing can be right, the pieces still equal decoding at once."""
    decode = decode_with(byte_level())
    for seed in range(200):
        ids = random.Random(seed).choices(range(320), k=25)
        assert "".join(stream(byte_level(), (), ids)) == decode(ids)


def test_garbage_without_end_is_shown_and_a_character_after_it_is_whole() -> None:
    continuation = encode(byte_level(), "👍")[-1]
    garbage = [continuation] * 50
    pieces = stream(byte_level(), (), [*garbage, *encode(byte_level(), "👍")])
    assert "".join(pieces) == "\N{REPLACEMENT CHARACTER}" * 50 + "👍"
    assert "".join(pieces[:25])


@pytest.mark.parametrize("what", ["text", "specials", "garbage"])
def test_the_cost_of_a_token_does_not_grow(what: str) -> None:
    """Never more than a small window is decoded, whatever the answer is made of."""
    tokenizer = byte_level()
    words = encode(tokenizer, " 👍 to be or not to be")
    ids = {"text": words * 40, "specials": [EOS_ID] * 500, "garbage": [words[-4]] * 500}[what]
    longest = 0

    def decode(token_ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return tokenizer.decode(list(token_ids), skip_special_tokens=True)

    detokenizer = Detokenizer(decode, words * 10)
    for token_id in ids:
        detokenizer.add(token_id)
    assert longest <= CONTEXT_TOKENS + 2 * MAX_HELD_TOKENS
