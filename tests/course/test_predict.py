"""Predictions: a guess is kept, then the answer is shown."""

import pytest

from pagedattn.course import chapters
from pagedattn.course.predict import Prediction, Predictions, read_questions

pytest_plugins = ["pytester"]

QUESTIONS = """
[[question]]
id = "slot"
question = "Table `[5, 2, 7]`, block size 4, position 9: which slot?"
unit = "slot"
answer = 29
usual_wrong = 9
why_wrong = "That is the position <itself>."
because = "7 * 4 + 9 % 4"

[[question]]
id = "share"
question = "How much is used?"
unit = "%"
answer = 93.75
usual_wrong = 6.25
why_wrong = "That is what is left."
because = "15 / 16"

[[question]]
id = "copies"
question = "Blocks, and copies?"
unit = "blocks, copies"
answer = "68, 3"
usual_wrong = "256, 0"
why_wrong = "They share."
because = "64 + 4"
"""


@pytest.fixture
def predict(mini, monkeypatch):
    monkeypatch.chdir(mini.root)
    mini.write("chapters/02/predict.toml", QUESTIONS)
    return Predictions("02")


@pytest.mark.parametrize(
    ("question", "guess", "error", "right", "usual"),
    [
        ("slot", 29, "right", True, False),
        ("slot", 27, "off by -2", False, False),
        ("slot", 9, "off by -20", False, True),
        ("share", 94, "right", True, False),
        ("share", 90.0, "off by -3.75", False, False),
        ("share", 6.25, "off by -87.5", False, True),
        ("copies", "68, 3", "right", True, False),
        ("copies", "256, 0", "not right", False, True),
    ],
)
def test_a_guess(predict, question, guess, error, right, usual):
    answer = predict(question, guess)
    assert (answer.error, answer.right, answer.usual) == (error, right, usual)
    assert predict.guesses[question].guess == guess


def test_a_right_guess_is_no_mistake_even_close_to_one():
    (question,) = read_questions(
        """
        [[question]]
        id = "x"
        question = "How much?"
        unit = "%"
        answer = 50.5
        usual_wrong = 51.2
        why_wrong = "no"
        because = "yes"
        """
    ).values()
    close_to_both = Prediction(question, 50.9)
    assert (close_to_both.right, close_to_both.usual) == (True, False)


def test_what_is_shown(predict):
    wrong = predict("slot", 9)
    assert repr(wrong).splitlines() == [
        "question:        Table `[5, 2, 7]`, block size 4, position 9: which slot?",
        "unit:            slot",
        "your guess:      9",
        "answer:          29",
        "result:          off by -20",
        "a usual mistake: That is the position <itself>.",
        "because:         7 * 4 + 9 % 4",
    ]
    page = wrong._repr_html_()
    assert "<code>[5, 2, 7]</code>" in page
    assert "position &lt;itself&gt;." in page
    assert "usual mistake" not in repr(predict("slot", 27))


def test_summary(predict):
    predict("slot", 9)
    predict("slot", 29)
    predict("share", 90)
    assert repr(predict.summary()).splitlines() == [
        "slot:            right",
        "share:           off by -3.75",
        "in all:          1 right, 2 guessed, 3 asked",
    ]
    assert "2 guessed" in predict.summary()._repr_html_()


def test_wrong_use(predict, mini):
    with pytest.raises(ValueError, match="unknown question 'slots'; known: slot, share, copies"):
        predict("slots", 3)
    with pytest.raises(ValueError, match=r"'slot' asks for a number \(slot\), not '29'"):
        predict("slot", "29")
    with pytest.raises(ValueError, match="asks for words"):
        predict("copies", 68)
    assert predict.guesses == {}
    with pytest.raises(ValueError, match="unknown chapter '2'; known: 01, 02"):
        Predictions("2")
    with pytest.raises(ValueError, match=r"there is no .*chapters/01/predict\.toml"):
        Predictions("01")


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('id = "share"', 'id = "slot"', "question slot: the id is used twice"),
        ('because = "64 + 4"', "", "question copies: because is missing"),
        ('because = "64 + 4"', 'because = ""\nx = 1', "question copies: x is unknown"),
        ("usual_wrong = 9", "usual_wrong = 29", "question slot: the usual wrong answer is the"),
    ],
)
def test_mistakes_in_the_file(old, new, why):
    with pytest.raises(ValueError, match=why):
        read_questions(QUESTIONS.replace(old, new, 1))


def test_without_a_checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(chapters, "__file__", str(tmp_path / "pagedattn/course/chapters.py"))
    with pytest.raises(ValueError, match="needs a checkout of the repository"):
        Predictions("02")
