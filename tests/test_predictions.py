"""The questions of a text are those that its notebook asks, with the same answers."""

import re
import tomllib
from pathlib import Path

import pytest

CHAPTERS = sorted((Path(__file__).parents[1] / "chapters").glob("[0-9][0-9]"))
FOLDED = re.compile(r"<details><summary>Answer</summary>\s*(.*?)</details>", re.DOTALL)
NUMBER = re.compile(r"\d[\d,]*\.?\d*")


def numbers(words: str | float) -> list[float]:
    return [float(number.replace(",", "")) for number in NUMBER.findall(str(words))]


@pytest.mark.parametrize("chapter", CHAPTERS, ids=[chapter.name for chapter in CHAPTERS])
def test_text_and_notebook_agree(chapter: Path) -> None:
    questions = tomllib.loads((chapter / "predict.toml").read_text())["question"]
    folded = FOLDED.findall((chapter / "README.md").read_text())
    assert len(folded) == len(questions)
    for question, text in zip(questions, folded, strict=True):
        stated, _, mistake = re.split(r"The\s+usual\s+(mistake|wrong\s+answer)\s+is", text)
        bold = re.search(r"\*\*(.*?)\*\*", stated)
        assert bold, f"{question['id']}: no answer in bold in {text!r}"
        for field, words in (("answer", bold[1]), ("usual_wrong", mistake)):
            expected = numbers(question[field])
            found = numbers(words)[: len(expected)]
            # Texts round to two decimals.
            assert found == pytest.approx(expected, abs=0.005), (
                f"{question['id']}: the text says {words!r}, predict.toml {question[field]}"
            )
