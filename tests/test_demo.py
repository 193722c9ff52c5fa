"""``pagedattn demo`` and ``pagedattn generate``: what they print, and what they say is wrong.

All but one test run a model of random weights, which answers nonsense in no time.
"""

import io
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from pagedattn import paged
from pagedattn.cli import main
from pagedattn.course import implementations
from pagedattn.course.implementations import Bug
from pagedattn.course.names import NamedTest
from pagedattn.demo import commands, screen
from pagedattn.demo.run import Answer
from pagedattn.model import Llama, Tokenizer
from tests.pictures import blocks_in


def test_generate_prints_answers_and_memory_without_control_codes(generate: Any) -> None:
    status, out, err = generate("--prompt", "One", "--prompt", "[red]Two", "--max-new-tokens", "5")
    assert (status, err) == (0, "")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", out)
    assert "[red]Two" in out
    for name in "AB":
        assert len(re.findall(rf"^ {name}  ", out, re.M)) == 3  # prompt, answer, block table
    assert "check_invariants: all is well" in out


def test_a_terminal_gets_panels_and_no_color_is_obeyed(
    tiny_model: tuple[Llama, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    outputs = []
    for no_color in (False, True):
        console = Console(
            file=io.StringIO(),
            force_terminal=True,
            no_color=no_color,
            color_system="truecolor",
            width=80,
        )
        assert commands.demo(console, *tiny_model, max_new_tokens=4) == 0
        outputs.append(console.file.getvalue())  # type: ignore[attr-defined]
    coloured, uncoloured = outputs
    colour = re.compile(r"\x1b\[[0-9;]*(?:3[0-8]|4[0-8]);")
    assert "╭" in coloured and colour.search(coloured)
    assert "╭" in uncoloured and not colour.search(uncoloured)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompt", "Hello", "--prompt", ""], "prompt B is empty"),
        (["--prompt", "Hi", "--max-new-tokens", "500"], "prompt A has"),
        (["--max-new-tokens", "0"], "'0' is not a whole number of at least 1"),
        (["--block-size", "-3"], "'-3' is not a whole number of at least 1"),
        (["--max-new-tokens", "99999999"], "max_seq_len 512"),
        (["--max-new-tokens", "99999999", "--bug", "frees_twice"], "max_seq_len 512"),
        (["--num-blocks", "1"], "num_blocks is 1"),
        (["--temperature", "-1"], "-1"),
        (["--seed", "-1"], "-1"),
        (["--top-p", "0"], "top_p must be above 0 and at most 1, got 0.0"),
        (["--stop", ""], "stop must hold strings of at least one character"),
        (["--min-tokens", "49"], "--min-tokens 49 is more than --max-new-tokens 48"),
        (["--stage", "99"], "unknown stage 99"),
        (["--bug", "nobody_wrote_it"], "unknown bug nobody_wrote_it"),
        (["--impl", "nowhere.py"], "nowhere.py"),
        (["--stage", "02", "--bug", "frees_twice"], "not allowed with"),
        (["--prompt", "x"] * 53, "53 prompts"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(
    generate: Any, options: list[str], words: str
) -> None:
    status, _, err = generate(*options)
    assert status == 2 and words in err.splitlines()[-1] and "Traceback" not in err


@pytest.mark.parametrize("options", [["--num-blocks"], ["--bug", "frees_twice", "--block-size"]])
@pytest.mark.parametrize("number", ["99999999999", "9" * 30])
def test_more_blocks_than_the_memory_holds(
    generate: Any, monkeypatch: pytest.MonkeyPatch, options: list[str], number: str
) -> None:
    """The answer comes before a single block is made: a pool of so many would take hours."""
    monkeypatch.delattr(paged.BlockPool, "__init__")
    status, _, err = generate("--prompt", "Hi", "--max-new-tokens", "2", *options, number)
    assert status == 2 and number in err
    assert "are more than this machine's memory holds" in err


def test_a_model_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", "nowhere.gguf", "--prompt", "Hi"]) == 2
    assert "nowhere.gguf" in capsys.readouterr().err


def text_of(tokenizer: Tokenizer, num_tokens: int) -> str:
    text = "a" + " a" * (num_tokens - 1)
    assert len(tokenizer.encode(text)) == num_tokens
    return text


def raw_prompts(tokenizer: Tokenizer, *lengths: int) -> list[str]:
    prompts = [("--prompt", text_of(tokenizer, length)) for length in lengths]
    return ["--raw", "--block-size", "4", *(word for pair in prompts for word in pair)]


def test_a_pool_too_small_for_the_prompts(generate: Any, tiny_model: Any) -> None:
    # 6 and 9 tokens need 2 and 3 blocks; 4 of 5 blocks are usable. In the end 6 + 8 and 9 + 8
    # tokens take 4 and 5 blocks, and block 0 makes 10.
    status, _, err = generate(
        *raw_prompts(tiny_model[1], 6, 9), "--num-blocks", "5", "--max-new-tokens", "8"
    )
    assert status == 2
    assert "after 0 steps: A needs 2 and B needs 3, 4 are free; --num-blocks 10 is enough" in err


def test_a_pool_too_small_for_the_answers(generate: Any, tiny_model: Any) -> None:
    # 6 and 9 tokens take 2 + 3 of 6 blocks. Step 3 stores A's token at position 7, step 4 opens
    # A's third block, the last one; step 5 stores B's token 12, the first of a fourth block.
    status, out, err = generate(
        *raw_prompts(tiny_model[1], 6, 9), "--num-blocks", "7", "--max-new-tokens", "8"
    )
    assert status == 2
    assert "after 4 steps: B needs 1, 0 are free; --num-blocks 10 is enough" in err
    bars = blocks_in(out)
    assert " ".join(bars.values()) == "//// AAAA AAAA BBBB BBBB BBBB A..."


def test_an_arena_too_small(generate: Any, tiny_model: Any) -> None:
    # Slabs of 6 + 8 = 14 and 9 + 8 = 17 slots in 6 blocks of 4.
    status, _, err = generate(
        *raw_prompts(tiny_model[1], 6, 9),
        *("--num-blocks", "7", "--max-new-tokens", "8", "--stage", "01"),
    )
    assert status == 2
    assert "out of slots after 0 steps: B needs 17, 10 are free" in err


def test_the_default_is_enough_on_every_stage(generate: Any, tiny_model: Any) -> None:
    for stage in ("01", "02", "03", "04", "06"):
        options = [*raw_prompts(tiny_model[1], 6, 8), "--max-new-tokens", "8", "--stage", stage]
        assert generate(*options)[0] == 0


def edited(folder: Path, old: str, new: str) -> str:
    """Chapter 02 in a file of its own, with one edit."""
    source = Path(paged.__file__).read_text()
    assert source.count(old) == 1
    path = folder / "mine.py"
    path.write_text(source.replace(old, new))
    return str(path)


def test_unfinished_work_is_to_do(generate: Any, tmp_path: Path) -> None:
    old = "    real = (slot_mapping >= 0).nonzero()[:, 0]\n"
    path = edited(tmp_path, old, '    raise NotImplementedError("task 2.3: write K and V")\n' + old)
    status, _, err = generate("--impl", path, "--prompt", "Hi")
    assert status == 2 and err == "to do: task 2.3: write K and V\n"


def test_a_broken_invariant_is_shown_with_the_pool(generate: Any, tmp_path: Path) -> None:
    old = "            block.ref_cnt = 0\n"
    path = edited(tmp_path, old, "            block.ref_cnt -= 0\n")
    status, out, err = generate("--impl", path, "--prompt", "Hi", "--max-new-tokens", "2")
    assert (status, err) == (1, "")
    assert "check_invariants, after the end: I1: block 1 has ref_cnt 1" in " ".join(out.split())
    assert out.count(" 0[////////]") + out.count("\n0[////////]") == 2  # fullest, and broken


def test_an_error_in_a_given_file_is_shown_with_its_line(
    generate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")  # no line is wrapped
    old = "    block_size = k_cache.shape[1]\n    block_ids, offsets"
    path = edited(tmp_path, old, f"    k_cache.shape[7]\n{old}")
    before = Path(path).read_text().partition("k_cache.shape[7]")[0]
    status, out, err = generate("--impl", path, "--prompt", "Hi")
    assert (status, err) == (1, "")
    line = before.count("\n") + 1
    assert f"mine.py, line {line}, in write_kv: IndexError: tuple index out of range" in out


def with_bug(monkeypatch: pytest.MonkeyPatch, apply: Callable[[Any], None]) -> None:
    """A bug called ``mine`` in chapter 02."""
    test = NamedTest(Path("test_x.py"), "test_y")
    bug = Bug("mine", Path("mine.py"), "02", "story", "Symptom.", (test,), apply)
    for module in (commands, implementations):
        monkeypatch.setattr(module, "load_bugs", lambda root: {"mine": bug})


def test_a_bug_shows_where_answers_change(generate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(stage: Any) -> None:
        stage.paged_attention = lambda q, *rest: torch.zeros_like(q)

    with_bug(monkeypatch, apply)
    status, out, err = generate("--bug", "mine", "--prompt", "Hi", "--max-new-tokens", "6")
    assert (status, err) == (0, "")
    assert "bug mine: Symptom." in out and "answer A changed after" in out
    bad, good = re.findall(r"  (?:with the bug|without it): (.*)", out)
    assert bad != good


def test_a_bug_that_does_not_show_names_its_tests(
    generate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_bug(monkeypatch, lambda stage: None)
    status, out, _ = generate("--bug", "mine", "--prompt", "Hi", "--max-new-tokens", "2")
    assert status == 0
    assert "as without the bug: A" in out and "chapters/02/test_x.py::test_y" in out


def shown_changes(tokenizer: Tokenizer, answers: Iterable[Answer], healthy: list[list[int]]) -> str:
    console = Console(file=io.StringIO(), width=100, color_system=None)
    screen.show_changes(console, tokenizer, list(answers), healthy)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_changed_answers_by_hand(tiny_model: tuple[Llama, Tokenizer]) -> None:
    tokenizer = tiny_model[1]
    one, two, three = (tokenizer.encode(text)[0] for text in (" one", " two", " three"))
    answers = [
        Answer("A", "", [], [one, two, three], "", "length"),
        Answer("B", "", [], [one, two, two], "", "length"),
        Answer("C", "", [], [one], "", "stop"),
        Answer("D", "", [], [one, two], "", None),  # the run broke off
    ]
    text = shown_changes(tokenizer, answers, [[one, two, three]] * 4)
    assert "answer B changed after 2 tokens" in text
    assert "with the bug:  one two two" in text and "without it:  one two three" in text
    assert "answer C changed after 1 tokens" in text
    assert "as without the bug: A and D" in text


def test_text_cannot_steer_the_terminal() -> None:
    assert screen.printable("a\x1b[31mb\x07\nc\u200bd") == "a [31mb \nc d"


def test_sampled_answers_repeat_with_the_seed(generate: Any) -> None:
    options = ("--prompt", "Hi", "--temperature", "1.5", "--max-new-tokens", "8", "--seed")
    answers = [
        re.findall(r"^ A  .*", generate(*options, seed)[1], re.M)[1] for seed in ("5", "5", "6")
    ]
    assert answers[0] == answers[1] != answers[2]


def test_a_stop_string_cuts_the_answer(generate: Any) -> None:
    options = ("--prompt", "Hi", "--max-new-tokens", "6")
    (text,) = re.findall(r"^ A  (.+)  \(6 tokens, cut here\)", generate(*options)[1], re.M)
    stop = text[8:12]
    out = generate(*options, "--stop", "nowhere", "--stop", stop)[1]
    (cut,) = re.findall(r"^ A  (.+)  \([1-6] tokens, done\)", out, re.M)
    assert cut == text[: text.index(stop)].strip()


def test_demo_end_to_end(real_model: tuple[Llama, Tokenizer]) -> None:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    assert commands.demo(console, *real_model, max_new_tokens=8) == 0
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "The capital of France is Paris." in text
    # One slot of SmolLM2: 2 x 30 layers x 3 heads x 64 numbers x 4 bytes; 4 x 8192 of them.
    assert "46,080" in text and "1,440.0 MiB" in text
    first, _, rest = text.partition("Now 3 answers to prompt D")
    second, _, third = rest.partition("Last, two questions")
    assert {bar[0] for bar in blocks_in(first).values()} >= set("/ABCD")
    assert "abcabc" in second and "sharing saves" in second
    # 131 tokens are 8 full blocks; the questions begin in the eighth.
    assert "You may borrow five" in third
    assert "112 of the 131 tokens of F were in the cache, in blocks 1 2 3 4 5 6 7" in third


def test_the_demo_of_a_beam_search(tiny_model: tuple[Llama, Tokenizer]) -> None:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    assert commands.demo(console, *tiny_model, max_new_tokens=4, samples=0, beams=2) == 0
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "Now 2 answers to prompt D, the best that a beam search finds" in text
    assert text.count("[score ") == 2 and "sharing saves" in text
