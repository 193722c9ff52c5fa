"""``pagedattn generate --samples N`` and ``--beams N``: several answers to each prompt, and the
blocks that they share."""

from __future__ import annotations

import dataclasses
import string
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType

from rich import box
from rich.console import Console
from rich.table import Table

from pagedattn.cache import Config, KVCache, OutOfBlocks
from pagedattn.demo.run import Answer, Run, num_blocks_for
from pagedattn.model import Llama, SamplingParams, Token, Tokenizer
from pagedattn.model.beam_search import beam_steps
from pagedattn.model.beams import BeamSearchParams
from pagedattn.model.branching import can_fork
from pagedattn.model.parallel_sampling import sample_in_parallel
from pagedattn.viz.state import OwnerState, PoolState, State, capture

LETTERS = string.ascii_lowercase
SMALL = Config(num_layers=1, num_kv_heads=1, head_dim=1, num_blocks=2, max_seq_len=16)


def add_branch_arguments(parser: ArgumentParser, count: Callable[[str], int]) -> None:
    """``--samples N`` and ``--beams N``; ``count`` reads a whole number of at least 1."""
    branches = parser.add_mutually_exclusive_group()
    add = branches.add_argument
    add("--samples", type=count, metavar="N", help="N answers to each prompt, its memory shared")
    add("--beams", type=count, metavar="N", help="beam search: the N best answers to each prompt")


def check_branches(
    stage: ModuleType, args: Namespace, num_prompts: int, params: SamplingParams
) -> None:
    """Raise ValueError for branches that go with no drawing, or not with the other options, a cache
    that cannot fork among them."""
    num_answers = num_prompts * (args.samples or args.beams or 0)
    if num_answers > len(LETTERS):
        raise ValueError(f"{num_answers} answers; at most {len(LETTERS)} can be told apart")
    if args.samples and args.samples > 1 and params.is_greedy:
        raise ValueError(
            f"at temperature {params.temperature:g} all {args.samples} samples are the same; "
            "give --temperature 0.8, say"
        )
    if args.beams and params != SamplingParams(seed=params.seed):
        raise ValueError("a beam search draws nothing: --beams goes with no option for sampling")
    if num_answers and not _makes_caches_that_fork(stage):
        options = {name: getattr(args, name) for name in ("stage", "impl", "bug")}
        (given,) = (f"--{name} {value}" for name, value in options.items() if value is not None)
        raise ValueError(
            f"branches share blocks, which the caches of chapters 03 to 05 can; not that of {given}"
        )


def _makes_caches_that_fork(stage: ModuleType) -> bool:
    """Whether the caches of a stage can fork, or else fail when they are made: the run will meet
    that error and show where it comes from."""
    try:
        cache = stage.build_cache(SMALL)
    except Exception:
        return True
    return can_fork(cache)


def new_run(
    model: Llama,
    tokenizer: Tokenizer,
    cache: KVCache,
    answers: list[Answer],
    args: Namespace,
    sampling_params: Sequence[SamplingParams],
) -> Run:
    """The run that the options ask for, of these prompts."""
    common = (model, tokenizer, cache)
    rest = (args.max_new_tokens, sampling_params)
    if args.samples:
        return SampleRun(*common, branches(answers, args.samples), *rest, requests=answers)
    if args.beams:
        return BeamRun(*common, branches(answers, args.beams), *rest, requests=answers)
    return Run(*common, answers, *rest)


def branches(requests: Sequence[Answer], count: int) -> list[Answer]:
    """``count`` empty answers to each prompt: a, b, c and so on."""
    prompts = [request for request in requests for _ in range(count)]
    return [
        Answer(letter, request.prompt, request.prompt_ids)
        for letter, request in zip(LETTERS, prompts, strict=False)
    ]


@dataclass
class BranchRun(Run):
    """A run with several answers to each prompt. In its states the branches have one letter each,
    that of their answers; until a prompt is forked, it has its own."""

    requests: list[Answer] = field(default_factory=list)
    copies_when_fullest: int = 0

    @property
    def num_branches(self) -> int:
        """Answers to each prompt."""
        return len(self.answers) // len(self.requests)

    @property
    def num_prompt_tokens(self) -> int:
        """Each prompt is read once."""
        return sum(len(request.prompt_ids) for request in self.requests)

    def _watch(self) -> None:
        super()._watch()
        if self.fullest_step == self.num_steps:
            self.copies_when_fullest = getattr(self.cache, "num_copies", 0)

    def _capture(self) -> State:
        owners: dict[str, tuple[str, int]] = {}
        used = dict.fromkeys((request.label for request in self.requests), 0)
        for seq_id in map(str, self.cache.seq_ids):
            label, _, number = seq_id.partition(".")
            first = list(used).index(label) * self.num_branches
            index = first + self._place(int(number), used[label]) if number else first
            used[label] += 1
            owners[seq_id] = (self.answers[index].label if number else label), index
        return renamed(capture(self.cache), owners)

    def _place(self, number: int, older: int) -> int:
        """Which of its prompt's branches a sequence is, from its number and how many older ones are
        in the cache."""
        raise NotImplementedError

    def _shortage(self, error: OutOfBlocks) -> str:
        enough = num_blocks_for(self.answers, self.max_new_tokens, self.cache.config.block_size)
        return (
            f"out of blocks after {self.num_steps} steps: {error.needed} are needed, {error.free} "
            f"are free; --num-blocks {enough} is enough"
        )


