"""What attention and its plan refuse, before anything is launched, and in which words."""

import re

import pytest
import torch

from pagedattn.attention import AttentionSpec
from pagedattn.course.witness import DEVICE

FP8 = torch.float8_e4m3fn


def int32(numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, device=DEVICE).to(dtype)


def good(**change):
    """Two sequences, three tokens, 4 query heads, 2 KV heads, head_dim 8: nothing is wrong."""
    return {
        "q": ones(3, 4, 8),
        "k_cache": ones(5, 4, 2, 8),
        "v_cache": ones(5, 4, 2, 8),
        "block_table": int32([[1, 2], [3, 0]]),
        "seq_lens": int32([5, 3]),
        "query_start_loc": int32([0, 1, 3]),
    } | change


REFUSED = [
    ({"q": ones(3, 32)}, "q has shape [3, 32]; it must be [num_tokens, num_heads, head_dim]"),
    (
        {"k_cache": ones(5, 4, 2, 16)},
        "k_cache has shape [5, 4, 2, 16]; it must be [num_blocks, block_size, num_kv_heads, 8]",
    ),
    ({"v_cache": ones(5, 4, 1, 8)}, "v_cache has shape [5, 4, 1, 8]; it must be [5, 4, 2, 8]"),
    ({"seq_lens": int32([[5, 3]])}, "seq_lens has shape [1, 2]; it must be [num_seqs]"),
    ({"block_table": int32([[1, 2]])}, "block_table has shape [1, 2]; it must be [2, width]"),
    ({"query_start_loc": int32([0, 3])}, "query_start_loc has shape [2]; it must be [3]"),
    ({"q": ones(3, 4, 8).int()}, "q is torch.int32; it must be torch.float16 or torch.bfloat16"),
    (
        {"k_cache": ones(5, 4, 2, 8, dtype=torch.float16)},
        "k_cache is torch.float16; it must be torch.float32 or torch.float8_e4m3fn",
    ),
    (
        {"v_cache": ones(5, 4, 2, 8, dtype=FP8)},
        "v_cache is torch.float8_e4m3fn; it must be torch.float32",
    ),
    ({"block_table": int32([[1, 2], [3, 0]]).long()}, "block_table is torch.int64; it must be"),
    ({"seq_lens": int32([5, 3]).long()}, "seq_lens is torch.int64; it must be torch.int32"),
    (
        {"query_start_loc": int32([0, 1, 3]).long()},
        "query_start_loc is torch.int64; it must be torch.int32",
    ),
    ({"seq_lens": int32([5, 3]).to("meta")}, "seq_lens is on meta, q on"),
    ({"q": ones(3, 3, 8)}, "3 query heads are not a multiple of 2 KV heads"),
    (
        {"k_cache": ones(5, 4, 0, 8), "v_cache": ones(5, 4, 0, 8)},
        "4 query heads are not a multiple of 0 KV heads",
    ),
    (
        {"q": ones(3, 4, 257), "k_cache": ones(5, 4, 2, 257), "v_cache": ones(5, 4, 2, 257)},
        "head_dim is 257; the kernel has room for 1 to 256",
    ),
    (
        {"block_table": int32([[1, 9, 2], [3, 9, 0]])[:, ::2]},
        "rows of the block_table have gaps: its strides are (3, 2)",
    ),
    ({"spec": AttentionSpec(sinks=(0.0,) * 3)}, "3 sinks for 4 query heads"),
    ({"spec": AttentionSpec(alibi_slopes=(0.5,) * 2)}, "2 alibi_slopes for 4 query heads"),
    (
        {"k_scale": ones(1)},
        "k_scale is given, but the cache is torch.float32, not torch.float8_e4m3fn",
    ),
]
FP8_CACHE = {"k_cache": ones(5, 4, 2, 8, dtype=FP8), "v_cache": ones(5, 4, 2, 8, dtype=FP8)}
REFUSED += [
    (FP8_CACHE | {"v_scale": ones(3)}, "v_scale has shape [3]; it must be [2]"),
    (FP8_CACHE | {"k_scale": ones(2, dtype=torch.float16)}, "k_scale is torch.float16; it must be"),
    (FP8_CACHE | {"k_scale": ones(2).to("meta")}, "k_scale is on meta"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[words for _, words in REFUSED])
def test_inputs(stage, change, message):
    out = torch.full((3, 4, 8), 7.0, device=DEVICE)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        stage.paged_attention(**good(**change), out=out)
    assert (out == 7).all(), "refused before anything is written"


OTHER_OUTPUTS = [
    ({"out": ones(3, 4, 16)}, "out has shape [3, 4, 16]; it must be [3, 4, 8]"),
    ({"out": ones(3, 4, 8, dtype=torch.float16)}, "out is torch.float16; it must be torch.float32"),
    ({"out": ones(3, 4, 8).to("meta")}, "out is on meta"),
    ({"lse": ones(4, 3)}, "lse has shape [4, 3]; it must be [3, 4]"),
    ({"lse": ones(3, 4, dtype=torch.float16)}, "lse is torch.float16; it must be torch.float32"),
    ({"lse": ones(3, 4).to("meta")}, "lse is on meta"),
]


@pytest.mark.parametrize(
    ("change", "message"), OTHER_OUTPUTS, ids=[words for _, words in OTHER_OUTPUTS]
)
def test_outputs(stage, change, message):
    """A kernel would write behind a buffer that is too small."""
    with pytest.raises(ValueError, match=re.escape(message)):
        stage.paged_attention(**good(**change))


def new_plan(stage, **change):
    sizes = {
        "max_rows": 2, "max_tokens": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
        "dtype": torch.float32, "device": DEVICE,
    }  # fmt: skip
    return stage.new_plan(**sizes | change)


PLANS = [
    ({"num_heads": 2}, "(group, num_kv_heads, head_dim, window) (1, 2, 8, None); this is (2, 2, 8"),
    ({"num_heads": 8, "num_kv_heads": 4}, "head_dim, window) (2, 4, 8, None); this is (2, 2, 8"),
    ({"head_dim": 16}, "head_dim, window) (2, 2, 16, None); this is (2, 2, 8, None)"),
    ({"window": 3}, "window) (2, 2, 8, 3); this is (2, 2, 8, None)"),
    ({"max_rows": 1}, "2 rows and 3 tokens; the plan has room for 1 and 3"),
    ({"max_tokens": 2}, "2 rows and 3 tokens; the plan has room for 2 and 2"),
    ({"dtype": torch.float64}, "the plan sums in torch.float64; q is torch.float32"),
]


@pytest.mark.parametrize(("change", "message"), PLANS, ids=[words for _, words in PLANS])
def test_plans_for_something_else(stage, change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        stage.paged_attention(**good(), plan=new_plan(stage, **change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3}, "3 query heads are not a multiple of 2 KV heads"),
        ({"num_kv_heads": 0}, "num_kv_heads is 0; it is a whole number of at least 1"),
    ],
)
def test_new_plans(stage, change, message):
    with pytest.raises(ValueError, match=message):
        new_plan(stage, **change)


