"""``pagedattn demo`` and ``pagedattn generate``."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from dataclasses import fields
from io import TextIOWrapper
from pathlib import Path
from types import ModuleType

import torch
from rich.console import Console
from rich.text import Text

from pagedattn import paged, sharing
from pagedattn.cache import OutOfBlocks
from pagedattn.course.chapters import STAGES, find_root
from pagedattn.course.implementations import Bug, load_bugs, load_stage, resolve_stage
from pagedattn.course.tasks import unfinished_task
from pagedattn.demo.branches import (
    add_branch_arguments,
    check_branches,
    new_run,
    show_sharing,
)
from pagedattn.demo.failure import where_it_failed
from pagedattn.demo.prefixes import demo_prefix
from pagedattn.demo.run import LABELS, Answer, Run, config_for, num_blocks_for, prepare
from pagedattn.demo.screen import (
    busy,
    show_answers,
    show_changes,
    show_failure,
    show_invariants,
    show_memory,
    show_pool,
    show_prompts,
    show_speed,
)
from pagedattn.model import (
    Llama,
    SamplingParams,
    Tokenizer,
    default_model_path,
    load_model,
)
from pagedattn.model.guards import check_prompts
from pagedattn.model.valid_text import check_text

PROMPTS = (
    "Why is the sky blue?",
    "What is the capital of France?",
    "Continue this story. A librarian had one very long shelf. Every reader was given a stretch of "
    "it, wide enough for all the books that this reader might ever bring. Most of them brought "
    "only a few, and soon half of the shelf stood empty, yet there was no room for anybody new. "
    "One morning the librarian had an idea.",
    "Write a short poem about the sea.",
)
SAMPLING_PARAMS = {field.name for field in fields(SamplingParams)}
NEW_TOKENS = 48
BLOCK_SIZE = 16


def add_demo_arguments(parser: ArgumentParser) -> None:
    """The options of ``pagedattn demo``: how the answers of its second part branch."""
    add_branch_arguments(parser, _count)


def run_demo(args: Namespace) -> int:
    """Answer four prompts at once through the paged cache of chapter 02, then one of them several
    times through the sharing cache of chapter 03, then two that begin alike through the cache of
    chapter 04, and draw their memory."""
    console = _new_console()
    console.print(
        "A small language model answers four prompts at once. Its memory of them, the\n"
        "KV cache, lies in the pages that chapter 02 builds: pagedattn/paged.py\n"
    )
    samples = args.samples or (0 if args.beams else 3)
    return demo(console, *_load(console, None), samples=samples, beams=args.beams)


def demo(
    console: Console,
    model: Llama,
    tokenizer: Tokenizer,
    max_new_tokens: int = NEW_TOKENS,
    samples: int = 3,
    beams: int | None = None,
) -> int:
    """The demo, once the model is there."""
    answers = prepare(tokenizer, PROMPTS)
    num_blocks = num_blocks_for(answers, max_new_tokens, BLOCK_SIZE)
    cache = paged.build_cache(config_for(model, BLOCK_SIZE, num_blocks))
    params = [SamplingParams() for _ in answers]
    run = Run(model, tokenizer, cache, answers, max_new_tokens, params)
    show_prompts(console, answers)
    show_answers(console, run)
    show_speed(console, run)
    show_memory(console, run)
    sound = show_invariants(console, run)
    options = Namespace(samples=samples, beams=beams, max_new_tokens=(max_new_tokens + 1) // 2)
    sound &= _demo_sharing(console, model, tokenizer, options)
    sound &= demo_prefix(console, model, tokenizer, options.max_new_tokens, BLOCK_SIZE)
    return 0 if sound else 1


def _demo_sharing(console: Console, model: Llama, tokenizer: Tokenizer, options: Namespace) -> bool:
    """Several answers to the last prompt, and the blocks that they share. Returns whether all is
    well."""
    requests = prepare(tokenizer, PROMPTS)[-1:]
    count = options.samples or options.beams
    how = "the best that a beam search finds" if options.beams else "drawn at random"
    console.print(
        f"\nNow {count} answers to prompt {requests[0].label}, {how}.\n"
        "They share the blocks of the prompt, which is computed once. Chapter 03 builds\n"
        "this: pagedattn/sharing.py\n"
    )
    num_blocks = num_blocks_for(requests * count, options.max_new_tokens, BLOCK_SIZE)
    cache = sharing.build_cache(config_for(model, BLOCK_SIZE, num_blocks))
    params = [SamplingParams(temperature=0.8, seed=0)]
    run = new_run(model, tokenizer, cache, requests, options, params)
    show_answers(console, run)
    show_pool(console, run)
    show_sharing(console, run)
    return show_invariants(console, run)


def add_generate_arguments(parser: ArgumentParser) -> None:
    """The options of ``pagedattn generate``."""
    add = parser.add_argument
    add("--prompt", action="append", metavar="TEXT", help="repeatable (default: the demo's four)")
    add("--model", type=Path, metavar="PATH", help="a GGUF file or a folder (default: SmolLM2)")
    add("--max-new-tokens", type=_count, default=NEW_TOKENS, metavar="N", help="of each answer")
    _add_sampling_arguments(parser)
    add("--block-size", type=_count, default=BLOCK_SIZE, metavar="N", help="slots of a block")
    add("--num-blocks", type=_count, metavar="N", help="block 0 included (default: just enough)")
    add_branch_arguments(parser, _count)
    add("--raw", action="store_true", help="continue the text as it is, without a chat template")
    code = parser.add_mutually_exclusive_group()
    code.add_argument("--stage", metavar="NN", help="the library's cache of this chapter")
    code.add_argument("--impl", type=Path, metavar="PATH", help="the cache in this file or package")
    code.add_argument("--bug", metavar="NAME", help="a cache with this bug, and what it changes")


def _add_sampling_arguments(parser: ArgumentParser) -> None:
    """Options named like the fields of ``SamplingParams``."""
    add = parser.add_argument_group("how tokens are chosen, and where an answer ends").add_argument
    add("--temperature", type=float, default=0.0, metavar="T", help="0: the likeliest token")
    add("--seed", type=int, default=0, metavar="S", help="for temperatures above 0")
    add("--top-k", type=int, default=0, metavar="K", help="only the K likeliest tokens")
    add("--top-p", type=float, default=1.0, metavar="P", help="only the likeliest, up to this sum")
    add("--min-p", type=float, default=0.0, metavar="P", help="only this share of the likeliest's")
    for name, words in (
        ("repetition", "above 1: against tokens of prompt and answer"),
        ("frequency", "against tokens of the answer, for each time"),
        ("presence", "against tokens of the answer, once"),
    ):
        default = 1.0 if name == "repetition" else 0.0
        add(f"--{name}-penalty", type=float, default=default, metavar="X", help=words)
    add("--min-tokens", type=int, default=0, metavar="N", help="no answer ends before")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before it; repeatable")


def run_generate(args: Namespace) -> int:
    """Answer prompts on the cache that was asked for, and draw its memory.

    Returns 1 when a file given with ``--impl`` broke: its error, or the invariant, stands on the
    screen. Raises ValueError for wrong input, OutOfBlocks when the pool is too small,
    NotImplementedError for a task that is still to do.
    """
    stage = resolve_stage(args.stage, args.impl, args.bug)
    if not hasattr(stage, "build_cache"):
        raise ValueError(f"{args.impl} has no function build_cache(config)")
    prompts = args.prompt or PROMPTS
    if len(prompts) > len(LABELS):
        raise ValueError(f"{len(prompts)} prompts; at most {len(LABELS)} can be told apart")
    for label, prompt in zip(LABELS, prompts, strict=False):
        if not check_text(prompt, f"prompt {label}"):
            raise ValueError(f"prompt {label} is empty")
    check_branches(stage, args, len(prompts), _sampling_params(args, len(prompts))[0])
    console = _new_console()
    return generate_on(stage, console, *_load(console, args.model), args)


def generate_on(
    stage: ModuleType, console: Console, model: Llama, tokenizer: Tokenizer, args: Namespace
) -> int:
    """What ``run_generate`` does, once stage and model are there."""
    answers = prepare(tokenizer, args.prompt or PROMPTS, raw=args.raw)
    check_prompts(
        [answer.prompt_ids for answer in answers],
        args.max_new_tokens,
        vocab_size=model.config.vocab_size,
        max_seq_len=model.config.max_seq_len,
        labels=LABELS,
    )
    num_answers = args.samples or args.beams or 1
    enough = num_blocks_for(answers * num_answers, args.max_new_tokens, args.block_size)
    num_blocks = args.num_blocks or enough
    config = config_for(model, args.block_size, num_blocks)
    bug = load_bugs(find_root())[args.bug] if args.bug else None
    theirs = bool(bug or args.impl)
    if bug:
        console.print(Text(f"bug {bug.name}: {bug.symptom}\n", style="bold"))
    show_prompts(console, answers)
    run: Run | None = None
    sound = False
    try:
        cache = stage.build_cache(config)
        run = new_run(model, tokenizer, cache, answers, args, _sampling_params(args, len(answers)))
        show_answers(console, run)
    except Exception as error:
        short = isinstance(error, OutOfBlocks) and num_blocks < enough
        if short and run:
            show_failure(console, "The pool is too small.", run.last)
        if short or not theirs or unfinished_task(error):
            raise
        if run and run.broken:
            show_failure(console, f"check_invariants, {run.broken[0]}", run.broken[1])
        show_failure(console, where_it_failed(error), run.last if run else None)
    else:
        show_speed(console, run)
        show_memory(console, run)
        show_sharing(console, run)
        sound = show_invariants(console, run)
    if bug and run:
        changed = _changes(console, bug, run, answers, args)
        if sound and not changed:
            tests = "\n".join(f"  chapters/{bug.chapter}/{test}" for test in bug.killed_by)
            console.print(f"Here the bug does not show. The tests that catch it:\n{tests}")
    return 0 if sound or bug else 1


def _changes(console: Console, bug: Bug, run: Run, answers: list[Answer], args: Namespace) -> bool:
    """The same prompts on the stage without the bug: shows which answers differ, and whether any
    does."""
    cache = load_stage(bug.chapter).build_cache(run.cache.config)
    fresh = [Answer(answer.label, answer.prompt, answer.prompt_ids) for answer in answers]
    params = _sampling_params(args, len(answers))
    healthy = new_run(run.model, run.tokenizer, cache, fresh, args, params)
    console.print()
    with busy(console, f"the same prompts without the bug, on {STAGES[bug.chapter]}"):
        for _ in healthy.tokens():
            pass
    wanted = [answer.token_ids for answer in healthy.answers]
    return show_changes(console, run.tokenizer, run.answers, wanted)


def _load(console: Console, path: Path | None) -> tuple[Llama, Tokenizer]:
    path = default_model_path() if path is None else path
    # The model and every cache follow torch's default device.
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    start = time.perf_counter()
    with busy(console, f"loading {path.name}"):
        model, tokenizer = load_model(path)
    seconds = time.perf_counter() - start
    console.print(Text(f"{path.name}: loaded in {seconds:.1f} s\n", style="dim"))
    return model, tokenizer


def _sampling_params(args: Namespace, count: int) -> list[SamplingParams]:
    """One for each prompt, with a seed of its own: equal prompts need not get equal answers."""
    given = {name: value for name, value in vars(args).items() if name in SAMPLING_PARAMS}
    params = SamplingParams(**given)
    if params.min_tokens > args.max_new_tokens:
        raise ValueError(
            f"--min-tokens {params.min_tokens} is more than --max-new-tokens {args.max_new_tokens}"
        )
    return [params.child(i) for i in range(count)]


def _new_console() -> Console:
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may say what the encoding lacks
    return Console(highlight=False, markup=False, emoji=False)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)
