"""Sinks and ALiBi by hand: what an output alone does not show."""

import math

import pytest
import torch

from pagedattn.attention import AttentionSpec, attention
from pagedattn.course.witness import DEVICE


def ones(num_tokens: int, num_heads: int = 1) -> torch.Tensor:
    return torch.ones(num_tokens, num_heads, 1, dtype=torch.float64, device=DEVICE)


def test_a_sink_takes_weight_and_gives_nothing() -> None:
    """ROCm/rocm-libraries#12227: one key with score 0, a sink with score 0: half of the value."""
    q, k, v = ones(1), 0 * ones(1), 6 * ones(1)
    out, lse = attention(q, k, v, AttentionSpec(sinks=(0.0,)), return_lse=True)
    assert out.item() == pytest.approx(3.0, abs=1e-12)
    assert lse.item() == pytest.approx(math.log(2), abs=1e-12)


def test_only_the_sink_is_left() -> None:
    """No key at all, and a query before all keys: output 0, the log-sum-exp is the sink."""
    spec = AttentionSpec(sinks=(1.5,))
    for num_queries, num_keys in ((1, 0), (2, 1)):
        out, lse = attention(
            ones(num_queries), ones(num_keys), ones(num_keys), spec, return_lse=True
        )
        assert out[0].item() == 0
        assert lse[0].item() == pytest.approx(1.5, abs=1e-12)


def test_the_newest_key_has_no_penalty() -> None:
    """vllm-project/vllm#945: a distance that is one too large cancels in the output, not in lse."""
    spec = AttentionSpec(alibi_slopes=(0.25,), scale=1.0)
    _, lse = attention(ones(1), 0 * ones(6), ones(6), spec, return_lse=True)
    expected = math.log(math.fsum(math.exp(-0.25 * distance) for distance in range(6)))
    assert lse.item() == pytest.approx(expected, abs=1e-12)


def test_every_query_head_has_its_own() -> None:
    """Four query heads on two KV heads: head h reads entry h."""
    q, k, v = ones(1, 4), 0 * ones(1, 2), ones(1, 2)
    _, lse = attention(q, k, v, AttentionSpec(sinks=(0.0, 1.0, 2.0, 3.0)), return_lse=True)
    expected = [math.log(1 + math.exp(sink)) for sink in range(4)]
    assert lse[0].tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
def test_one_a_query_head(name: str) -> None:
    spec = AttentionSpec(**{name: (0.0, 0.0)})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"2 {name} for 4 query heads"):
        attention(ones(1, 4), ones(1, 2), ones(1, 2), spec)
