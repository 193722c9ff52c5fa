"""Time to the first token of a prompt: the first time, and when its beginning is in the cache."""

from __future__ import annotations

import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import torch

from pagedattn.bench.generate import mixed_prompts
from pagedattn.bench.result_file import write_result
from pagedattn.model import cache_config, generate, load_model
from pagedattn.prefix import build_cache
from pagedattn.whole_number import at_least_1

BLOCK_SIZE = 16


def add_arguments(parser: ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--model", type=Path, help="a GGUF file or a folder (default: SmolLM2)")
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the result to this file")


def measure(args: Namespace) -> dict[str, Any]:
    """Measure by the options of ``add_arguments``; each repeat begins with an empty cache.

    Raises ValueError for a number below 1, or a prompt that is longer than the model allows.
    """
    num_tokens = at_least_1(args.prompt_tokens, "prompt_tokens")
    repeats = at_least_1(args.repeats, "repeats")
    torch.set_num_threads(at_least_1(args.threads, "threads"))
    model, tokenizer = load_model(args.model)
    prompt = (mixed_prompts(tokenizer, 1 + num_tokens // 16)[-1] * 2)[:num_tokens]
    config = cache_config(
        model.config,
        num_blocks=2 + num_tokens // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_seq_len=num_tokens + 1,
    )
    list(generate(model, build_cache(config), [prompt[:16]], max_new_tokens=1))  # warms up
    seconds: dict[str, list[float]] = {"first": [], "second": []}
    tokens, hits = set(), set()
    for number in range(1, repeats + 1):
        print(f"run {number} of {repeats} …", file=sys.stderr, flush=True)
        cache = build_cache(config)
        for times in seconds.values():
            hit, _ = cache.need(prompt, 1)
            start = time.perf_counter()
            (token,) = generate(model, cache, [prompt], max_new_tokens=1)
            times.append(time.perf_counter() - start)
            tokens.add(token.token_id)
            hits.add(hit)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        "prompt_tokens": num_tokens,
        "hit_tokens": max(hits),
        "seconds": {name: [round(s, 4) for s in times] for name, times in seconds.items()},
        "ratio": round(medians["first"] / medians["second"], 1),
        "equal_tokens": len(tokens) == 1,
        "threads": args.threads,
    }


def report(result: dict[str, Any]) -> str:
    """The result in words."""
    medians = {name: statistics.median(times) for name, times in result["seconds"].items()}
    computed = result["prompt_tokens"] - result["hit_tokens"]
    return "\n".join(
        [
            f"first time:  {medians['first']:8.3f} s, {result['prompt_tokens']} tokens computed",
            f"second time: {medians['second']:8.3f} s, {computed} tokens computed",
            f"{result['ratio']} times sooner (medians of {len(result['seconds']['first'])} runs); "
            f"the first token is {'the same' if result['equal_tokens'] else 'another one'}",
        ]
    )


def run(args: Namespace) -> None:
    """Measure, print, and write the JSON file if one is asked for. Raises OSError, before it
    measures, for a file that cannot be written."""
    if args.json:
        args.json.touch()
    result = measure(args)
    print(report(result))
    write_result(args.json, result)
