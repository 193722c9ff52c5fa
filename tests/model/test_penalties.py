"""What minimum lengths and penalties make of the scores."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from pagedattn.model import SamplingParams, SamplingState
from pagedattn.model.penalties import adjust_scores


def state(prompt: list[int], output: list[int], **params: Any) -> SamplingState:
    made = SamplingState(SamplingParams(**params), prompt)
    made.output_token_ids.extend(output)
    return made


def random_scores(rows: int, size: int, scale: float) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(5)) * scale


def test_a_row_by_hand() -> None:
    """Token 0 stands in the prompt, 1 twice in the answer, 2 in both, 3 nowhere.

    Repetition 2 first: 3 / 2, -1 * 2, 4 / 2. Then 0.5 for each time in the answer and 0.25 once.
    """
    scores = torch.tensor([[3.0, -1.0, 4.0, 5.0]])
    penalties = {"repetition_penalty": 2, "frequency_penalty": 0.5, "presence_penalty": 0.25}
    found = adjust_scores(scores, [state([0, 2, 0], [1, 2, 1], **penalties)])
    assert found.tolist() == [[1.5, -2 - 2 * 0.5 - 0.25, 2 - 0.5 - 0.25, 5.0]]
    assert scores.tolist() == [[3.0, -1.0, 4.0, 5.0]]  # what came in is as before


@pytest.mark.parametrize("scale", [0.1, 1.0, 100.0])
def test_rows_do_not_mix(scale: float) -> None:
    """Ten rows, each with penalties and tokens of its own, computed one token at a time."""
    rng = torch.Generator().manual_seed(6)
    scores = random_scores(10, 30, scale)
    states, expected = [], scores.double().tolist()
    for i, row in enumerate(expected):
        prompt, output = (torch.randint(30, (n,), generator=rng).tolist() for n in (8, 3 * i))
        repetition, frequency, presence = 1 + i % 3 / 4, i % 4 / 2 - 0.5, i % 5 / 2 - 1
        states.append(
            state(
                prompt,
                output,
                repetition_penalty=repetition,
                frequency_penalty=frequency,
                presence_penalty=presence,
            )
        )
        for token in range(30):
            if token in prompt or token in output:
                row[token] *= repetition if row[token] < 0 else 1 / repetition
            row[token] -= frequency * output.count(token) + presence * (token in output)
    # float32: three operations, each within 6e-8 of numbers up to 400.
    found = adjust_scores(scores, states).double()
    torch.testing.assert_close(found, torch.tensor(expected).double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("penalty", [0.5, 1.3, 5.0])
def test_repetition_against_transformers(penalty: float) -> None:
    scores = random_scores(4, 100, 3.0)
    ids = torch.randint(100, (4, 20), generator=torch.Generator().manual_seed(7))
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, scores)
    states = [state(row[:12], row[12:], repetition_penalty=penalty) for row in ids.tolist()]
    torch.testing.assert_close(adjust_scores(scores, states), expected, rtol=1e-6, atol=0)


def test_nothing_to_change_copies_nothing() -> None:
    scores = random_scores(2, 10, 1.0)
    assert adjust_scores(scores, [state([1, 2], [3]), state([], [])]) is scores


def test_end_tokens_of_a_short_answer() -> None:
    """Each row its own end tokens and minimum: rows 0 and 2 are too short by one token."""
    scores = random_scores(3, 8, 1.0)
    states = [
        state([2], [3, 3], min_tokens=3, stop_token_ids=[2, 5]),
        state([2], [3, 3, 3], min_tokens=3, stop_token_ids=[2, 5]),
        state([2], [], min_tokens=1, stop_token_ids=[7]),
    ]
    expected = scores.clone()
    expected[0, [2, 5]] = expected[2, 7] = -math.inf
    assert torch.equal(adjust_scores(scores, states), expected)


def test_tokens_of_padding_columns_are_left_out() -> None:
    """The tokenizer may know fewer tokens than the prompt was made of: 9 has no score here, and
    must not count as a token of the next row."""
    scores = random_scores(2, 8, 1.0)
    states = [
        state([9], [8], frequency_penalty=1, min_tokens=5, stop_token_ids=[8, 1]),
        state([1], [1], frequency_penalty=1),
    ]
    expected = scores.clone()
    expected[0, 1] = -math.inf
    expected[1, 1] -= 1
    assert torch.equal(adjust_scores(scores, states), expected)
