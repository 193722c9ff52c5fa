"""The real model gives the same answers whatever stage its K and V lie in."""

import random
from collections.abc import Sequence
from types import ModuleType

import pytest

from pagedattn import contiguous, paged
from pagedattn.cache import Config
from pagedattn.model import Llama, Tokenizer, cache_config, complete

NEW_TOKENS = 6
BLOCK_SIZE = 16
# Around the ends of blocks, and far from them.
LENGTHS = (5, 7, 9, 12, 15, 16, 17, 23, 31, 32, 33, 40, 48, 64, 90, 300)
PASSAGE = """The lighthouse keeper wrote one line a day. On calm days the line was short: wind west,
two ships, nothing else. When the fog came he wrote more, because there was nothing to see and much
to hear: a bell to the north, somebody singing, an engine that stopped and did not start again. His
daughter counted the pages once. There were nine thousand, and not one of them said what he thought
about the sea. "It is not my diary," he told her, "it is hers. I only hold the pen." After that she
read it differently. She looked for the days on which the line was long, and learned from them what
the coast was like when nobody could see it. Years later, when an engineer asked where the rocks
were, she did not show him a map. She gave him the pages, and he found the rocks between the lines:
wherever the ships had slowed down, wherever a bell had been moved, wherever the keeper had written
the word again.
"""


@pytest.fixture(scope="module")
def prompts(real_model: tuple[Llama, Tokenizer]) -> list[list[int]]:
    """Pieces of one text, each from another place."""
    _, tokenizer = real_model
    text = tokenizer.encode(PASSAGE) * 3
    return [text[7 * i : 7 * i + length] for i, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def alone(real_model: tuple[Llama, Tokenizer], prompts: list[list[int]]) -> list[list[int]]:
    """The answer to each prompt when it has a cache of chapter 01 for itself."""
    model, _ = real_model
    return [answers(contiguous, model, [prompt])[0] for prompt in prompts]


def make_config(model: Llama, prompts: Sequence[Sequence[int]]) -> Config:
    """A cache in which chapter 01's slabs fit: the blocks of the longest prompt for every one."""
    longest = max(map(len, prompts)) + NEW_TOKENS
    blocks = len(prompts) * -(-longest // BLOCK_SIZE)
    return cache_config(
        model.config,
        num_blocks=blocks + 1,
        block_size=BLOCK_SIZE,
        max_seq_len=longest,
        poison=True,
    )


def answers(stage: ModuleType, model: Llama, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    cache = stage.build_cache(make_config(model, prompts))
    return complete(model, cache, prompts, max_new_tokens=NEW_TOKENS)


def test_slabs_in_one_batch(
    real_model: tuple[Llama, Tokenizer], prompts: list[list[int]], alone: list[list[int]]
) -> None:
    assert answers(contiguous, real_model[0], prompts) == alone


@pytest.mark.parametrize("chunk_size", [None, 32])
def test_pages_in_one_batch(
    real_model: tuple[Llama, Tokenizer],
    prompts: list[list[int]],
    alone: list[list[int]],
    chunk_size: int | None,
) -> None:
    """Blocks from all over the pool, prompts whole or in chunks of 32 beside running answers."""
    model, _ = real_model
    cache = paged.build_cache(make_config(model, prompts))
    random.Random(0).shuffle(cache.pool.free_queue)
    found = complete(model, cache, prompts, max_new_tokens=NEW_TOKENS, chunk_size=chunk_size)
    assert found == alone, f"the pool afterwards: {cache!r}"
    cache.check_invariants()
    assert cache.pool.num_free_blocks == cache.config.num_blocks - 1, f"blocks are lost: {cache!r}"
