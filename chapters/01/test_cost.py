"""Task 1.1: what K and V of a token cost, and how many tokens a card holds."""

from types import ModuleType

import pytest
import torch


@pytest.mark.parametrize(
    "model, num_layers, num_kv_heads, head_dim, dtype, expected",
    [
        ("Llama-7B", 32, 32, 128, torch.float16, 524_288),
        ("Llama-3-8B", 32, 8, 128, torch.bfloat16, 131_072),
        ("SmolLM2-135M", 30, 3, 64, torch.float32, 46_080),
        ("one layer, one head, one number", 1, 1, 1, torch.float8_e4m3fn, 2),
    ],
)
def test_bytes_of_one_token(
    stage: ModuleType,
    model: str,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    expected: int,
) -> None:
    found = stage.kv_bytes_per_token(num_layers, num_kv_heads, head_dim, dtype)
    assert found == expected, f"{model}: {found} bytes a token, expected {expected}"


@pytest.mark.parametrize(
    "memory, weights, per_token, expected",
    [
        (100, 40, 7, 8),  # 60 bytes are left: 8 tokens take 56
        (100, 40, 6, 10),
        (100, 95, 6, 0),
        (100, 100, 6, 0),
        # Llama-7B in float16 on a card of 80e9 bytes: 66 523 168 768 are left for K and V.
        (80 * 10**9, 6_738_415_616 * 2, 524_288, 126_882),
    ],
)
def test_slots_that_fit(
    stage: ModuleType, memory: int, weights: int, per_token: int, expected: int
) -> None:
    found = stage.slots_that_fit(memory, weights, per_token)
    assert found == expected, (
        f"{memory} bytes, weights of {weights}, {per_token} a token: {found} slots, "
        f"expected {expected}"
    )


def test_weights_that_do_not_fit(stage: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"101.*100|100.*101"):
        stage.slots_that_fit(100, 101, 6)


def test_a_token_takes_some_bytes(stage: ModuleType) -> None:
    with pytest.raises(ValueError):
        stage.slots_that_fit(100, 10, 0)
