"""``pagedattn generate --samples N`` and ``--beams N``: what they print, and what they refuse."""

import re
from typing import Any

import pytest

from pagedattn.demo import commands
from tests.pictures import blocks_in

HOT = ("--temperature", "1.5", "--seed", "3")
RAW = ("--raw", "--block-size", "4", "--max-new-tokens", "6")


def sharing_in(out: str) -> dict[str, int]:
    """The table of ``show_sharing``: words and blocks."""
    table = out.partition("sharing  ")[2]
    return {words: int(n) for words, n in re.findall(r"^([a-z][a-z\d ]+?)  +(\d+)\b", table, re.M)}


def answers_in(out: str) -> list[tuple[str, str]]:
    text = out.partition("each when it ends:")[2]
    return re.findall(r"^ ([a-z])  (.*?)  \(\d+ tokens", text, re.M | re.S)


def test_samples_share_the_blocks_of_their_prompt(generate: Any) -> None:
    """A prompt of 6 tokens in blocks of 4, three samples of 6. In the end each has 11 stored
    tokens: one shared block, and two of its own, the first of them a copy, or for the last sample
    the original. Together 7 blocks; separate copies are 3 each."""
    status, out, err = generate("--prompt", "a a a a a a", "--samples", "3", *HOT, *RAW)
    assert (status, err) == (0, "")
    assert sorted(blocks_in(out).values()) == sorted(
        ["////", "abca", *("aaaa", "aaa."), *("bbbb", "bbb."), *("cccc", "ccc."), "    ", "    "]
    )
    assert sharing_in(out) == {
        "in 3 tables": 1,
        "in one table": 6,
        "together": 7,
        "as separate copies": 9,
        "copied so far": 2,
    }
    assert "sharing saves 22%" in out  # 2 of 9
    assert "6 prompt tokens read" in out and "18 tokens written" in out
    assert "check_invariants: all is well after each of 6 steps" in out
    assert "Then 36 of 36 slots are free" in out


def test_samples_of_two_prompts_have_letters_of_their_own(generate: Any) -> None:
    prompts = ("--prompt", "a a a", "--prompt", "b b b b b")
    _, out, _ = generate(*prompts, "--samples", "2", *HOT, *RAW)
    assert sorted(letter for letter, _ in answers_in(out)) == ["a", "b", "c", "d"]
    assert len({text for _, text in answers_in(out)}) == 4
    bars = blocks_in(out).values()
    # 5 tokens: one full block in two tables. 3 tokens: no full block, so nothing stays shared.
    assert "cdcd" in bars and not any({"a", "b"} <= set(bar) for bar in bars)
    again = generate(*prompts, "--samples", "2", *HOT, *RAW)[1]
    assert answers_in(again) == answers_in(out)


def test_beams_come_with_scores_the_best_first(generate: Any) -> None:
    status, out, err = generate("--prompt", "a a a a a a", "--beams", "4", *RAW)
    assert (status, err) == (0, "")
    answers = answers_in(out)
    assert [letter for letter, _ in answers] == ["a", "b", "c", "d"]
    scores = [float(re.findall(r"score\s+(-\d+\.\d+)", text)[0]) for _, text in answers]
    assert scores == sorted(scores, reverse=True)
    counts = sharing_in(out)
    assert counts["as separate copies"] == 12 and 3 < counts["together"] < 12
    # The prompt's last block is not full: at least three of four beams copy it.
    assert counts["copied so far"] >= 3
    assert "Then 48 of 48 slots are free" in out


def test_a_bug_shows_in_the_samples(generate: Any) -> None:
    options = ("--prompt", "a a a a a a", "--samples", "2", *HOT, *RAW)
    status, out, err = generate(*options, "--bug", "forgets_to_copy")
    assert (status, err) == (0, "")
    assert re.search(r"answer [ab] changed after \d tokens", out)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--samples", "2", "--beams", "2"], "not allowed with"),
        (["--samples", "0", *HOT], "'0' is not a whole number of at least 1"),
        (["--beams", "-1"], "'-1' is not a whole number of at least 1"),
        (["--samples", "2"], "at temperature 0 all 2 samples are the same"),
        (["--beams", "2", *HOT], "--beams goes with no option for sampling"),
        (["--beams", "2", "--stop", "x"], "--beams goes with no option for sampling"),
        (["--beams", "27", "--prompt", "x"], "27 answers; at most 26"),
        (["--samples", "7", *HOT], "28 answers; at most 26"),
        (["--samples", "2", *HOT, "--num-blocks", "2"], "are free; --num-blocks"),
        (["--beams", "3", "--prompt", "x", "--num-blocks", "4"], "are free; --num-blocks"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(
    generate: Any, options: list[str], words: str
) -> None:
    status, _, err = generate(*options)
    assert status == 2 and words in err.splitlines()[-1] and "Traceback" not in err


@pytest.mark.parametrize("branches", [["--samples", "2", *HOT], ["--beams", "2"]])
@pytest.mark.parametrize(
    "code",
    [
        "--stage 01",
        "--stage 02",
        "--stage 06",
        "--bug frees_twice",
        "--impl chapters/01/exercise.py",
        "--impl chapters/02/exercise.py",
    ],
)
def test_a_cache_that_cannot_fork_is_refused_before_the_model_is_loaded(
    generate: Any, monkeypatch: pytest.MonkeyPatch, branches: list[str], code: str
) -> None:
    monkeypatch.delattr(commands, "load_model")
    status, out, err = generate(*code.split(), *branches)
    assert (status, out) == (2, "")
    assert err.splitlines() == [
        "pagedattn: error: branches share blocks, which the caches of chapters 03 to 05 can; "
        f"not that of {code}"
    ]


def test_unfinished_forks_are_to_do_and_no_reason_to_refuse(generate: Any) -> None:
    impl = ("--impl", "chapters/03/exercise.py")
    status, _, err = generate("--prompt", "a a", "--samples", "2", *HOT, *RAW, *impl)
    assert status == 2 and err.startswith("to do: task 3.")


def test_the_advice_of_a_pool_too_small_is_enough(generate: Any) -> None:
    options = ("--prompt", "a a a a a a", "--samples", "3", *HOT, *RAW)
    status, _, err = generate(*options, "--num-blocks", "6")
    assert status == 2
    (enough,) = re.findall(r"--num-blocks (\d+) is enough", err)
    assert generate(*options, "--num-blocks", enough)[0] == 0
