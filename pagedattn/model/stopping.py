"""Where an answer ends: end tokens, stop strings in its text, its length.

Tokens meet text here and nowhere else: ``AnswerStream`` takes tokens and gives text that may be
shown. It follows ``check_stop`` of vllm/v1/core/sched/utils.py and ``IncrementalDetokenizer`` of
vllm/v1/engine/detokenizer.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pagedattn.model.sampling_params import SamplingParams
from pagedattn.model.tokenizer import TextStream
from pagedattn.whole_number import at_least_1

FinishReason = Literal["stop", "length"]


class StopStrings:
    """Cuts a text that comes in pieces before the first of its stop strings.

    What ``push`` returns can be shown: it ends before anything that may still become a stop string.
    The result does not depend on how the text is cut into pieces: the string that is complete first
    stops, and of those that end together the longest.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str, *, may_stop: bool = True) -> str:
        """The text that is safe to show now. After a match nothing more comes.

        With ``may_stop`` False a string that ends in this piece does not count; one that begins in
        it may.
        """
        if self.matched is not None:
            return ""
        text = self._held + piece
        if may_stop and (match := self._first_match(text)):
            start, self.matched = match
            self._held = ""
            return text[:start]
        kept = len(text) - self._num_undecided(text)
        self._held = text[kept:]
        return text[:kept]

    def finish(self) -> str:
        """What was held back: the text has ended, so it has become no stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """Where the match begins, and its string. A match ends behind what was held back."""
        found = []
        for stop in self._stop:
            start = text.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        return min(found)[1:] if found else None

    def _num_undecided(self, text: str) -> int:
        """The length of the longest end of the text with which a stop string begins."""
        longest = max(map(len, self._stop), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(len(s) > length and s.startswith(text[-length:]) for s in self._stop):
                return length
        return 0


@dataclass(frozen=True)
class Piece:
    """What one token adds to the text, and whether it is the last of its answer.

    ``finish_reason`` is "stop" after an end token or a stop string, which ``stop_reason`` names,
    "length" after the greatest number of tokens.
    """

    text: str
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class AnswerStream:
    """One answer, token by token: its text, and its end.

    The answer ends, once it has more than ``params.min_tokens`` tokens, with a token of
    ``params.stop_token_ids`` or when a string of ``params.stop`` is complete; and at the latest
    with token number ``max_tokens``. Of two reasons in one token, this order decides.

    End tokens are recognised by their number, shown or not; the text holds neither the end token
    nor the stop string. Without ``text`` it is empty, and ``params.stop`` must be too.

    Raises ValueError for stop strings without text, for ``max_tokens`` that is not whole or below
    1, and for ``min_tokens`` above it.
    """

    def __init__(self, params: SamplingParams, max_tokens: int, text: TextStream | None) -> None:
        max_tokens = at_least_1(max_tokens, "max_tokens")
        if params.stop and text is None:
            raise ValueError(f"stop strings {list(params.stop)} need a tokenizer")
        if params.min_tokens > max_tokens:
            raise ValueError(
                f"min_tokens is {params.min_tokens}, but the answer has at most {max_tokens} tokens"
            )
        self._end_token_ids = frozenset(params.stop_token_ids)
        self._min_tokens, self._max_tokens = params.min_tokens, max_tokens
        self._text = text
        self._stop_strings = StopStrings(params.stop)
        self._num_tokens = 0

    def push(self, token_id: int) -> Piece:
        """The answer's next token. The caller pushes none after the last."""
        self._num_tokens += 1
        may_stop = self._num_tokens > self._min_tokens
        if may_stop and token_id in self._end_token_ids:
            return Piece(self._rest(), "stop", token_id)
        new = self._text.push(token_id) if self._text else ""
        text = self._stop_strings.push(new, may_stop=may_stop)
        if self._stop_strings.matched is not None:
            return Piece(text, "stop", self._stop_strings.matched)
        if self._num_tokens == self._max_tokens:
            return Piece(text + self._rest(), "length")
        return Piece(text)

    def _rest(self) -> str:
        """What waited for more: bytes of an unfinished character, the start of a stop string."""
        unfinished = self._text.finish() if self._text else ""
        return self._stop_strings.push(unfinished, may_stop=False) + self._stop_strings.finish()
