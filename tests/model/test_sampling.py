"""Choosing tokens from scores, for a batch at once."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedattn.model import Sampled, SamplingParams, SamplingState, sample


def random_logits(rows: int = 1, size: int = 50, scale: float = 3.0, seed: int = 0) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * scale


def states(*params: SamplingParams, prompt: Sequence[int] = ()) -> list[SamplingState]:
    return [SamplingState(p, prompt) for p in params]


def draw(params: SamplingParams, logits: Tensor, n: int = 20) -> list[int]:
    """n tokens of one sequence whose scores stay the same."""
    (state,) = states(params)
    for _ in range(n):
        sample(logits, [state])
    return state.output_token_ids


def seeded(seed: int | None, **given: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0} | given, seed=seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_greedy_takes_the_highest_score_and_the_first_of_equals(dtype: torch.dtype) -> None:
    logits = random_logits(3).to(dtype)
    logits[0, 31] = logits[1, 49] = logits[2, 7] = logits[2, 30] = 20
    found = sample(logits, states(*[SamplingParams()] * 3))
    assert found == [Sampled(31), Sampled(49), Sampled(7)]


@pytest.mark.parametrize("temperature", [1e-4, 1e-5, 1e-6, 1e-300, 5e-324, 0.0])
@pytest.mark.parametrize("scale", [1.0, 1e4, 3e37])
def test_tiny_temperatures_are_greedy(temperature: float, scale: float) -> None:
    """Division must not overflow (vllm-project/vllm#1623)."""
    logits = random_logits(scale=scale)
    best = logits[0].tolist().index(max(logits[0].tolist()))
    assert draw(seeded(1, temperature=temperature), logits) == [best] * 20


def test_greedy_ignores_what_only_shapes_a_draw() -> None:
    logits = random_logits()
    best = int(logits.argmax())
    assert draw(SamplingParams(top_k=5, top_p=0.5, min_p=0.1), logits) == [best] * 20


def chi_square(drawn: Sequence[int], probabilities: Sequence[float]) -> float:
    counts = Counter(drawn)
    assert sum(counts[token] for token in range(len(probabilities))) == len(drawn)
    expected = [len(drawn) * p for p in probabilities]
    return sum((counts[t] - e) ** 2 / e for t, e in enumerate(expected) if e)


WEIGHTS = [1, 2, 3, 5, 8, 13, 21, 34]  # of temperature 2: scores are twice their logarithms
FIB_LOGITS = torch.tensor([[2 * math.log(w) for w in WEIGHTS]])


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({}, WEIGHTS),
        ({"top_k": 3}, [0] * 5 + [13, 21, 34]),
        ({"min_p": 0.2}, [0] * 4 + [8, 13, 21, 34]),
    ],
)
def test_shares_follow_the_probabilities(given: dict[str, Any], left: list[int]) -> None:
    """Along one sequence, and across sequences with seeds that follow each other.

    7 degrees of freedom or fewer: chi-square above 24.3 would happen once in 1000 seeds.
    """
    probabilities = [weight / sum(left) for weight in left]
    along = draw(seeded(3, temperature=2.0, **given), FIB_LOGITS, n=500)
    many = states(*(seeded(seed, temperature=2.0, **given) for seed in range(2000)))
    across = [s.token_id for s in sample(FIB_LOGITS.expand(2000, -1), many)]
    children = states(*(seeded(3, temperature=2.0, **given).child(i) for i in range(2000)))
    of_children = [s.token_id for s in sample(FIB_LOGITS.expand(2000, -1), children)]
    for drawn in (along, across, of_children):
        assert all(left[token] for token in drawn)
        assert chi_square(drawn, probabilities) < 24.3


def test_a_huge_temperature_is_uniform() -> None:
    many = states(*(seeded(seed, temperature=1e30) for seed in range(4000)))
    drawn = [s.token_id for s in sample(random_logits(size=8).expand(4000, -1), many)]
    assert chi_square(drawn, [1 / 8] * 8) < 24.3


