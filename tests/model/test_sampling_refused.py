"""What the sampler refuses: scores, sizes and prompts from which no token can be chosen."""

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pagedattn.model import Sampled, SamplingParams, SamplingState, sample


def random_logits(rows: int = 1, size: int = 50, scale: float = 3.0, seed: int = 0) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * scale


def states(*params: SamplingParams, prompt: Sequence[int] = ()) -> list[SamplingState]:
    return [SamplingState(p, prompt) for p in params]


def seeded(seed: int | None, **given: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0} | given, seed=seed)


@pytest.mark.parametrize("shape", [(2, 0), (5,), (1, 5), (3, 5), (1, 2, 5), ()])
def test_logits_of_another_shape(shape: tuple[int, ...]) -> None:
    two = states(SamplingParams(), seeded(0))
    with pytest.raises(ValueError, match=re.escape(f"[2, vocab_size], got {list(shape)}")):
        sample(torch.ones(shape), two)


@pytest.mark.parametrize("vocab_size", [2.0, True, "5"])
def test_a_vocab_size_that_is_no_whole_number(vocab_size: Any) -> None:
    with pytest.raises(ValueError, match=f"vocab_size is {vocab_size!r}; .* whole number"):
        sample(torch.ones(1, 5), states(SamplingParams()), vocab_size=vocab_size)


@pytest.mark.parametrize("vocab_size", [0, -1, 6])
def test_wrong_vocab_size(vocab_size: int) -> None:
    with pytest.raises(ValueError, match=f"between 1 and the 5 columns, got {vocab_size}"):
        sample(torch.ones(1, 5), states(SamplingParams()), vocab_size=vocab_size)


@pytest.mark.parametrize("params", [SamplingParams(), seeded(4, top_p=0.9, frequency_penalty=1)])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_scores_that_were_never_computed(params: SamplingParams, bad: float) -> None:
    """The row is named, and nobody's state has moved: the next step is as if this had not been."""
    logits = random_logits(rows=3)
    wrong = logits.clone()
    wrong[1, 7 if bad != -math.inf else slice(None)] = bad
    three, undisturbed = (states(seeded(1), params, seeded(2)) for _ in range(2))
    with pytest.raises(ValueError, match=f"row 1: the greatest of its scores is {bad}"):
        sample(wrong, three)
    assert [s.output_token_ids for s in three] == [[], [], []]
    for _ in range(10):
        assert sample(logits, three) == sample(logits, undisturbed)


def test_no_token_is_left() -> None:
    """All that has a chance is an end token, and the answer is too short for it."""
    logits = torch.tensor([[0.0, 1.0], [-math.inf, 1.0]])
    two = states(seeded(1), SamplingParams(min_tokens=1, stop_token_ids=[1]))
    with pytest.raises(ValueError, match="row 1: the greatest of its scores is -inf"):
        sample(logits, two)
    assert two[0].output_token_ids == []


def test_a_nan_under_a_held_back_token_is_noticed() -> None:
    logits = torch.tensor([[0.0, math.nan]])
    with pytest.raises(ValueError, match=r"row 0: .* nan"):
        sample(logits, states(SamplingParams(min_tokens=1, stop_token_ids=[1])))


def test_prompts_of_other_libraries() -> None:
    logits = torch.tensor([[2.0, 1.5]])
    params = SamplingParams(repetition_penalty=2.0)
    for prompt in ([0], np.array([0]), torch.tensor([0])):
        assert sample(logits, [SamplingState(params, prompt)]) == [Sampled(1)]
    with pytest.raises(ValueError, match=r"a token of the prompt is 0\.5"):
        SamplingState(params, [0.5])  # type: ignore[list-item]


@pytest.mark.parametrize("token_id", [-1, 2**63])
def test_a_prompt_token_that_no_vocabulary_has(token_id: int) -> None:
    """Counted, -1 would be the last column."""
    with pytest.raises(ValueError, match=f"a token of the prompt must be .* got {token_id}"):
        SamplingState(SamplingParams(repetition_penalty=2.0), [0, token_id])
