"""Numbers that fit no model are refused before a tensor is made."""

import math
from typing import Any

import pytest

from pagedattn.model import ModelConfig

SIZES = ["num_layers", "num_heads", "num_kv_heads", "head_dim", "d_model", "d_ff"]
SIZES += ["vocab_size", "max_seq_len"]
GOOD: dict[str, Any] = dict.fromkeys(SIZES, 2) | {"rope_factors": (1.0,)}


def test_the_least_model() -> None:
    ModelConfig(**GOOD)
    least: dict[str, Any] = dict.fromkeys(SIZES, 1) | {"head_dim": 2}
    ModelConfig(**least, rope_theta=1, rms_norm_eps=1e-30)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("size", [0, -2, 1.5, 2.0, True, "2", math.nan])
def test_sizes(name: str, size: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a whole number, .* got {size!r}"):
        ModelConfig(**GOOD | {name: size})


@pytest.mark.parametrize("number", [0, 0.0, -1.0, math.inf, -math.inf, math.nan])
def test_numbers(number: float) -> None:
    for name in ("rope_theta", "rms_norm_eps"):
        with pytest.raises(ValueError, match=f"{name} must be finite and above 0, got {number}"):
            ModelConfig(**GOOD | {name: number})
    with pytest.raises(ValueError, match=f"rope_factors must be finite and above 0, got {number}"):
        ModelConfig(**GOOD | {"rope_factors": (number,)})


def test_sizes_that_do_not_fit_together() -> None:
    for change, words in (
        ({"num_heads": 3}, "num_kv_heads 2 does not divide num_heads 3"),
        ({"head_dim": 3}, "head_dim must be even for rotary pairs, got 3"),
        ({"head_dim": 4}, "rope_factors must be 2 numbers, got 1"),
    ):
        with pytest.raises(ValueError, match=words):
            ModelConfig(**GOOD | change)
