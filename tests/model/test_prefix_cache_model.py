"""The real model through chapter 04: what is found is not computed again, and nothing else changes.

Answers are compared with those of chapter 03, which computes every prompt from its first token.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedattn import prefix, sharing
from pagedattn.cache import Batch, KVCache
from pagedattn.model import Llama, SamplingParams, Tokenizer, cache_config, generate
from pagedattn.model.beam_search import beam_search
from pagedattn.model.beams import BeamSearchParams, Hypothesis
from pagedattn.model.parallel_sampling import sample_in_parallel

BLOCK_SIZE = 16
SYSTEM = (
    "You keep the library of a small town. Answer briefly, name the shelf, and never recommend a "
    "book that you have not read yourself. If nobody knows the answer, say so."
)
QUESTIONS = ("Where are the maps of the coast?", "Do you have a book about bread?")


def cache_for(stage: Any, model: Llama) -> Any:
    return stage.build_cache(
        cache_config(model.config, num_blocks=64, block_size=BLOCK_SIZE, poison=True)
    )


def chat(tokenizer: Tokenizer, question: str, system: str = SYSTEM) -> list[int]:
    return tokenizer.encode_chat(
        [{"role": "system", "content": system}, {"role": "user", "content": question}]
    )


class Count:
    """How many tokens each step computes."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def __call__(self, batch: Batch) -> None:
        self.steps.append(len(batch.token_ids))


def answer(
    model: Llama, cache: KVCache, prompt: list[int], chunk_size: int | None = None
) -> tuple[list[int], list[int]]:
    """Eight tokens, and how many tokens each step computed."""
    count = Count()
    tokens = generate(
        model, cache, [prompt], max_new_tokens=8, chunk_size=chunk_size, on_step=count
    )
    found = [token.token_id for token in tokens]
    cache.check_invariants()
    return found, count.steps


@pytest.fixture(scope="module")
def chats(real_model: tuple[Llama, Tokenizer]) -> list[list[int]]:
    """Two chats with one system prompt, cut so that neither ends with a block."""
    return [chat(real_model[1], question) for question in QUESTIONS]


@pytest.fixture(scope="module")
def alone(real_model: tuple[Llama, Tokenizer], chats: list[list[int]]) -> list[list[int]]:
    """The answer to each chat from a cache of chapter 03."""
    model, _ = real_model
    return [answer(model, cache_for(sharing, model), prompt)[0] for prompt in chats]


