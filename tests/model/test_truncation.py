"""The probabilities that tokens are drawn with: temperature, min-p, top-k, top-p.

Expected values come from plain arithmetic in float64, token by token, and from ``transformers``.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from pagedattn.model import SamplingParams
from pagedattn.model.truncation import probabilities


def random_scores(rows: int, size: int, scale: float, seed: int = 0) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * scale


def by_hand(scores: list[float], params: SamplingParams) -> list[float]:
    """One row, one token after the other, with exact sums."""
    best = max(scores)
    weights = [math.exp((score - best) / params.temperature) for score in scores]
    kept = {token for token, weight in enumerate(weights) if weight >= params.min_p}
    order = sorted(kept, key=lambda token: (-scores[token], token))
    if params.top_k > 0:
        last = scores[order[min(params.top_k, len(order)) - 1]]
        order = [token for token in order if scores[token] >= last]
    if params.top_p < 1:
        total = math.fsum(weights[token] for token in order)
        nucleus: list[int] = []
        while math.fsum(weights[token] for token in nucleus) < params.top_p * total:
            nucleus.append(order[len(nucleus)])
        order = nucleus
    total = math.fsum(weights[token] for token in order)
    return [weights[t] / total if t in order else 0.0 for t in range(len(scores))]


def close(found: Tensor, expected: Any) -> None:
    """The same tokens are left, and probabilities agree to the rounding of float64: some hundred
    additions, each within 1.2e-16."""
    expected = torch.as_tensor(expected, dtype=torch.float64)
    assert found.dtype == torch.float64
    assert torch.equal(found > 0, expected > 0)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-300)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10_000},
    {"top_p": 1e-9},
    {"top_p": 0.3},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 9, "top_p": 0.8},
    {"min_p": 0.1, "top_p": 0.6},
    {"min_p": 0.02, "top_k": 5},
    {"min_p": 0.01, "top_k": 20, "top_p": 0.95},
]


@pytest.mark.parametrize("scale", [0.01, 1.0, 10.0, 1e4])
def test_every_parameter_by_hand_in_one_batch(scale: float) -> None:
    """All settings at four temperatures stand in one batch, each row with scores of its own."""
    params = [SamplingParams(temperature=t, **s) for s in SETTINGS for t in (0.01, 0.7, 1.0, 30.0)]
    scores = random_scores(len(params), 200, scale)
    expected = [by_hand(row, p) for row, p in zip(scores.tolist(), params, strict=True)]
    close(probabilities(scores, params), expected)


@pytest.mark.parametrize("scale", [0.1, 1.0, 8.0])
def test_against_transformers(scale: float) -> None:
    scores = random_scores(6, 500, scale, seed=1)
    ids = torch.zeros(6, 1, dtype=torch.int64)  # no processor here looks at them
    warpers: list[tuple[Any, dict[str, Any]]] = [
        (TopKLogitsWarper(12), {"top_k": 12}),
        (TopPLogitsWarper(0.85), {"top_p": 0.85}),
        (MinPLogitsWarper(0.08), {"min_p": 0.08}),
    ]
    for warper, given in warpers:
        expected = warper(ids, scores.double() / 0.6).softmax(dim=1)
        params = [SamplingParams(temperature=0.6, **given)] * 6
        close(probabilities(scores, params), expected)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.5, 2), (0.5 + 1e-9, 3), (0.25, 1), (0.24, 1), (0.75, 3), (0.76, 4), (1.0, 4)],
)
def test_the_token_that_crosses_p_is_kept(top_p: float, kept: int) -> None:
    """Four equal scores have probability 1/4 each, exactly: two of them reach 0.5, and the lower
    tokens come first."""
    scores = torch.full((1, 4), 3.25)
    (row,) = probabilities(scores, [SamplingParams(temperature=1, top_p=top_p)])
    assert row.tolist() == [1 / kept] * kept + [0.0] * (4 - kept)


def test_p_of_one_keeps_a_tail_that_rounding_loses() -> None:
    """exp(-40) added to 1 is 1 in float64; beside rows with a top_p, and with a top_k of its own.

    By hand: 1 / (1 + 2 exp(-40)) rounds to 1, exp(-40) stays.
    """
    scores = torch.tensor([[0.0, -40.0, -40.0, -90.0]]).repeat(3, 1)
    params = [
        SamplingParams(temperature=1, top_k=3),
        SamplingParams(temperature=1, top_p=0.9),
        SamplingParams(temperature=1),
    ]
    tail = math.exp(-40)
    expected = [[1, tail, tail, 0], [1, 0, 0, 0], [1, tail, tail, math.exp(-90)]]
    close(probabilities(scores, params), expected)


def test_scores_equal_to_the_last_of_top_k_stay() -> None:
    scores = torch.tensor([[2.0, 5.0, 2.0, 2.0, 1.0]])
    (row,) = probabilities(scores, [SamplingParams(temperature=1, top_k=2)])
    assert (row > 0).tolist() == [True, True, True, True, False]


def test_top_k_looks_at_scores_where_weights_no_longer_differ() -> None:
    """At temperature 1e30 all weights round to 1; the two highest scores are still two."""
    scores = random_scores(1, 50, 1.0)
    (row,) = probabilities(scores, [SamplingParams(temperature=1e30, top_k=2)])
    assert row.nonzero().flatten().tolist() == sorted(scores[0].topk(2).indices.tolist())
    assert row[row > 0].tolist() == [0.5, 0.5]


def test_min_p_is_relative_to_the_likeliest_after_temperature() -> None:
    """Weights 1, 1/2, 1/4 at temperature 1; 1, 1/4, 1/16 at 1/2."""
    scores = torch.tensor([[0.0, -math.log(2), -math.log(4)]]).repeat(2, 1)
    params = [SamplingParams(temperature=t, min_p=0.2) for t in (1.0, 0.5)]
    close(
        probabilities(scores, params).round(decimals=6),  # log 2 is rounded to float32
        torch.tensor([[4 / 7, 2 / 7, 1 / 7], [4 / 5, 1 / 5, 0]], dtype=torch.float64).round(
            decimals=6
        ),
    )


def test_off_means_untouched() -> None:
    """k of 0 or -1 and p of 1 change no bit."""
    scores = random_scores(1, 1000, 3.0)
    plain = probabilities(scores, [SamplingParams(temperature=1)])
    off: list[dict[str, Any]] = [{"top_k": -1}, {"top_p": 1.0}, {"min_p": 0.0}, {"top_k": 1000}]
    for given in off:
        found = probabilities(scores, [SamplingParams(temperature=1, **given)])
        assert torch.equal(found, plain)


def test_tokens_without_a_chance() -> None:
    scores = torch.tensor([[-math.inf, 1.0, -math.inf, 1.0]]).repeat(3, 1)
    given: list[dict[str, Any]] = [{}, {"top_k": 3}, {"top_p": 0.9}]
    params = [SamplingParams(temperature=1, **g) for g in given]
    assert probabilities(scores, params).tolist() == [[0, 0.5, 0, 0.5]] * 3


@pytest.mark.parametrize("num_neighbours", [1, 7, 43])
def test_neighbours_change_no_bit(num_neighbours: int) -> None:
    """Alone and among others in any order (tenstorrent/tt-metal#47226)."""
    rng = np.random.default_rng(num_neighbours)
    scores = random_scores(num_neighbours + 1, 40_000, 4.0, seed=2)
    params = [
        SamplingParams(temperature=0.5 + i % 3, **SETTINGS[i % len(SETTINGS)])
        for i in range(num_neighbours + 1)
    ]
    order = rng.permutation(len(params)).tolist()
    together = probabilities(scores[order], [params[i] for i in order])
    for i in (0, num_neighbours, num_neighbours // 2):
        alone = probabilities(scores[i : i + 1], [params[i]])
        assert torch.equal(together[order.index(i)], alone[0])
