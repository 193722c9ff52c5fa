"""Choosing a token from scores."""

import math
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pagedattn.model import Sampler


def random_logits(size: int = 50, scale: float = 3.0, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale


def draw(sampler: Sampler, logits: Tensor, n: int = 20) -> list[int]:
    return [sampler.sample(logits) for _ in range(n)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_greedy_takes_the_highest_score(dtype: torch.dtype) -> None:
    logits = random_logits().to(dtype)
    logits[31] = 20
    assert Sampler().sample(logits) == 31


@pytest.mark.parametrize("temperature", [1e-4, 1e-6, 1e-300, 5e-324, 0.0])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_tiny_temperatures_are_greedy(temperature: float, scale: float) -> None:
    """Division must not overflow (vllm-project/vllm#1623)."""
    logits = random_logits(scale=scale)
    best = logits.tolist().index(max(logits.tolist()))
    assert draw(Sampler(temperature, seed=1), logits) == [best] * 20


def test_large_temperature_is_uniform_over_all_tokens() -> None:
    drawn = draw(Sampler(1e30, seed=2), random_logits(size=4), n=2000)
    # A share of 1/4 in 2000 draws has a standard deviation of 19.
    assert all(abs(Counter(drawn)[token] - 500) < 100 for token in range(4))


def test_shares_follow_the_softmax_at_the_temperature() -> None:
    """exp(0 / 2), exp(2 ln 2 / 2), exp(2 ln 5 / 2): as 1 to 2 to 5."""
    logits = torch.tensor([0.0, 2 * math.log(2), 2 * math.log(5), -math.inf])
    shares = Counter(draw(Sampler(2.0, seed=3), logits, n=8000))
    assert shares[3] == 0
    for token, expected in ((0, 1000), (1, 2000), (2, 5000)):
        # Standard deviations: 30, 39, 43.
        assert abs(shares[token] - expected) < 200


def test_equal_seeds_draw_equal_tokens_and_zero_is_a_seed() -> None:
    """No seed was once stored as seed 0 (Blaizzy/mlx-vlm#1844)."""
    logits = random_logits(scale=1.0)
    for seed in (0, 42, 2**64 - 1):
        first, second, third = (draw(Sampler(1.0, seed), logits) for _ in range(3))
        assert first == second == third
    unseeded = {tuple(draw(Sampler(1.0), logits)) for _ in range(3)}
    assert len(unseeded) == 3  # 20 draws among 50 tokens: equal once in more than 10^20 runs
    assert draw(Sampler(1.0, 0), logits) != draw(Sampler(1.0, 1), logits)


def test_neighbours_and_the_global_generator_do_not_matter() -> None:
    """A seeded sequence once depended on an unseeded neighbour (vllm-project/vllm#51226)."""
    logits = random_logits(scale=1.0)
    alone = draw(Sampler(1.0, 42), logits)
    seeded, neighbour = Sampler(1.0, 42), Sampler(1.0)
    beside = []
    for _ in alone:
        neighbour.sample(logits)
        torch.rand(3)
        beside.append(seeded.sample(logits))
    assert beside == alone


@pytest.mark.parametrize("temperature", [-0.1, math.nan, math.inf, -math.inf])
def test_wrong_temperature(temperature: float) -> None:
    with pytest.raises(ValueError, match=f"temperature must be .* got {temperature}"):
        Sampler(temperature)


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, 3.0, True, "3", math.nan, torch.tensor(True)])
def test_wrong_seed(seed: Any) -> None:
    with pytest.raises(ValueError, match="seed ") as error:
        Sampler(1.0, seed)
    assert str(seed) in str(error.value)


@pytest.mark.parametrize("seed", [np.int64(3), np.uint8(3), torch.tensor(3)])
def test_whole_numbers_of_other_libraries_are_seeds(seed: Any) -> None:
    logits = random_logits(scale=1.0)
    assert draw(Sampler(1.0, seed), logits) == draw(Sampler(1.0, 3), logits)


@pytest.mark.parametrize("shape", [(0,), (1, 5), ()])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scores_of_another_shape(temperature: float, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=re.escape(f"[vocab_size], got {list(shape)}")):
        Sampler(temperature, seed=0).sample(torch.ones(shape))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_that_were_never_computed(temperature: float, bad: float) -> None:
    logits = random_logits()
    logits[7] = bad
    with pytest.raises(ValueError, match=f"greatest of the logits is {bad}"):
        Sampler(temperature, seed=0).sample(logits)
    with pytest.raises(ValueError, match="greatest of the logits is -inf"):
        Sampler(temperature, seed=0).sample(torch.full((5,), -math.inf))
