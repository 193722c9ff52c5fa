"""Where chapter 05's attention ends: sizes, windows and strides at their limits, and inputs that
are refused before anything is launched or written."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pagedattn.attention import AttentionSpec, attention

pytest.importorskip("triton")

from pagedattn import kernels
from pagedattn.course.witness import DEVICE
from pagedattn.kernels.write_kv import FP8

HEADS, KV_HEADS, DIM, BLOCK_SIZE = 4, 2, 8, 4


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def inputs(
    seq_len: int = 7, queries: int = 1, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """One row, its keys in blocks 1, 2, …"""
    num_blocks = -(-seq_len // BLOCK_SIZE)
    k, v = torch.randn(
        2, num_blocks + 1, BLOCK_SIZE, KV_HEADS, DIM, device=DEVICE, dtype=dtype
    ).unbind()
    return {
        "q": torch.randn(queries, HEADS, DIM, device=DEVICE, dtype=dtype),
        "k_cache": k,
        "v_cache": v,
        "block_table": int32(*range(1, num_blocks + 1))[None],
        "seq_lens": int32(seq_len),
        "query_start_loc": int32(0, queries),
    }


def dense(row: dict[str, Any], spec: AttentionSpec) -> Tensor:
    """In float64."""
    seq_len = int(row["seq_lens"])
    keys, values = (
        row[name][row["block_table"][0].long()].flatten(0, 1)[:seq_len].double()
        for name in ("k_cache", "v_cache")
    )
    return attention(row["q"].double(), keys, values, spec)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"v_scale": [1.0, 9.0, 2.0, 9.0]}, "v_scale"),  # every second one is taken
        ({"k_cache": (3, 0, KV_HEADS, DIM)}, "block_size is 0; a block has at least 1 slot"),
        ({"q": torch.float64}, "torch.float64 and a cache of torch.float8_e4m3fn"),
        ({"q": (1, 0, DIM)}, "0 query heads"),
    ],
    ids=["scales with gaps", "empty blocks", "float64 beside fp8", "no heads"],
)
def test_refused(change: dict[str, Any], words: str) -> None:
    row, out = inputs(), torch.full((1, HEADS, DIM), 7.0, device=DEVICE)
    ((name, value),) = change.items()
    if name == "v_scale":
        row |= {key: row[key].to(FP8) for key in ("k_cache", "v_cache")}
        row["v_scale"] = torch.tensor(value, device=DEVICE)[::2]
    elif name == "k_cache":
        row |= {key: torch.zeros(value, device=DEVICE) for key in ("k_cache", "v_cache")}
    elif isinstance(value, torch.dtype):
        row |= {key: row[key].to(FP8) for key in ("k_cache", "v_cache")}
        row["q"], out = row["q"].to(value), out.to(value)
    else:
        row["q"] = torch.zeros(value, device=DEVICE)
        out = out[:, :0]
    with pytest.raises(ValueError, match=words):
        kernels.paged_attention(**row, out=out)
    assert (out == 7).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_rows": -1}, "max_rows is -1; it is a whole number of at least 0"),
        ({"max_tokens": 2.0}, "max_tokens is 2.0; it is a whole number of at least 0"),
        ({"num_heads": 0}, "num_heads is 0; it is a whole number of at least 1"),
        ({"head_dim": 0}, "head_dim is 0; it is a whole number of at least 1"),
        ({"head_dim": 300}, "head_dim is 300; the kernel has room for 1 to 256"),
        ({"window": 0}, "window is 0; it is a whole number of at least 1"),
        ({"dtype": torch.int32}, "queries of torch.int32"),
    ],
    ids=str,
)
def test_plans_that_cannot_be(change: dict[str, Any], words: str) -> None:
    sizes: dict[str, Any] = {
        "max_rows": 2, "max_tokens": 8, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
        "dtype": torch.float32, "device": DEVICE,
    }  # fmt: skip
    with pytest.raises(ValueError, match=words):
        kernels.new_plan(**sizes | change)


def test_a_plan_on_another_device() -> None:
    plan = kernels.new_plan(1, 1, HEADS, KV_HEADS, DIM, dtype=torch.float32, device="meta")
    with pytest.raises(ValueError, match="plan is on meta"):
        kernels.paged_attention(**inputs(), plan=plan)


@pytest.mark.parametrize("queries", [1, 40], ids=["decode", "prefill"])
def test_a_step_larger_than_its_plan_writes_nothing_outside(queries: int) -> None:
    """Its items go into buffers of a fixed size; more than there is room for are not there."""
    plan = kernels.new_plan(1, 1, HEADS, KV_HEADS, DIM, dtype=torch.float32, device=DEVICE)
    room = {name: len(getattr(plan, name)) for name in ("decode_items", "prefill_items")}
    after = {}
    for name, count in room.items():
        whole = torch.full((count + 64, 8), -7, dtype=torch.int32, device=DEVICE)
        after[name] = whole[count:]
        object.__setattr__(plan, name, whole[:count])
    object.__setattr__(plan, "target_splits", 1000)
    kernels.plan_attention(plan, int32(5000), int32(0, queries))
    for name, behind in after.items():
        assert (behind == -7).all(), f"behind {name}"
    assert plan.num_items.tolist() <= list(room.values())


@pytest.mark.parametrize("window", [2**30, 2**31 - 1, 2**40])
def test_a_window_wider_than_any_sequence(window: int) -> None:
    """Also where a row has more queries than keys, and so positions before the first."""
    row = inputs(seq_len=3, queries=8)
    spec = AttentionSpec(window=window)
    found = kernels.paged_attention(**row, spec=spec)
    assert (found.double() - dense(row, AttentionSpec())).abs().max() < 4e-6


@pytest.mark.parametrize("soft_cap", [1.0, 50.0, 1e3, 1e5])
def test_a_soft_cap_keeps_the_digits_of_small_scores(soft_cap: float) -> None:
    """Scores of about 1 under a cap of 10^5: a plain 1 - exp would leave three digits."""
    row = inputs(seq_len=90)
    spec = AttentionSpec(soft_cap=soft_cap)
    error = (kernels.paged_attention(**row, spec=spec).double() - dense(row, spec)).abs().max()
    assert error < 2e-6, f"off by {float(error):.1e}"


@pytest.mark.parametrize("far", [1, 2], ids=["heads", "numbers"])
def test_queries_and_outputs_2_31_numbers_apart(tmp_path: Any, far: int) -> None:
    """Numbers of a sparse file, which takes no such space; in front of them lies as much again."""
    if DEVICE != "cpu":
        pytest.skip("the tests of the chapter do it on a GPU, for tokens")
    numbers = torch.from_file(
        str(tmp_path / "sparse"), shared=True, size=2**32 + 256, dtype=torch.float16
    )
    row = inputs(dtype=torch.float16)
    expected = kernels.paged_attention(**row)
    shape = row["q"].shape
    strides = [64, 16, 1]
    strides[far] = 2**31 // (shape[far] - 1)
    strides[3 - far] = 1
    out = numbers.as_strided(shape, strides, 2**31 + 128)
    row["q"] = numbers.as_strided(shape, strides, 2**31).copy_(row["q"])
    kernels.paged_attention(**row, out=out)
    assert torch.equal(out, expected)
