"""Beam search: which hypotheses it finds, and when it ends.

Two things say what is right: a plain beam search that computes every beam anew, without a cache;
and, for models whose scores stand in a table, the enumeration of all sequences. What
``transformers`` finds with the real model is in test_beam_search_recorded.py.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedattn.attention import attention
from pagedattn.cache import KVCache
from pagedattn.model import Llama
from pagedattn.model.beam_search import beam_search
from pagedattn.model.beams import BeamSearchParams, Hypothesis

NextLogprobs = Callable[[list[int]], Tensor]
"""The log-probabilities of the next token, float64 [vocab_size]."""


@pytest.fixture
def search(assert_untouched: Callable[[KVCache], None], sharing_cache_for: Any) -> Any:
    """``search(model, prompts, **params)``: the hypotheses of each prompt, from a
    cache that is looked at after every step."""

    def run(model: Any, prompts: Sequence[list[int]], **params: Any) -> list[list[Hypothesis]]:
        cache = sharing_cache_for(model)
        found = beam_search(
            model,
            cache,
            prompts,
            BeamSearchParams(**params),
            on_step=lambda batch: cache.check_invariants(),
        )
        assert_untouched(cache)
        return found

    return run


def plain_search(
    next_logprobs: NextLogprobs,
    prompt: list[int],
    *,
    width: int,
    max_new_tokens: int,
    end_token_ids: Sequence[int] = (),
    length_penalty: float = 1.0,
) -> list[tuple[list[int], float]]:
    """The ``width`` best of all hypotheses that a beam search meets when it never ends early."""
    beams: list[tuple[list[int], float]] = [([], 0.0)]
    met: list[tuple[list[int], float]] = []
    for length in range(1, max_new_tokens + 1):
        candidates = [
            ([*tokens, token_id], total + logprob)
            for tokens, total in beams
            for token_id, logprob in enumerate(next_logprobs(prompt + tokens).tolist())
        ]
        candidates.sort(key=lambda candidate: -candidate[1])
        ended = [c[0][-1] in end_token_ids or length == max_new_tokens for c in candidates]
        for (tokens, total), end in zip(candidates[:width], ended, strict=False):
            if end:
                met.append((tokens, total / length**length_penalty))
        beams = [c for c, end in zip(candidates, ended, strict=True) if not end][:width]
    return sorted(met, key=lambda hypothesis: -hypothesis[1])[:width]


def assert_same(found: list[Hypothesis], wanted: list[tuple[list[int], float]]) -> None:
    assert [list(h.token_ids) for h in found] == [tokens for tokens, _ in wanted]
    # float32 scores of the next token, up to 40 of them added
    assert [h.score for h in found] == pytest.approx([score for _, score in wanted], abs=1e-4)


def best_sequences(
    model: Any, end: int, longest: int, length_penalty: float, count: int
) -> list[tuple[list[int], float]]:
    """The best of all sequences after the prompt [1] that end with the token ``end`` or are
    ``longest`` tokens long, with their scores."""
    vocab_size = model.config.vocab_size
    others = torch.tensor([token_id for token_id in range(vocab_size) if token_id != end])
    prefixes, totals = torch.tensor([[1]]), torch.zeros(1, dtype=torch.float64)
    best = []
    for length in range(1, longest + 1):
        table = model.logprobs[(length - 1) % len(model.logprobs)]
        sums = totals[:, None] + table[prefixes[:, -1]]  # [prefixes, vocab_size]
        ended = sums if length == longest else sums[:, [end]]
        scores, indices = (ended / length**length_penalty).flatten().topk(min(count, ended.numel()))
        for score, index in zip(scores.tolist(), indices.tolist(), strict=True):
            row, column = divmod(index, ended.shape[1])
            last = column if length == longest else end
            best.append(([*prefixes[row, 1:].tolist(), last], score))
        longer = others.repeat(len(prefixes))[:, None]
        prefixes = torch.cat([prefixes.repeat_interleave(len(others), 0), longer], 1)
        totals = sums[:, others].flatten()
    return sorted(best, key=lambda sequence: -sequence[1])[:count]


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.6, 1.0, 1.4])
def test_wide_enough_it_finds_the_best_of_all_sequences(
    search: Any, length_penalty: float, table_model: Any
) -> None:
    """After each token only the end and two others are likely: at most 8 * 3 = 24 candidates that
    count in four steps, and a width of 24. Nothing that could win is ever dropped."""
    generator = torch.Generator().manual_seed(1)
    probabilities = torch.full((4, 26, 26), 1e-20, dtype=torch.float64)
    for row in probabilities.flatten(0, 1):
        likely = torch.cat([torch.tensor([0]), 1 + torch.randperm(25, generator=generator)[:2]])
        row[likely] = 0.1 + torch.rand(3, generator=generator, dtype=torch.float64)
    model = table_model(probabilities)
    best = best_sequences(model, 0, 4, length_penalty, 24)
    (found,) = search(
        model,
        [[1]],
        width=24,
        max_new_tokens=4,
        end_token_ids=[0],
        length_penalty=length_penalty,
        early_stopping="never",
    )
    assert_same(found, best)
    assert {h.finish_reason for h in found} == {"stop", "length"}


@pytest.mark.parametrize("length_penalty", [-0.5, 0.0, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("ends", [[], [0], [0, 3]])
def test_never_gives_up_nothing(
    search: Any, ends: list[int], length_penalty: float, table_model: Any
) -> None:
    """The bound of "never" may end a search early, but it never changes what is found."""
    generator = torch.Generator().manual_seed(2)
    num_early = 0
    for _ in range(8):
        model = table_model(torch.rand(12, 9, 9, generator=generator) ** 3 + 1e-3)
        settings: dict[str, Any] = {
            "width": 3,
            "max_new_tokens": 7,
            "end_token_ids": ends,
            "length_penalty": length_penalty,
        }
        prompts = [[1, 2, 3, 4, 5], [8]]
        found = search(model, prompts, **settings, early_stopping="never")
        for prompt, hypotheses in zip(prompts, found, strict=True):
            assert_same(hypotheses, plain_search(model.next_logprobs, prompt, **settings))
            num_early += all(len(h.token_ids) < 7 for h in hypotheses)
    if ends and length_penalty <= 1:
        assert num_early, "some search must end early for this test to see anything"


def test_three_requests_equal_a_search_that_computes_everything_anew(
    search: Any, model: Llama
) -> None:
    """A decoder with attention: a beam that read another's keys would go another way."""

    def next_logprobs(token_ids: list[int]) -> Tensor:
        positions = torch.arange(len(token_ids))
        hidden = model(
            torch.tensor(token_ids), positions, lambda layer, q, k, v: attention(q, k, v)
        )
        return model.compute_logits(hidden[-1:])[0].double().log_softmax(0)

    prompts = [[5, 1, 60, 33, 2, 9], [7, 8, 9, 10], [11]]
    settings: dict[str, Any] = {"width": 4, "max_new_tokens": 9, "end_token_ids": [3, 40, 41, 58]}
    found = search(model, prompts, **settings, early_stopping="never")
    for prompt, hypotheses in zip(prompts, found, strict=True):
        assert_same(hypotheses, plain_search(next_logprobs, prompt, **settings))
    assert {h.finish_reason for hypotheses in found for h in hypotheses} == {"stop", "length"}
    parted = [len({h.token_ids[:3] for h in hypotheses}) > 1 for hypotheses in found]
    assert any(parted), "beams must part early for this test to see anything"


