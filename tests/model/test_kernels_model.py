"""The model on chapter 05's kernels gives the tokens that it gives on chapter 04.

The real model needs a GPU; in Triton's interpreter a small random one stands in for it.
"""

from copy import deepcopy
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from pagedattn import prefix
from pagedattn.course.witness import DEVICE
from pagedattn.model import Llama, Tokenizer, cache_config, generate

pytestmark = pytest.mark.skipif(not find_spec("triton"), reason="needs triton")
on_a_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


def tokens_of(
    stage: Any,
    model: Llama,
    prompts: list[list[int]],
    chunk_size: int | None = None,
    **options: Any,
) -> dict[int, list[int]]:
    """Twelve greedy tokens after each prompt, computed where kernels run."""
    found: dict[int, list[int]] = {index: [] for index in range(len(prompts))}
    with torch.device(DEVICE):
        model = deepcopy(model).to(DEVICE)  # other tests use it where it is
        cache = stage.build_cache(cache_config(model.config, num_blocks=80, poison=True, **options))
        for token in generate(model, cache, prompts, max_new_tokens=12, chunk_size=chunk_size):
            found[token.index].append(token.token_id)
        cache.check_invariants()
    return found


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_a_small_random_model(model: Llama, chunk_size: int | None) -> None:
    from pagedattn import kernels

    prompts = [[5, 9, 1, 30, 2, 8, 8, 17, 4], [11, 3], [5, 9, 1, 30, 2, 40]]
    on_kernels, expected = (
        tokens_of(stage, model, prompts, chunk_size, block_size=4) for stage in (kernels, prefix)
    )
    assert on_kernels == expected
    assert len({tuple(tokens) for tokens in expected.values()}) == 3, "the prompts matter"


@on_a_gpu
@pytest.mark.parametrize("chunk_size", [None, 24])
def test_the_real_model(real_model: tuple[Llama, Tokenizer], chunk_size: int | None) -> None:
    """In float32: sums in another order do not change which token is the likeliest."""
    from pagedattn import kernels

    model, tokenizer = real_model
    questions = ("Where are the maps of the coast?", "Name three rivers.", "Why is the sky blue?")
    prompts = [
        tokenizer.encode_chat([{"role": "user", "content": question}]) for question in questions
    ]
    on_kernels, expected = (
        tokens_of(stage, model, prompts, chunk_size, block_size=16) for stage in (kernels, prefix)
    )
    assert on_kernels == expected