@pytest.mark.parametrize("chunk_size", [None, 24])
def test_the_second_run_computes_the_end_of_the_prompt(
    real_model: tuple[Llama, Tokenizer],
    chats: list[list[int]],
    alone: list[list[int]],
    chunk_size: int | None,
) -> None:
    model, _ = real_model
    cache, prompt = cache_for(prefix, model), chats[0]
    first, steps = answer(model, cache, prompt, chunk_size)
    assert first == alone[0] and sum(steps) == len(prompt) + 7
    second, steps = answer(model, cache, prompt, chunk_size)
    left = len(prompt) - (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert second == alone[0]
    assert steps == [left] + [1] * 7, f"{left} of {len(prompt)} tokens are left to compute"


def test_a_prompt_that_ends_with_a_block(real_model: tuple[Llama, Tokenizer]) -> None:
    """GeeeekExplorer/nano-vllm#144: 48 tokens. The last block is computed again, for its scores."""
    model, tokenizer = real_model
    prompt = tokenizer.encode(SYSTEM * 2)[:48]
    expected, _ = answer(model, cache_for(sharing, model), prompt)
    cache = cache_for(prefix, model)
    for first_step in (48, 16):
        assert answer(model, cache, prompt) == (expected, [first_step] + [1] * 7)


def test_two_chats_with_one_system_prompt(
    real_model: tuple[Llama, Tokenizer], chats: list[list[int]], alone: list[list[int]]
) -> None:
    model, _ = real_model
    cache = cache_for(prefix, model)
    common = next(i for i, (a, b) in enumerate(zip(*chats, strict=False)) if a != b)
    hit = common // BLOCK_SIZE * BLOCK_SIZE
    assert hit >= 2 * BLOCK_SIZE, "the system prompt fills blocks"
    assert answer(model, cache, chats[0])[0] == alone[0]
    found, steps = answer(model, cache, chats[1])
    assert found == alone[1]
    assert steps[0] == len(chats[1]) - hit, f"{common} tokens in common: {hit} are found"


def test_a_chat_goes_on(real_model: tuple[Llama, Tokenizer], chats: list[list[int]]) -> None:
    """The next question finds the last answer, too: all but its last token was computed."""
    model, tokenizer = real_model
    cache = cache_for(prefix, model)
    said = chats[0] + answer(model, cache, chats[0])[0]
    prompt = said + tokenizer.encode("\nAnd where is the door?")
    expected, _ = answer(model, cache_for(sharing, model), prompt)
    found, steps = answer(model, cache, prompt)
    assert found == expected
    assert steps[0] == len(prompt) - (len(said) - 1) // BLOCK_SIZE * BLOCK_SIZE


def scores(model: Llama, cache: KVCache, seq_id: str) -> Tensor:
    """Compute all that is left of a sequence: the scores after each of these tokens."""
    batch = cache.reserve({seq_id: cache.num_tokens(seq_id) - cache.num_computed_tokens(seq_id)})
    hidden = model(batch.token_ids, batch.positions, batch.attend)
    batch.commit()
    return model.compute_logits(hidden)


# float32. The last tokens of a prompt are computed by themselves, so the products of matrices have
# another shape and add in another order: up to 5e-5 was seen, on scores up to 34. A block with
# another's K and V in it changes scores by more than 1.
TOLERANCE = 2e-4


@pytest.mark.parametrize("length", [17, 40, 64, 72])
def test_scores_of_what_is_left(
    real_model: tuple[Llama, Tokenizer], chats: list[list[int]], length: int
) -> None:
    model, _ = real_model
    prompt = [*chats[0], *chats[1]][:length]
    plain, cache = cache_for(sharing, model), cache_for(prefix, model)
    plain.add("A", prompt)
    expected = scores(model, plain, "A")
    assert cache.add("A", prompt) == 0
    assert torch.equal(scores(model, cache, "A"), expected), "a miss is chapter 03, to the bit"
    hit = cache.add("B", prompt)
    assert hit == (length - 1) // BLOCK_SIZE * BLOCK_SIZE
    error = (scores(model, cache, "B") - expected[hit:]).abs().max().item()
    assert error <= TOLERANCE, f"behind a hit of {hit} tokens the scores differ by {error:.3g}"


def test_a_wrong_block_would_show(
    real_model: tuple[Llama, Tokenizer], chats: list[list[int]]
) -> None:
    """The same comparison, after the second block was written over the first."""
    model, _ = real_model
    cache, prompt = cache_for(prefix, model), chats[0][:40]
    cache.add("A", prompt)
    expected = scores(model, cache, "A")
    for tensor in (cache.k_cache, cache.v_cache):
        tensor[:, 1] = tensor[:, 2]
    cache.add("B", prompt)
    error = (scores(model, cache, "B") - expected[32:]).abs().max().item()
    assert error > 1, f"scores differ by {error:.3g} only"


def samples(
    model: Llama, cache: KVCache, prompts: Sequence[list[int]], count: Count
) -> list[list[int]]:
    answers: dict[tuple[int, int], list[int]] = {}
    for token in sample_in_parallel(
        model,
        cache,
        prompts,
        num_samples=3,
        max_new_tokens=8,
        sampling_params=SamplingParams(temperature=0.8, seed=5),
        on_step=count,
    ):
        answers.setdefault((token.index, token.sample), []).append(token.token_id)
    cache.check_invariants()
    return [answers[key] for key in sorted(answers)]


def test_parallel_sampling(real_model: tuple[Llama, Tokenizer], chats: list[list[int]]) -> None:
    """Twice through one cache: the second time the prompts are found."""
    model, _ = real_model
    expected = samples(model, cache_for(sharing, model), chats, Count())
    assert len(set(map(tuple, expected))) == 6, "six samples that differ"
    cache, count = cache_for(prefix, model), Count()
    assert samples(model, cache, chats, count) == expected
    before = len(count.steps)
    assert samples(model, cache, chats, count) == expected
    left = sum(len(p) - (len(p) - 1) // BLOCK_SIZE * BLOCK_SIZE for p in chats)
    assert (count.steps[0], count.steps[before]) == (sum(map(len, chats)), left)


def test_beam_search(real_model: tuple[Llama, Tokenizer], chats: list[list[int]]) -> None:
    """The same hypotheses in the same order, with and without a hit."""
    model, _ = real_model
    params = BeamSearchParams(width=3, max_new_tokens=8)

    def search(cache: KVCache) -> list[list[Hypothesis]]:
        found = beam_search(model, cache, chats, params)
        cache.check_invariants()
        return found

    expected = search(cache_for(sharing, model))
    cache = cache_for(prefix, model)
    for _ in range(2):
        found = search(cache)
        for ours, theirs in zip(found, expected, strict=True):
            assert [h.token_ids for h in ours] == [h.token_ids for h in theirs]
            for mine, other in zip(ours, theirs, strict=True):
                # A score is the mean of 8 logarithms, each of scores within TOLERANCE.
                assert mine.score == pytest.approx(other.score, abs=2 * TOLERANCE)
                assert dataclasses.replace(mine, score=other.score) == other
    hits = [cache.need(prompt, 1)[0] for prompt in chats]
    assert hits == [(len(p) - 1) // BLOCK_SIZE * BLOCK_SIZE for p in chats]
