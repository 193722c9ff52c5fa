"""Tokens per second: the model on the paged cache against ``transformers.generate``.

Both sides answer the same prompts with the same weights in float32 and give the same number of
tokens, so no side stops early. They take turns within one run: what else the machine does meanwhile
falls on both.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from pagedattn import paged
from pagedattn.bench.result_file import write_result
from pagedattn.model import Llama, Tokenizer, cache_config, complete, load_model
from pagedattn.model.families import family_of
from pagedattn.model.llama import rotary_frequencies

BLOCK_SIZE = 16
PASSAGE = """A library with one long shelf gives every reader a stretch of it on the first day, wide
enough for all the books that this reader may ever bring. Most bring few. After a month the shelf is
full of gaps, and a new reader is sent away although half of the wood is bare. The librarian then
saws the shelf into short boards, numbers them, and keeps a card for each reader: board 7, board 2,
board 19. A reader who brings one more book gets one more board, from wherever one is free. Nobody
asks for space in advance, and what is bare is at most the end of each reader's last board.
"""


def to_transformers(model: Llama) -> Any:
    """The same model as a causal language model of ``transformers``, with the same weights.

    Raises ValueError with the command to install transformers when it is missing.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as reason:
        raise ValueError(
            "this compares with transformers; install it with: pip install transformers"
        ) from reason
    config = model.config
    theirs = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            family_of(config),
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            hidden_size=config.d_model,
            intermediate_size=config.d_ff,
            vocab_size=config.vocab_size,
            max_position_embeddings=config.max_seq_len,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            rms_norm_eps=config.rms_norm_eps,
            tie_word_embeddings=config.tie_word_embeddings,
            eos_token_id=None,  # nothing ends an answer but its length
        )
    )
    heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
    weights = {"lm_head.weight": model.embed_tokens.weight}  # overwritten below unless tied
    for name, value in model.state_dict().items():
        if "qkv_proj" in name:
            rows = value.split([count * config.head_dim for count in heads])
            parts = dict(zip(("q_proj", "k_proj", "v_proj"), rows, strict=True))
            renamed = {name.replace("qkv_proj", part): rows for part, rows in parts.items()}
        elif "gate_up_proj" in name:
            gate, up = value.chunk(2)
            renamed = {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
        else:
            renamed = {name: value}
        prefix = "" if name == "lm_head.weight" else "model."
        weights |= {prefix + key: part for key, part in renamed.items()}
    theirs.load_state_dict(weights)
    theirs.model.rotary_emb.inv_freq = rotary_frequencies(config, torch.device("cpu"))
    return theirs.eval()


def mixed_prompts(tokenizer: Tokenizer, num_prompts: int) -> list[list[int]]:
    """Pieces of one text, each from another place: 8, 24, 40, … tokens."""
    lengths = [8 + 16 * index for index in range(num_prompts)]
    passage = tokenizer.encode(PASSAGE)
    text = passage * (2 + (lengths[-1] + num_prompts) // len(passage))
    return [text[index : index + length] for index, length in enumerate(lengths)]


def ours(model: Llama, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Greedy answers of this library's model on the paged cache."""
    longest = max(map(len, prompts)) + new_tokens
    blocks = len(prompts) * -(-longest // BLOCK_SIZE)
    config = cache_config(
        model.config, num_blocks=blocks + 1, block_size=BLOCK_SIZE, max_seq_len=longest
    )
    return complete(model, paged.build_cache(config), prompts, max_new_tokens=new_tokens)


def theirs(reference: Any, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Greedy answers of ``transformers``: prompts padded on the left, the padding masked."""
    from transformers import GenerationConfig

    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
    with torch.inference_mode():
        out = reference.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
    return out[:, width:].tolist()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--model", type=Path, help="a GGUF file or a folder (default: SmolLM2)")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=128, help="for each prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the result to this file")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure by the options of ``add_arguments``; the result as it goes into the JSON file.

    Raises ValueError for a number below 1, or when transformers is not installed.
    """
    for name in ("num_prompts", "new_tokens", "repeats", "threads"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(args, name)}")
    torch.set_num_threads(args.threads)
    model, tokenizer = load_model(args.model)
    reference = to_transformers(model)
    prompts = mixed_prompts(tokenizer, args.num_prompts)

    sides: dict[str, Callable[[int], list[list[int]]]] = {
        "pagedattn": lambda new_tokens: ours(model, prompts, new_tokens),
        "transformers": lambda new_tokens: theirs(reference, prompts, new_tokens),
    }
    for answer in sides.values():
        answer(2)  # the first call pays for what later ones find ready
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    answers = {}
    for _ in range(args.repeats):
        for name, answer in sides.items():
            start = time.perf_counter()
            answers[name] = answer(args.new_tokens)
            seconds[name].append(time.perf_counter() - start)

    num_tokens = args.num_prompts * args.new_tokens
    for name, answered in answers.items():
        if [len(tokens) for tokens in answered] != [args.new_tokens] * args.num_prompts:
            raise RuntimeError(f"{name} did not give {args.new_tokens} tokens for every prompt")
    rates = {name: num_tokens / statistics.median(times) for name, times in seconds.items()}
    same = sum(a == b for a, b in zip(*answers.values(), strict=True))
    return {
        "tokens_per_second": {name: round(rate, 1) for name, rate in rates.items()},
        "ratio": round(rates["pagedattn"] / rates["transformers"], 3),
        "seconds": {name: [round(s, 4) for s in times] for name, times in seconds.items()},
        "equal_answers": f"{same} of {args.num_prompts}",
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "new_tokens": args.new_tokens,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "threads": args.threads,
        "cpu": _cpu_name(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("pagedattn", "torch", "transformers")},
        },
        "date": date.today().isoformat(),
    }


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def report(result: dict[str, Any]) -> str:
    """The result in words."""
    rates = result["tokens_per_second"]
    lines = [f"{name:>14}: {rate:7.1f} tokens/s" for name, rate in rates.items()]
    lines.append(
        f"ratio {result['ratio']:.2f} (medians of {len(result['seconds']['pagedattn'])} runs); "
        f"equal answers: {result['equal_answers']}"
    )
    return "\n".join(lines)


def run(args: argparse.Namespace) -> None:
    """Measure, print, and write the JSON file if one is asked for."""
    result = measure(args)
    print(report(result))
    write_result(args.json, result)
