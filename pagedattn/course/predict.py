"""Predictions: a guess first, then the answer, the error, and why.

    predict = Predictions("02")
    predict("slot", 27)

The questions of a chapter stand in its `predict.toml`. Nothing is written to disk.
"""

import html
import math
import re
import tomllib
from dataclasses import dataclass
from typing import Any

from pagedattn.course.chapters import STAGES, find_root

_FIELDS = {"id", "question", "unit", "answer", "usual_wrong", "why_wrong", "because"}
_CLOSE = 0.01  # a guess of a number that is not whole may be off by 1 %


@dataclass(frozen=True)
class Question:
    """One question. `answer` and `usual_wrong` are numbers, or words where no number will do."""

    id: str
    question: str
    unit: str
    answer: Any
    usual_wrong: Any
    why_wrong: str
    because: str


@dataclass(frozen=True)
class Prediction:
    """A guess and its answer; shows itself in a notebook and in a terminal."""

    question: Question
    guess: Any

    @property
    def right(self) -> bool:
        return _same(self.guess, self.question.answer)

    @property
    def usual(self) -> bool:
        """Whether the guess is the mistake that most people make."""
        return not self.right and _same(self.guess, self.question.usual_wrong)

    @property
    def error(self) -> str:
        """How far off the guess is, in words."""
        if self.right:
            return "right"
        if not _is_number(self.question.answer):
            return "not right"
        return f"off by {_number(self.guess - self.question.answer, '+')}"

    def _rows(self) -> list[tuple[str, str]]:
        question = self.question
        rows = [
            ("question", question.question),
            ("unit", question.unit),
            ("your guess", _number(self.guess)),
            ("answer", _number(question.answer)),
            ("result", self.error),
            ("because", question.because),
        ]
        if self.usual:
            rows.insert(5, ("a usual mistake", question.why_wrong))
        return [(label, text.strip()) for label, text in rows]

    def __repr__(self) -> str:
        return "\n".join(f"{label + ':':<17}{text}" for label, text in self._rows())

    def _repr_html_(self) -> str:
        return _table(self._rows())


class Predictions:
    """The questions of one chapter, and the guesses made so far: the last one of each."""

    def __init__(self, chapter: str) -> None:
        if chapter not in STAGES:
            raise ValueError(f"unknown chapter {chapter!r}; known: {', '.join(STAGES)}")
        path = find_root() / "chapters" / chapter / "predict.toml"
        if not path.is_file():
            raise ValueError(f"there is no {path}")
        self.questions = read_questions(path.read_text(encoding="utf-8"))
        self.guesses: dict[str, Prediction] = {}

    def __call__(self, id: str, guess: Any) -> Prediction:
        """Records a guess, then shows the answer.

        Raises ValueError for an unknown question, or a guess that is no number where one is asked.
        """
        if id not in self.questions:
            raise ValueError(f"unknown question {id!r}; known: {', '.join(self.questions)}")
        question = self.questions[id]
        if _is_number(question.answer) != _is_number(guess):
            kind = "a number" if _is_number(question.answer) else "words"
            raise ValueError(f"question {id!r} asks for {kind} ({question.unit}), not {guess!r}")
        self.guesses[id] = Prediction(question, guess)
        return self.guesses[id]

    def summary(self) -> "Summary":
        """All guesses side by side."""
        return Summary(len(self.questions), tuple(self.guesses.values()))


@dataclass(frozen=True)
class Summary:
    """How the guesses of a chapter went."""

    num_questions: int
    predictions: tuple[Prediction, ...]

    def _rows(self) -> list[tuple[str, str]]:
        right = sum(prediction.right for prediction in self.predictions)
        score = f"{right} right, {len(self.predictions)} guessed, {self.num_questions} asked"
        return [*((p.question.id, p.error) for p in self.predictions), ("in all", score)]

    def __repr__(self) -> str:
        return "\n".join(f"{label + ':':<17}{text}" for label, text in self._rows())

    def _repr_html_(self) -> str:
        return _table(self._rows())


def read_questions(text: str) -> dict[str, Question]:
    """The questions of a `predict.toml` by id.

    Raises ValueError for a field that is missing or unknown and for an id used twice.
    """
    questions: dict[str, Question] = {}
    for fields in tomllib.loads(text).get("question", []):
        label = f"question {fields.get('id', 'without an id')}"
        if wrong := fields.keys() ^ _FIELDS:
            name = min(wrong)
            raise ValueError(f"{label}: {name} is {'unknown' if name in fields else 'missing'}")
        if fields["id"] in questions:
            raise ValueError(f"{label}: the id is used twice")
        if _same(fields["answer"], fields["usual_wrong"]):
            raise ValueError(f"{label}: the usual wrong answer is the answer")
        questions[fields["id"]] = Question(**fields)
    return questions


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _same(guess: Any, answer: Any) -> bool:
    if _is_number(guess) and isinstance(answer, float) and not answer.is_integer():
        return math.isclose(guess, answer, rel_tol=_CLOSE)
    return bool(guess == answer)


def _number(value: Any, sign: str = "") -> str:
    if not _is_number(value):
        return str(value)
    return f"{value:{sign},}" if isinstance(value, int) else f"{value:{sign},.5g}"


def _table(rows: list[tuple[str, str]]) -> str:
    """Rows as HTML that reads on a light and on a dark page; `code` in backticks."""
    cells = "".join(
        f'<tr><th style="text-align: left">{html.escape(label)}</th>'
        f'<td style="text-align: left">{_code(html.escape(text))}</td></tr>'
        for label, text in rows
    )
    return f"<table>{cells}</table>"


def _code(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