class SampleRun(BranchRun):
    """Parallel sampling."""

    def _place(self, number: int, older: int) -> int:
        return number - 1

    def _stream(self) -> Iterator[Token]:
        tokens = sample_in_parallel(
            self.model,
            self.cache,
            [request.prompt_ids for request in self.requests],
            num_samples=self.num_branches,
            max_new_tokens=self.max_new_tokens,
            sampling_params=self.sampling_params,
            tokenizer=self.tokenizer,
            names=[request.label for request in self.requests],
            on_step=lambda batch: self._watch(),
        )
        for token in tokens:
            yield dataclasses.replace(token, index=token.index * self.num_branches + token.sample)


@dataclass
class BeamRun(BranchRun):
    """Beam search. The answers come at the end of a search, the best first; the beams that run have
    the letters of their ranks at the time."""

    num_chosen: int = 0

    @property
    def num_written(self) -> int:
        """Tokens of all beams that were chosen, those among them that came to nothing."""
        return self.num_chosen

    def _place(self, number: int, older: int) -> int:
        return older

    def tokens(self) -> Iterator[Token]:
        """The last token of each answer, once its search has ended."""
        self.seconds = [time.perf_counter()]
        steps = beam_steps(
            self.model,
            self.cache,
            [request.prompt_ids for request in self.requests],
            BeamSearchParams(width=self.num_branches, max_new_tokens=self.max_new_tokens),
            tokenizer=self.tokenizer,
            names=[request.label for request in self.requests],
            on_step=lambda batch: self._watch(),
        )
        try:
            for step in steps:
                self.num_chosen += len(step.heirs)
                for index, hypotheses in step.results.items():
                    for i, hypothesis in enumerate(hypotheses, index * self.num_branches):
                        answer = self.answers[i]
                        answer.token_ids = list(hypothesis.token_ids)
                        text = self.tokenizer.decode(answer.token_ids).strip()
                        answer.text = f"{text}  [score {hypothesis.score:.3f}]"
                        answer.finish_reason = hypothesis.finish_reason
                        yield Token(i, answer.token_ids[-1], hypothesis.finish_reason)
        except OutOfBlocks as error:
            raise OutOfBlocks(error.needed, error.free, self._shortage(error)) from error


def renamed(state: State, owners: dict[str, tuple[str, int]]) -> State:
    """The state of a pool with other names and colours for its sequences."""
    if not isinstance(state, PoolState):
        return state

    def other(owner: OwnerState) -> OwnerState:
        name, number = owners[owner.name]
        return dataclasses.replace(owner, name=name, number=number)

    return dataclasses.replace(
        state,
        tables=tuple((other(owner), block_ids) for owner, block_ids in state.tables),
        blocks=tuple(
            dataclasses.replace(block, owners=tuple(map(other, block.owners)))
            for block in state.blocks
        ),
    )


def show_sharing(console: Console, run: Run) -> None:
    """For the moment that ``show_memory`` draws: the blocks by the number of their owners, and
    what separate copies would take."""
    state = run.fullest
    if not isinstance(run, BranchRun) or not isinstance(state, PoolState):
        return
    by_count: dict[int, list[str]] = {}
    for block in state.blocks:
        if block.ref_cnt:
            by_count.setdefault(block.ref_cnt, []).append(str(block.block_id))
    used = sum(map(len, by_count.values()))
    separate = sum(len(block_ids) for _, block_ids in state.tables)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("sharing")
    table.add_column("blocks", justify="right")
    table.add_column("")
    for count, block_ids in sorted(by_count.items(), reverse=True):
        words = f"in {count} tables" if count > 1 else "in one table"
        table.add_row(words, str(len(block_ids)), " ".join(block_ids))
    table.rows[-1].end_section = True
    table.add_row("together", str(used), "")
    saved = f"sharing saves {1 - used / separate:.0%}" if separate else ""
    table.add_row("as separate copies", str(separate), saved)
    table.add_row("copied so far", str(run.copies_when_fullest), "copy-on-write, before a write")
    console.print()
    console.print(table)
