from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_common.engine.output import AnswerBuilder
from pd_common.generation import FinishReason, GenerationRequest, Output, TokenLogprob, Usage
from tests.engine.loop import make_request
from tests.tiny_models import EOS_ID, byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()
PROMPT = (50, 51)


def decode(token_ids: Sequence[int]) -> str:
    text: str = TOKENIZER.decode(list(token_ids), skip_special_tokens=True)
    return text


def encode(text: str) -> list[int]:
    """One token per byte, so that every border lies inside of something."""
    alphabet = TOKENIZER.backend_tokenizer
    return [token_id for character in text for token_id in alphabet.encode(character).ids]


def answer(request: GenerationRequest, token_ids: Sequence[int]) -> list[Output]:
    """All pieces up to the last one."""
    builder = AnswerBuilder(request, frozenset({EOS_ID}), decode, cached_tokens=1)
    pieces: list[Output] = []
    for token_id in token_ids:
        pieces.append(builder.accept(token_id))
        if pieces[-1].is_last:
            break
    return pieces


def text_of(pieces: Sequence[Output]) -> str:
    return "".join(piece.text for piece in pieces)


def test_eos_ends_the_answer_and_is_not_shown() -> None:
    pieces = answer(make_request(PROMPT), [*encode("ok"), EOS_ID, *encode("never")])
    last = pieces[-1]
    assert text_of(pieces) == "ok"
    assert (last.finish, last.matched_stop, last.token_ids) == (FinishReason.STOP, EOS_ID, (EOS_ID,))
    assert last.usage == Usage(prompt_tokens=2, completion_tokens=3, cached_tokens=1)


def test_length_ends_the_answer() -> None:
    pieces = answer(make_request(PROMPT, max_new_tokens=3), encode("abcdef"))
    assert text_of(pieces) == "abc"
    assert (pieces[-1].finish, pieces[-1].matched_stop) == (FinishReason.LENGTH, None)
    assert [piece.usage for piece in pieces[:-1]] == [None, None]


def test_eos_as_the_last_allowed_token_is_a_stop() -> None:
    pieces = answer(make_request(PROMPT, max_new_tokens=3), [*encode("ab"), EOS_ID])
    assert pieces[-1].finish is FinishReason.STOP


def test_ignore_eos_goes_on_and_still_hides_it() -> None:
    pieces = answer(make_request(PROMPT, max_new_tokens=4, ignore_eos=True), [*encode("a"), EOS_ID, *encode("bc")])
    assert text_of(pieces) == "abc"
    assert pieces[-1].finish is FinishReason.LENGTH


def test_a_stop_token_id_ends_the_answer_even_when_eos_is_ignored() -> None:
    stop_id = encode("x")[0]
    pieces = answer(make_request(PROMPT, stop_token_ids=(stop_id,), ignore_eos=True), encode("abxc"))
    assert text_of(pieces) == "ab"
    assert pieces[-1].matched_stop == stop_id


@pytest.mark.parametrize("token", ["eos", "stop"])
def test_stop_tokens_do_not_count_below_min_new_tokens(token: str) -> None:
    token_id = EOS_ID if token == "eos" else encode("x")[0]  # noqa: S105 - not a password
    request = make_request(PROMPT, min_new_tokens=3, stop_token_ids=(encode("x")[0],))
    pieces = answer(request, [*encode("a"), token_id, *encode("b"), token_id])
    assert len(pieces) == 4
    assert pieces[-1].matched_stop == token_id


def test_a_stop_string_across_tokens_is_cut_off() -> None:
    pieces = answer(make_request(PROMPT, 50, stop=("STOP",)), encode("one STOP two"))
    assert text_of(pieces) == "one "
    assert (pieces[-1].finish, pieces[-1].matched_stop) == (FinishReason.STOP, "STOP")
    assert len(pieces) == len("one STOP")


def test_what_could_become_a_stop_string_waits() -> None:
    pieces = answer(make_request(PROMPT, 50, stop=("STOP",)), encode("a STar"))
    assert [piece.text for piece in pieces] == ["a", " ", "", "", "STa", "r"]


