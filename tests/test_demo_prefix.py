"""The demo's last part: what it says of hits, and where it draws them."""

import io
import re

import pytest
from rich.console import Console

from pagedattn import prefix
from pagedattn.demo import prefixes
from pagedattn.demo.run import Answer, config_for
from pagedattn.model import Llama, SamplingParams, Tokenizer
from pagedattn.viz.state import PoolState
from tests.pictures import blocks_in

BLOCK_SIZE = 4


def run_in_turn(model: Llama, tokenizer: Tokenizer, *prompts: list[int]) -> prefixes.RunInTurn:
    cache = prefix.build_cache(config_for(model, BLOCK_SIZE, 20))
    answers = [Answer(letter, "", ids) for letter, ids in zip("EFG", prompts, strict=False)]
    params = [SamplingParams()] * len(answers)
    return prefixes.RunInTurn(model, tokenizer, cache, answers, 3, params)


def test_each_prompt_finds_what_those_before_it_left(tiny_model: tuple[Llama, Tokenizer]) -> None:
    beginning = list(range(100, 110))
    run = run_in_turn(*tiny_model, [*beginning, 7], [*beginning, 8], beginning)
    tokens = list(run.tokens())
    assert {token.index for token in tokens} == {0, 1, 2}
    # Of 10 common tokens 8 fill blocks of 4. The third prompt has 10 tokens itself.
    assert [first.num_cached_tokens for first in run.first_tokens] == [0, 8, 8]
    assert isinstance(run.last, PoolState)
    hits = [block for block in run.last.blocks if block.is_hit]
    assert [[owner.name for owner in block.owners] for block in hits] == [["G"], ["G"]]


def test_answers_are_those_of_a_cache_that_finds_nothing(
    tiny_model: tuple[Llama, Tokenizer],
) -> None:
    beginning = list(range(100, 121))
    prompts = [[*beginning, 7], [*beginning, 8, 9]]
    together = run_in_turn(*tiny_model, *prompts)
    alone = [run_in_turn(*tiny_model, prompt) for prompt in prompts]
    for run in (together, *alone):
        list(run.tokens())
    assert together.first_tokens[1].num_cached_tokens == 20
    answers = [answer.token_ids for run in alone for answer in run.answers]
    assert [answer.token_ids for answer in together.answers] == answers


@pytest.mark.parametrize("width", [80, 120])
def test_the_second_question_is_drawn_on_the_blocks_of_the_first(
    tiny_model: tuple[Llama, Tokenizer], width: int
) -> None:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    assert prefixes.demo_prefix(console, *tiny_model, max_new_tokens=4, block_size=16)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    bars = blocks_in(text.partition("The pool of blocks")[2])
    ticked = [int(number) for number in re.findall(r"(\d+)\[F+\]✓", text)]
    sentence = re.search(r"(\d+) of the (\d+) tokens of F were in the cache, in blocks (.*)", text)
    assert sentence and sentence[3] == " ".join(map(str, ticked))
    num_cached, num_tokens = int(sentence[1]), int(sentence[2])
    assert num_cached == 16 * len(ticked) and 0 < num_cached < num_tokens
    # Two rows: of E nothing was there, of F the rest was computed.
    rows = re.findall(r"^ ([EF]) +(\d+) +(\d+) +(\d+) +\d+\.\d\d s", text, re.M)
    assert [row[0] for row in rows] == ["E", "F"] and rows[0][2] == "0"
    assert rows[1][1:] == (str(num_tokens), str(num_cached), str(num_tokens - num_cached))
    # What E computed after the common beginning is free, and can be found.
    assert any(bar.startswith("#") for bar in bars.values())
    assert "check_invariants: all is well" in text