STEPS = [
    ({"seq_lens": int32([[5, 3]])}, "seq_lens has shape [1, 2]"),
    ({"query_start_loc": int32([0, 3])}, "query_start_loc has shape [2]; it must be [3]"),
    ({"seq_lens": int32([5, 3]).long()}, "seq_lens is torch.int64; it must be torch.int32"),
    ({"query_start_loc": int32([0, 1, 3]).float()}, "query_start_loc is torch.float32; it must"),
    ({"seq_lens": int32([5, 0, 3, 0])[::2]}, "seq_lens is not contiguous"),
    ({"query_start_loc": int32([0, 1, 3]).to("meta")}, "query_start_loc is on meta"),
    (
        {"seq_lens": int32([5, 3, 1]), "query_start_loc": int32([0, 1, 2, 3])},
        "3 rows; the plan has room for 2",
    ),
]


@pytest.mark.parametrize(("change", "message"), STEPS, ids=[words for _, words in STEPS])
def test_steps(stage, change, message):
    plan = new_plan(stage)
    stage.plan_attention(plan, int32([5, 3]), int32([0, 1, 3]))
    before = plan.decode_items.clone()
    step = {"seq_lens": int32([9, 9]), "query_start_loc": int32([0, 1, 2])} | change
    with pytest.raises(ValueError, match=re.escape(message)):
        stage.plan_attention(plan, **step)
    assert torch.equal(plan.decode_items, before), "the plan is what it was"


def test_the_most_queries_of_a_plan_without_prefill(stage, make_batch):
    """A row of just so many queries is a decode row; one of fewer, too."""
    most = new_plan(stage).decode_queries
    batch = make_batch([most + 70, most, 9], [most, most, most - 1])
    sizes = {"max_rows": 3, "max_tokens": 3 * most, "head_dim": 16, "has_prefill": False}
    plan = new_plan(stage, **sizes)
    stage.plan_attention(plan, batch.seq_lens, batch.query_start_loc)
    batch.check(stage, plan=plan)


def test_a_plan_without_prefill(stage):
    """It has no room for prefill tiles; decode rows it takes."""
    plan = new_plan(stage, has_prefill=False)
    assert len(plan.prefill_items) == 0
    stage.plan_attention(plan, int32([5, 3]), int32([0, 1, 3]))
    assert torch.equal(stage.paged_attention(**good(), plan=plan), stage.paged_attention(**good()))