@pytest.mark.parametrize("end", ["length", "eos"])
def test_what_waited_is_shown_at_the_end(end: str) -> None:
    tokens = encode("a STO")
    request = make_request(PROMPT, len(tokens) if end == "length" else 50, stop=("STOP",))
    pieces = answer(request, [*tokens, EOS_ID])
    assert text_of(pieces) == "a STO"


def test_an_unfinished_character_is_shown_as_such_at_the_end() -> None:
    tokens = encode("👍")[:3]
    pieces = answer(make_request(PROMPT, max_new_tokens=3), tokens)
    assert [piece.text for piece in pieces] == ["", "", "\N{REPLACEMENT CHARACTER}"]


@pytest.mark.parametrize(
    ("stop", "text", "matched"),
    [
        (("cd", "bcd"), "a", "bcd"),
        (("abcde", "bc"), "a", "bc"),
        (("e", "b"), "a", "b"),
    ],
)
def test_the_first_complete_stop_string_wins_however_tokens_cut_the_text(
    stop: tuple[str, ...], text: str, matched: str
) -> None:
    request = make_request(PROMPT, 50, stop=stop)
    byte_by_byte = answer(request, encode("abcdef"))
    at_once = AnswerBuilder(request, frozenset(), lambda ids: "abcdef" if 7 in ids else "").accept(7)
    assert (text_of(byte_by_byte), byte_by_byte[-1].matched_stop) == (text, matched)
    assert (at_once.text, at_once.matched_stop) == (text, matched)


def test_a_stop_string_of_multi_byte_characters() -> None:
    pieces = answer(make_request(PROMPT, 50, stop=("界。",)), encode("世界。界"))
    assert text_of(pieces) == "世"
    assert pieces[-1].matched_stop == "界。"


def test_a_stop_string_at_the_last_allowed_token_is_a_stop() -> None:
    pieces = answer(make_request(PROMPT, 4, stop=("cd",)), encode("abcd"))
    assert (text_of(pieces), pieces[-1].finish) == ("ab", FinishReason.STOP)


def test_stop_strings_do_not_count_below_min_new_tokens() -> None:
    pieces = answer(make_request(PROMPT, 50, min_new_tokens=6, stop=("ab",)), encode("abcdefab!"))
    assert text_of(pieces) == "abcdef"


def test_a_stop_string_that_ends_with_the_last_required_token_counts() -> None:
    pieces = answer(make_request(PROMPT, 50, min_new_tokens=3, stop=("bc",)), encode("abcdef"))
    assert (text_of(pieces), len(pieces)) == ("a", 3)


def test_logprobs_travel_with_their_token_and_get_its_text() -> None:
    builder = AnswerBuilder(make_request(PROMPT), frozenset(), decode)
    (a,), (b, *_) = encode("a"), encode("bc")
    logprob = TokenLogprob(a, -0.5, (TokenLogprob(b, -1.5),))
    named = TokenLogprob(a, -0.5, (TokenLogprob(b, -1.5, text=decode([b])),), decode([a]))
    assert builder.accept(a, logprob).logprobs == (named,)
    assert named.text == "a"


def test_without_tokenizer_there_are_token_ids_and_no_text() -> None:
    builder = AnswerBuilder(make_request(PROMPT, max_new_tokens=2), frozenset({EOS_ID}), None)
    first, last = builder.accept(7), builder.accept(8)
    assert (first.token_ids, first.text, first.is_last) == ((7,), "", False)
    assert (last.token_ids, last.text, last.finish) == ((8,), "", FinishReason.LENGTH)


@settings(max_examples=150)
@given(st.text("ab👍", max_size=20), st.lists(st.text("ab👍", min_size=1, max_size=4), min_size=1, max_size=3))
def test_streamed_text_is_the_text_before_the_first_stop_string(text: str, stop: list[str]) -> None:
    """One character per token group, so the first match to be complete decides, as it would in the finished text."""
    tokens = encode(text)
    pieces = answer(make_request(PROMPT, len(tokens) + 1, stop=tuple(stop)), [*tokens, EOS_ID])
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    expected = text[: min((start for end, start in ends if end == min(ends)[0]), default=0)] if ends else text
    assert text_of(pieces) == expected
