"""Where an answer ends, and what of its text is shown."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pagedattn.model import AnswerStream, SamplingParams, TextStream
from pagedattn.model.stopping import Piece, StopStrings


def cut(text: str, stop: list[str]) -> tuple[str, str | None]:
    """Character by character: the text before the first stop string that is complete, and which
    string that is; the longest if several are complete at once."""
    for end in range(1, len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def streamed(pieces: Iterable[str], stop: list[str]) -> tuple[list[str], str | None]:
    strings = StopStrings(stop)
    shown = [strings.push(piece) for piece in pieces]
    return [*shown, strings.finish()], strings.matched


def test_a_stop_string_across_pieces() -> None:
    """Only the end of the text was once compared, and a part of the string reached the reader
    (vllm-project/vllm#3672). What follows the string is dropped."""
    assert streamed(["foo E", "ND bar"], ["END"]) == (["foo ", "", ""], "END")
    assert streamed(["foo E", "ND bar", "more"], ["END"]) == (["foo ", "", "", ""], "END")
    assert streamed(["foo END bar"], ["END"]) == (["foo ", ""], "END")
    assert streamed(list("fEEND"), ["END"]) == (["f", "", "E", "", "", ""], "END")


def test_text_that_only_begins_like_a_stop_string_is_shown_later() -> None:
    assert streamed(["foo E", "N", "T", " E"], ["END"]) == (
        ["foo ", "", "ENT", " ", "E"],
        None,
    )


def test_the_string_that_is_complete_first_stops() -> None:
    """Not the one that begins first: "b" is there before "abc" can be known."""
    for pieces in (["abc"], ["a", "b", "c"], ["ab", "c"]):
        shown, matched = streamed(pieces, ["abc", "b"])
        assert ("".join(shown), matched) == ("a", "b")
    for order in (["xab", "ab"], ["ab", "xab"]):
        shown, matched = streamed(["1x", "ab2"], order)
        assert ("".join(shown), matched) == ("1", "xab")


# Few letters, so that strings overlap, begin like themselves and hold one another.
TEXT = st.text("abc", max_size=14)
STOP = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


@given(st.lists(st.text("abc", max_size=4), max_size=8), STOP)
@example(["aab", "aac"], ["aabaac"])
@example(["a", "a", "b"], ["ab"])
def test_the_pieces_do_not_matter(pieces: list[str], stop: list[str]) -> None:
    """Whatever the pieces: the text of one that goes character by character, and nothing is ever
    shown that has to be taken back."""
    expected, expected_match = cut("".join(pieces), stop)
    shown, matched = streamed(pieces, stop)
    assert ("".join(shown), matched) == (expected, expected_match)
    # Nothing is held back longer than it may still become a stop string.
    so_far = ""
    for number, piece in enumerate(pieces):
        so_far += piece
        if cut(so_far, stop)[1]:
            break
        held = so_far[len("".join(shown[: number + 1])) :]
        starts = {s[:n] for s in stop for n in range(1, len(s))}
        assert held == max((s for s in starts if so_far.endswith(s)), key=len, default="")


@given(TEXT, st.lists(st.text("abc", max_size=4), max_size=5), STOP)
def test_what_ends_before_the_minimum_does_not_count(
    early: str, pieces: list[str], stop: list[str]
) -> None:
    """A stop string may begin in the early text; one that ends there is text like any other."""
    strings = StopStrings(stop)
    shown = [strings.push(char, may_stop=False) for char in early]
    shown += [strings.push(piece) for piece in pieces]
    text = early + "".join(pieces)
    for end in range(len(early) + 1, len(text) + 1):
        if complete := [s for s in stop if text[:end].endswith(s)]:
            longest = max(complete, key=len)
            assert ("".join(shown), strings.matched) == (text[: end - len(longest)], longest)
            return
    assert ("".join(shown) + strings.finish(), strings.matched) == (text, None)


def test_a_string_that_does_not_count_is_not_held_back() -> None:
    """It is complete, so nothing is waited for; "a" may still become "ab"."""
    strings = StopStrings(["ab", "wxyz"])
    shown = [strings.push(piece, may_stop=False) for piece in ("ab", "a")]
    assert shown == ["ab", ""]


class Pieces:
    """A vocabulary by hand: token i is piece i; a piece in <…> is special and has no text."""

    def __init__(self, *pieces: str | bytes) -> None:
        self._pieces = [p.encode() if isinstance(p, str) else p for p in pieces]

    def token_bytes(self, token_id: int) -> bytes:
        piece = self._pieces[token_id]
        return b"" if piece.startswith(b"<") else piece

    def answer(self, token_ids: Iterable[int], max_tokens: int = 99, **params: Any) -> list[Piece]:
        """What each token gives, up to and including the last of the answer."""
        text = TextStream(self)  # type: ignore[arg-type]
        stream = AnswerStream(SamplingParams(**params), max_tokens, text)
        pieces = []
        for token_id in token_ids:
            pieces.append(stream.push(token_id))
            if pieces[-1].finish_reason:
                break
        return pieces


def test_reasons() -> None:
    words = Pieces("<end>", "foo E", "ND bar", " baz")
    assert words.answer([3, 1, 2], stop="END") == [
        Piece(" baz"),
        Piece("foo "),
        Piece("", "stop", "END"),
    ]
    assert words.answer([3, 3, 3], max_tokens=2) == [Piece(" baz"), Piece(" baz", "length")]
    assert words.answer([3, 0, 3], stop_token_ids=[0, 7]) == [Piece(" baz"), Piece("", "stop", 0)]


@pytest.mark.parametrize("end", ["<end>", "hello"], ids=["special", "ordinary"])
def test_end_tokens_are_known_by_number(end: str) -> None:
    """Good text was once cut by the length of an end token that is not shown, and a special token
    was searched in a text that had none (vllm-project/vllm#3577, #792)."""
    words = Pieces("hello", "<other>", end)
    assert words.answer([0, 1, 0, 2, 0], stop_token_ids=[2]) == [
        Piece("hello"),
        Piece(""),
        Piece("hello"),
        Piece("", "stop", 2),
    ]


def test_which_reason_comes_first() -> None:
    """An end token before a stop string, both before the length."""
    words = Pieces("a", "END", "<end>")
    both: dict[str, Any] = {"stop": "END", "stop_token_ids": [1, 2]}
    assert words.answer([0, 1], max_tokens=2, **both)[-1] == Piece("", "stop", 1)
    assert words.answer([0, 1], max_tokens=2, stop="END")[-1] == Piece("", "stop", "END")
    assert words.answer([0, 2], max_tokens=2, **both)[-1] == Piece("", "stop", 2)


def test_what_was_held_back_comes_with_the_end() -> None:
    words = Pieces("foo E", "<end>", "N")
    for answer in (
        words.answer([0, 2, 1], stop="END", stop_token_ids=[1]),
        words.answer([0, 2], stop="END", max_tokens=2),
    ):
        assert "".join(piece.text for piece in answer) == "foo EN"


def test_a_character_cut_in_two() -> None:
    """é is C3 A9. It comes whole or, at the end of the answer, as U+FFFD; stop strings see it."""
    words = Pieces(b"a\xc3", b"\xa9b", "<end>")
    assert [p.text for p in words.answer([0, 1, 2], stop_token_ids=[2])] == ["a", "éb", ""]
    assert [p.text for p in words.answer([0, 2], stop_token_ids=[2])] == ["a", "\ufffd"]
    assert [p.text for p in words.answer([0], max_tokens=1)] == ["a\ufffd"]
    assert words.answer([0, 1], stop="é")[-1] == Piece("", "stop", "é")


def test_a_minimum_length() -> None:
    """None of the first three tokens ends the answer, by number or by text; the fourth may."""
    words = Pieces("a", "END", "<end>")
    params: dict[str, Any] = {"min_tokens": 3, "stop": "END", "stop_token_ids": [2]}
    assert len(words.answer([2, 2, 2, 2, 0], **params)) == 4
    answer = words.answer([1, 0, 1, 1], **params)
    assert "".join(piece.text for piece in answer) == "ENDaEND"
    assert answer[-1] == Piece("", "stop", "END")


def test_without_text() -> None:
    stream = AnswerStream(SamplingParams(stop_token_ids=[5]), 9, None)
    assert [stream.push(3), stream.push(5)] == [Piece(""), Piece("", "stop", 5)]


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (SamplingParams(stop=["END"]), r"stop strings \['END'\] need a tokenizer"),
        (SamplingParams(min_tokens=10), "min_tokens is 10, but the answer has at most 9 tokens"),
    ],
)
def test_refused(params: SamplingParams, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AnswerStream(params, 9, None)


@pytest.mark.parametrize(
    ("max_tokens", "words"),
    [(0, "max_tokens must be at least 1, got 0"), (1.5, "max_tokens is 1.5; .* whole number")],
)
def test_a_length_that_no_answer_has(max_tokens: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AnswerStream(SamplingParams(), max_tokens, None)