def test_tokens_by_hand() -> None:
    """The n-th token is the one whose stretch of [0, 1) holds the seed's n-th number."""
    logits = random_logits(size=30, scale=1.0)
    weights = [math.exp(score) for score in logits[0].tolist()]
    ends = [end / sum(weights) for end in accumulate(weights)]
    numbers = random.Random(99)
    expected = []
    for _ in range(200):
        number = numbers.random()
        expected.append(next(token for token, end in enumerate(ends) if number < end))
    assert draw(seeded(99), logits, n=200) == expected


def test_equal_seeds_draw_equal_tokens_and_zero_is_a_seed() -> None:
    """No seed was once stored as seed 0 (Blaizzy/mlx-vlm#1844)."""
    logits = random_logits(scale=1.0)
    for seed in (0, 42, 2**64 - 1):
        first, second, third = (draw(seeded(seed), logits) for _ in range(3))
        assert first == second == third
    unseeded = {tuple(draw(seeded(None), logits)) for _ in range(3)}
    assert len(unseeded) == 3  # 20 draws among 50 tokens: equal once in more than 10^20 runs
    assert draw(seeded(0), logits) != draw(seeded(1), logits)


def test_samples_of_one_prompt_differ_and_repeat() -> None:
    """Three samples with one seed were once all the same (vllm-project/vllm#10980)."""
    logits = random_logits(scale=1.0)
    runs = [[tuple(draw(seeded(7).child(i), logits)) for i in range(3)] for _ in range(2)]
    assert runs[0] == runs[1] and len(set(runs[0])) == 3
    assert tuple(draw(seeded(7), logits)) not in runs[0]


@pytest.mark.parametrize("num_neighbours", [1, 7, 43])
def test_neighbours_and_order_change_nothing(num_neighbours: int) -> None:
    """Beside greedy, seeded and unseeded requests that come and go, in an order that changes in
    every step (vllm-project/vllm#51226, tenstorrent/tt-metal#47226)."""
    logits = random_logits(rows=20, size=1000, scale=1.0)
    params = seeded(42, top_p=0.95, frequency_penalty=0.3, logprobs=2)
    alone = states(params)
    expected = [sample(row[None], alone)[0] for row in logits]
    rng = random.Random(num_neighbours)
    (mine,) = states(params)
    found = []
    for row in logits:
        others = states(
            *rng.choices(
                [SamplingParams(), seeded(None, top_k=5), seeded(42), seeded(1, min_p=0.1)],
                k=rng.randint(1, num_neighbours),
            ),
            prompt=[1, 2, 3],
        )
        place = rng.randint(0, len(others))
        batch = random_logits(len(others) + 1, 1000, 4.0, seed=rng.randint(0, 10**6))
        batch[place] = row
        torch.rand(3)  # torch's own generator is nobody's business
        found.append(sample(batch, [*others[:place], mine, *others[place:]])[place])
    assert [s.token_id for s in found] == [s.token_id for s in expected]
    assert mine.output_token_ids == alone[0].output_token_ids
    for one, other in zip(found, expected, strict=True):
        assert one.logprob and other.logprob
        assert one.logprob.logprob == pytest.approx(other.logprob.logprob, abs=1e-12)


def test_greedy_rows_beside_random_ones() -> None:
    logits = random_logits(rows=9)
    mixed = states(*[SamplingParams(), seeded(None, temperature=5.0), seeded(3)] * 3)
    best = logits.argmax(dim=1).tolist()
    for _ in range(20):
        found = [s.token_id for s in sample(logits, mixed)]
        assert found[::3] == best[::3]


