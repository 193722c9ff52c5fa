"""In a batch-invariant plan a row's result is the same, bit by bit, whatever stands beside it
(tenstorrent/tt-metal#47226, vllm-project/vllm#51187)."""

import random

import pytest
import torch

from pagedattn.attention import AttentionSpec
from pagedattn.course.witness import DEVICE

on_a_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


def subset(batch, rows):
    """The batch of these rows of a batch, in this order, over the same cache; and their tokens."""
    starts = batch.query_start_loc.tolist()
    tokens = [token for row in rows for token in range(starts[row], starts[row + 1])]
    query_lens = torch.tensor([0, *(starts[row + 1] - starts[row] for row in rows)])
    return type(batch)(
        q=batch.q[tokens],
        keys=[batch.keys[row] for row in rows],
        values=[batch.values[row] for row in rows],
        k_cache=batch.k_cache,
        v_cache=batch.v_cache,
        block_table=batch.block_table[rows].contiguous(),
        seq_lens=batch.seq_lens[rows],
        query_start_loc=query_lens.cumsum(0).to(DEVICE, torch.int32),
    ), tokens


def run(stage, batch, spec):
    """Output and log-sum-exp by a plan of just this batch."""
    num_tokens, num_heads, head_dim = batch.q.shape
    plan = stage.new_plan(
        len(batch.seq_lens), num_tokens, num_heads, batch.k_cache.shape[2], head_dim,
        dtype=batch.q.dtype, window=spec.window, batch_invariant=True, device=DEVICE,
    )  # fmt: skip
    stage.plan_attention(plan, batch.seq_lens, batch.query_start_loc)
    return batch.run(stage, spec, plan)


def check_beside(stage, batch, row, crowds, spec):
    """The row alone, then among so many others, twice, each time in another order; its table has
    only the columns that it needs when it is alone."""
    choose = random.Random(0)
    others = [other for other in range(len(batch.seq_lens)) if other != row]
    single, _ = subset(batch, [row])
    width = -(-int(batch.seq_lens[row]) // batch.k_cache.shape[1])
    single.block_table = single.block_table[:, :width].contiguous()
    alone = run(stage, single, spec)
    for crowd in crowds:
        for _ in range(2):
            rows = [row, *choose.sample(others, crowd)]
            choose.shuffle(rows)
            among, tokens = subset(batch, rows)
            first = tokens.index(int(batch.query_start_loc[row]))
            for found, expected in zip(run(stage, among, spec), alone, strict=True):
                assert torch.equal(found[first : first + len(expected)], expected), (
                    f"row {row} differs among {crowd} others, in the order {rows}"
                )


@pytest.mark.parametrize("window", [None, 100])
def test_beside_others(stage, make_batch, monkeypatch, window):
    """A long decode, a decode of several queries, a chunk, and short ones: splits of 64 keys."""
    monkeypatch.setattr(stage.plan, "LONE_KEYS", 64)
    batch = make_batch(
        [300, 9, 200, 150, 1, 70, 130, 40], [1, 1, 3, 40, 1, 1, 9, 40], num_heads=2, num_kv_heads=1
    )
    spec = AttentionSpec(window=window)
    for row in (0, 2, 3):
        check_beside(stage, batch, row, [1, 7] if row == 0 else [3], spec)


def test_a_plan_that_balances_is_not_invariant(stage, make_batch, monkeypatch):
    """The test above could fail: beside a long row a row of 130 keys is not cut, alone it is."""
    monkeypatch.setattr(stage.plan, "num_multiprocessors", lambda device: 1)
    batch = make_batch([130, 1500], [1, 1], num_heads=2, num_kv_heads=1)
    (alone, _), both = subset(batch, [0]), batch
    assert not torch.equal(alone.run(stage)[1][0], both.run(stage)[1][0])


@pytest.mark.parametrize("lone_splits", [1, 3, 16])
def test_splits_by_the_rows_own_length(stage, make_batch, monkeypatch, lone_splits):
    """300 keys in at most 16 splits of 128 or more are 3 of 128; in at most one, 1."""
    monkeypatch.setattr(stage.plan, "LONE_KEYS", 128)
    monkeypatch.setattr(stage.plan, "LONE_SPLITS", lone_splits)
    batch = make_batch([300, 20, 64], [1, 1, 2])
    plan = stage.new_plan(3, 4, 4, 2, 16, dtype=batch.q.dtype, batch_invariant=True, device=DEVICE)
    stage.plan_attention(plan, batch.seq_lens, batch.query_start_loc)
    rows = [item[0] for item in plan.decode_items[: int(plan.num_items[0])].tolist()]
    assert rows.count(0) == min(3, lone_splits) and rows.count(1) == rows.count(2) == 1
    assert len(plan.decode_items) == 3 * lone_splits
    batch.check(stage, plan=plan)


@on_a_gpu
@pytest.mark.parametrize("cache", ["bfloat16", "fp8"])
def test_beside_43_others(stage, make_batch, cache):
    """Decodes of up to 20,000 keys, some with speculated tokens, and prompts."""
    choose = random.Random(1)
    kinds = [(choose.randint(1, 20000), 1) for _ in range(30)]
    kinds += [(choose.randint(5, 9000), 4) for _ in range(7)] + [(n, n) for n in range(9, 700, 99)]
    seq_lens, query_lens = zip(*kinds, strict=True)
    batch = make_batch(
        seq_lens, query_lens, block_size=16, num_heads=32, num_kv_heads=8, head_dim=128,
        dtype=torch.bfloat16,
    )  # fmt: skip
    if cache == "fp8":
        for name in ("k_cache", "v_cache"):
            setattr(batch, name, getattr(batch, name).to(torch.float8_e4m3fn))
    longest = seq_lens.index(max(seq_lens))
    for row in (longest, 30, 43):
        check_beside(stage, batch, row, [1, 7, 43], AttentionSpec())
