"""What a request may ask of the sampler, and what is refused."""

import math
import re
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
import torch

from pagedattn.model import SamplingParams

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("name", "values", "limits"),
    [
        ("temperature", [-0.1, -1e-300], "finite and at least 0"),
        ("top_k", [-2, -(10**30)], "at least 1, or 0 or -1"),
        ("top_p", [0.0, -0.5, 1.0001], "above 0 and at most 1"),
        ("min_p", [-0.01, 1.01], "between 0 and 1"),
        ("repetition_penalty", [0.0, -1.5, 1e-50, 9e-4, 1001.0, 1e308], "between 0.001 and 1000"),
        ("frequency_penalty", [-2.01, 2.01], "between -2 and 2"),
        ("presence_penalty", [-2.01, 2.01], "between -2 and 2"),
        ("min_tokens", [-1], "at least 0"),
        ("seed", [-1, 2**64], "between 0 and 2**64 - 1"),
        ("logprobs", [-1], "at least 0"),
    ],
)
def test_outside_the_limits(name: str, values: list[Any], limits: str) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"^{name} must be ") as error:
            SamplingParams(**{name: value})
        assert limits in str(error.value) and str(error.value).endswith(f"got {value}")


@pytest.mark.parametrize("name", ["top_k", "min_tokens", "seed", "logprobs"])
@pytest.mark.parametrize("value", [1.5, 3.0, True, np.True_, "3", NAN, torch.tensor(True)])
def test_not_a_whole_number(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} is .* must be a whole number"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "name",
    [
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
    ],
)
@pytest.mark.parametrize(
    "value",
    [
        *(NAN, INF, -INF, "0.5", None, True, 10**400),
        *(np.True_, np.array(True), torch.tensor(True)),
        *(np.array([1.0]), np.array([0.2, 0.3]), torch.tensor([1.0])),
    ],
)
def test_not_a_finite_number(name: str, value: Any) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"{name} must be a finite number, got {value!r}")
    ):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"stop": ["END", ""]}, "stop must hold strings of at least one character, got ''"),
        ({"stop": ""}, "at least one character, got ''"),
        ({"stop": [7]}, "stop must hold strings .* got 7"),
        ({"stop": None}, "stop must be a list, got None"),
        ({"stop_token_ids": 7}, "stop_token_ids must be a list, got 7"),
        ({"stop_token_ids": [3, -1]}, "a token of stop_token_ids must be at least 0 .* got -1"),
        ({"stop_token_ids": [2**63]}, rf"below 2\*\*63, got {2**63}"),
        ({"stop_token_ids": np.array(7)}, r"stop_token_ids must be a list, got array\(7\)"),
        ({"stop_token_ids": ["7"]}, "a token of stop_token_ids is '7'"),
        ({"stop_token_ids": "7"}, "a token of stop_token_ids is '7'"),
    ],
)
def test_wrong_stops(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SamplingParams(**given)


def test_the_limits_themselves_are_allowed() -> None:
    for given in (
        {"temperature": 0, "top_k": -1, "top_p": 5e-324, "min_p": 0, "min_tokens": 0, "seed": 0},
        {"temperature": 1e308, "top_k": 10**6, "top_p": 1, "min_p": 1, "seed": 2**64 - 1},
        {"repetition_penalty": 1e-3, "frequency_penalty": -2, "presence_penalty": 2, "logprobs": 0},
        {"repetition_penalty": 1e3, "stop_token_ids": (0, 2**63 - 1)},
    ):
        params = SamplingParams(**given)
        assert {name: getattr(params, name) for name in given} == given


def test_numbers_of_other_libraries_and_one_string() -> None:
    """One string is one stop string, not its letters."""
    params = SamplingParams(
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        top_k=np.int64(3),  # type: ignore[arg-type]
        seed=torch.tensor(7),  # type: ignore[arg-type]
        stop="END",
        stop_token_ids=np.array([5, 3, 5]),
    )
    assert params == SamplingParams(
        temperature=0.5, top_k=3, seed=7, stop=["END"], stop_token_ids={3, 5}
    )
    assert (params.stop, params.stop_token_ids) == (("END",), (3, 5))


def test_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        SamplingParams().top_k = 3  # type: ignore[misc]


def test_greedy_below_a_hundred_thousandth() -> None:
    greedy = [SamplingParams(temperature=t).is_greedy for t in (0, 1e-300, 1e-6, 1e-5, 1e-4, 1)]
    assert greedy == [True, True, True, False, False, False]


def test_further_end_tokens() -> None:
    params = SamplingParams(top_k=3, stop_token_ids=[4]).with_stop_token_ids({2, 9, 4})
    assert params == SamplingParams(top_k=3, stop_token_ids=[2, 4, 9])


def test_children_have_seeds_of_their_own() -> None:
    """Every child once got its parent's seed (vllm-project/vllm#10980). Parent's seed + index
    would make child 1 of seed 7 equal to child 0 of seed 8."""
    seeds = [0, 7, 8, 9, 2**32, 2**64 - 1]
    family = [SamplingParams(seed=seed).child(i).seed for seed in seeds for i in range(50)]
    assert len({*family, *seeds}) == len(family) + len(seeds)
    assert family == [SamplingParams(seed=seed).child(i).seed for seed in seeds for i in range(50)]
    params = SamplingParams(temperature=0.7, top_p=0.9, seed=7, stop="x")
    child = params.child(3)
    assert vars(child) == vars(params) | {"seed": child.seed}


def test_children_without_a_seed() -> None:
    params = SamplingParams(temperature=1)
    assert params.child(2) == params
    with pytest.raises(ValueError, match="index must be at least 0, got -1"):
        params.child(-1)