@pytest.mark.parametrize("padding", [1e9, math.nan, math.inf])
@pytest.mark.parametrize("params", [SamplingParams(), seeded(1, top_p=0.9), seeded(1, top_k=8)])
def test_padding_columns_are_never_chosen(params: SamplingParams, padding: float) -> None:
    """10 tokens in 16 columns (InternLM/lmdeploy#3661, RBLN-SW/vllm-rbln#615)."""
    real = random_logits(rows=2, size=10)
    padded = torch.full((2, 16), padding)
    padded[:, :10] = real
    expected, found = states(params, params), states(params, params)
    for _ in range(50):
        sample(real, expected)
        sample(padded, found, vocab_size=10)
    for one, other in zip(found, expected, strict=True):
        assert one.output_token_ids == other.output_token_ids
        assert max(one.output_token_ids) < 10


def test_two_end_tokens_under_a_minimum_length() -> None:
    """Only the first end token was once held back (vllm-project/vllm#5849)."""
    logits = torch.tensor([[0.0, 1.0, 8.0, 9.0, 0.0]])
    params = SamplingParams(min_tokens=3, stop_token_ids=[2, 3])
    assert draw(params, logits, n=5) == [1, 1, 1, 3, 3]
    drawn = draw(seeded(5, min_tokens=30, stop_token_ids=[2, 3]), logits, n=60)
    assert not {2, 3} & set(drawn[:30]) and {2, 3} <= set(drawn[30:])


def test_a_penalty_counts_what_was_generated() -> None:
    """Scores 5, 4, 3 and 1 for each time: by hand, 0 then (4, 4, 3) 0 first of equals, and so on.

    The prompt is full of token 0 and does not count.
    """
    logits = torch.tensor([[5.0, 4.0, 3.0]])
    (state,) = states(SamplingParams(frequency_penalty=1), prompt=[0, 0, 0])
    for _ in range(6):
        sample(logits, [state])
    # Scores before each: 543, 443, 343, 333, 233, 223.
    assert state.output_token_ids == [0, 0, 1, 0, 1, 2]


def log_softmax(row: list[float]) -> list[float]:
    best = max(row)
    total = math.log(math.fsum(math.exp(score - best) for score in row))
    return [score - best - total for score in row]


@pytest.mark.parametrize("scale", [0.1, 3.0, 100.0])
def test_logprobs_are_of_the_raw_scores(scale: float) -> None:
    """Whatever temperature, penalties and truncation do; each row gets as many as it asks for."""
    logits = random_logits(rows=5, size=40, scale=scale)
    params = [
        SamplingParams(logprobs=3),
        seeded(1),
        seeded(2, temperature=50, logprobs=0),
        seeded(3, temperature=50, top_k=30, presence_penalty=2, logprobs=1000),
        SamplingParams(min_tokens=1, stop_token_ids=[int(logits[4].argmax())], logprobs=1),
    ]
    found = sample(logits, states(*params))
    assert (found[1].logprob, found[1].top_logprobs) == (None, ())
    for row, chosen, p in zip(logits.tolist(), found, params, strict=True):
        if p.logprobs is None:
            continue
        expected = log_softmax(row)
        order = sorted(range(40), key=lambda token: -row[token])
        assert chosen.logprob
        assert chosen.logprob.token_id == chosen.token_id
        assert chosen.logprob.logprob == pytest.approx(expected[chosen.token_id], rel=1e-12)
        assert chosen.logprob.rank == order.index(chosen.token_id) + 1
        top = chosen.top_logprobs
        assert [t.token_id for t in top] == order[: p.logprobs]
        assert [t.logprob for t in top] == pytest.approx([expected[t] for t in order[: len(top)]])
        assert [t.rank for t in top] == list(range(1, len(top) + 1))
    assert found[4].logprob and found[4].logprob.rank == 2  # the likeliest was held back


def test_ranks_of_equal_scores() -> None:
    (chosen,) = sample(torch.tensor([[1.0, 2.0, 2.0, 0.0]]), states(SamplingParams(logprobs=4)))
    assert [(t.token_id, t.rank) for t in chosen.top_logprobs] == [(1, 1), (2, 1), (0, 3), (3, 4)]
    assert chosen.logprob == chosen.top_logprobs[0]


def test_no_sequences() -> None:
    assert sample(torch.ones(0, 5), []) == []
