"""The demo's last part: a second question finds the beginning of the first one in the cache."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pagedattn import prefix
from pagedattn.demo.run import Answer, Run, config_for, num_blocks_for
from pagedattn.demo.screen import show_answers, show_invariants, show_prompts
from pagedattn.model import Llama, SamplingParams, Token, Tokenizer, generate
from pagedattn.viz.state import PoolState
from pagedattn.viz.terminal import draw_pool, label

INSTRUCTION = (
    "You are the assistant of a small library. It opens at nine and closes at six; on Sundays it "
    "opens at noon. Newspapers and maps are in the cellar, next to the old clock that no longer "
    "works. The garden behind the house has two benches, an apple tree and a view of the river. A "
    "reader may borrow five books for four weeks. A book that comes back late costs ten cents a "
    "day. The reading room is on the second floor, the books for children are on the first. Answer "
    "in one short sentence."
)
QUESTIONS = {"E": "How many books may I borrow?", "F": "What does a late book cost?"}


@dataclass(frozen=True)
class FirstToken:
    """What came before the first token of an answer: prompt tokens that were in the cache already,
    and seconds."""

    num_cached_tokens: int
    seconds: float


@dataclass
class RunInTurn(Run):
    """Answers the prompts one after the other, so that each may find what those before it left."""

    cache: prefix.PagedKVCache
    first_tokens: list[FirstToken] = field(default_factory=list)

    def _stream(self) -> Iterator[Token]:
        for index, answer in enumerate(self.answers):
            prompt = answer.prompt_ids
            num_cached_tokens, _ = self.cache.need(prompt, len(prompt))
            self.last = self._capture()  # nothing runs: what is in use later was computed or found
            start = time.perf_counter()
            for token in generate(
                self.model,
                self.cache,
                [prompt],
                max_new_tokens=self.max_new_tokens,
                sampling_params=self.sampling_params[index],
                tokenizer=self.tokenizer,
                seq_ids=[answer.label],
                on_step=lambda batch: self._watch(),
            ):
                if not answer.token_ids:
                    seconds = time.perf_counter() - start
                    self.first_tokens.append(FirstToken(num_cached_tokens, seconds))
                yield dataclasses.replace(token, index=index)


def demo_prefix(
    console: Console, model: Llama, tokenizer: Tokenizer, max_new_tokens: int, block_size: int
) -> bool:
    """Two questions in turn with one instruction before both. Returns whether all is well."""
    console.print(
        "\nLast, two questions, one after the other, with the same instruction before them:\n"
    )
    console.print(Padding(Text(INSTRUCTION), (0, 4)))
    console.print(
        "\nThe first one's blocks keep their contents when they are free: a free block that\n"
        "can still be found is marked #. The second question finds its beginning in them;\n"
        "the rest, from the first block that differs on, is computed.\n"
        "Chapter 04 builds this: pagedattn/prefix/\n"
    )
    answers = [_ask(tokenizer, name, question) for name, question in QUESTIONS.items()]
    num_blocks = num_blocks_for(answers, max_new_tokens, block_size)
    cache = prefix.build_cache(config_for(model, block_size, num_blocks))
    params = [SamplingParams()] * len(answers)
    run = RunInTurn(model, tokenizer, cache, answers, max_new_tokens, params)
    show_prompts(console, answers)
    show_answers(console, run)
    show_hits(console, run)
    return show_invariants(console, run)


def _ask(tokenizer: Tokenizer, name: str, question: str) -> Answer:
    chat = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": question}]
    return Answer(name, question, tokenizer.encode_chat(chat))


def show_hits(console: Console, run: RunInTurn) -> None:
    """The pool when the last answer ends; and for each prompt what was in the cache, and how
    long its first token took."""
    state, (*_, before, last) = run.last, run.answers
    assert isinstance(state, PoolState)
    words = f"The pool of blocks when {last.label} ends; {before.label} has ended before:"
    console.print(Text(f"\n{words}\n", style="bold"))
    console.print(draw_pool(state))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("prompt")
    for column in ("tokens", "in the cache", "computed", "first token after"):
        table.add_column(column, justify="right")
    for i, (answer, first) in enumerate(zip(run.answers, run.first_tokens, strict=True)):
        num_tokens = len(answer.prompt_ids)
        counts = (num_tokens, first.num_cached_tokens, num_tokens - first.num_cached_tokens)
        name = label(answer.label, i)
        table.add_row(name, *map(str, counts), f"{first.seconds:.2f} s")
    console.print()
    console.print(table)
    hits = " ".join(str(block.block_id) for block in state.blocks if block.is_hit)
    console.print(
        f"\n{run.first_tokens[-1].num_cached_tokens} of the {len(last.prompt_ids)} tokens of "
        f"{last.label} were in the cache, in blocks {hits or 'none'}"
    )