# The end is token 0. After the prompt, 3: the end with 0.5, 1 with 0.4, 2 with 0.1.
BY_HAND = torch.tensor(
    [[[0.25, 0.25, 0.25, 0.25], [0.2, 0.8, 0, 0], [0.5, 0, 0.5, 0], [0.5, 0.4, 0.1, 0]]]
).clamp(min=1e-12)


def test_the_modes_differ_by_hand(search: Any, table_model: Any) -> None:
    """Sums after each step, as probabilities: 1 has 0.4 and goes on with 0.8 a token."""
    settings: dict[str, Any] = {"max_new_tokens": 4, "end_token_ids": [0]}
    end, one_end = ([0], math.log(0.5)), ([1, 0], math.log(0.08) / 2)
    ones = ([1, 1, 1, 1], math.log(0.4 * 0.8**3) / 4)
    model = table_model(BY_HAND)

    def found(width: int, early_stopping: Any) -> list[Hypothesis]:
        hypotheses: list[Hypothesis]
        (hypotheses,) = search(model, [[3]], width=width, early_stopping=early_stopping, **settings)
        return hypotheses

    # Two hypotheses after two steps. The best beam, log(0.32) / 2 = -0.57, beats log(0.08) / 2.
    assert_same(found(2, True), [end, one_end])
    assert_same(found(2, False), [ones, end])
    # One hypothesis after one step, -0.69; the best beam is worse as it is, log(0.4) / 1 = -0.92,
    # and may become better: log(0.4) / 4 = -0.23.
    assert_same(found(1, True), [end])
    assert_same(found(1, False), [end])
    assert_same(found(1, "never"), [ones])


@pytest.mark.parametrize(
    ("length_penalty", "bound", "worst", "goes_on"),
    [(1.0, -0.5, -0.9, True), (-1.0, -16.0, -12.0, False), (0.0, -4.0, -5.0, True)],
)
def test_the_bound_of_never(
    length_penalty: float, bound: float, worst: float, goes_on: bool
) -> None:
    """A beam of 4 tokens with the sum -4; at most 8 tokens (huggingface/transformers#20901)."""
    params = BeamSearchParams(
        width=2, max_new_tokens=8, length_penalty=length_penalty, early_stopping="never"
    )
    assert params.best_possible_score(-4.0, 4) == bound
    assert (bound > worst) == goes_on
    early = BeamSearchParams(width=2, max_new_tokens=8, length_penalty=length_penalty)
    assert early.best_possible_score(-4.0, 4) == -4 / 4**length_penalty


def test_no_prompts_no_hypotheses(search: Any, model: Llama) -> None:
    assert search(model, [], width=2, max_new_tokens=3) == []
