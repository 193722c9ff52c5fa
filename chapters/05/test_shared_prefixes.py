"""Blocks that rows have in common are read once for all of them, and the result is the same.

The oracle is dense attention of each sequence alone, in float64.
"""

import math

import pytest
import torch

from pagedattn.attention import AttentionSpec
from pagedattn.course.witness import DEVICE, Witness

FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def short_segments(stage, monkeypatch):
    """Segments are multiples of 32 keys, not of 128, and to spare the reading of 32 is enough."""
    monkeypatch.setattr(stage.groups, "SHARED_KEYS", 32)
    monkeypatch.setattr(stage.groups, "SAVED_KEYS", 32)
    monkeypatch.setattr(stage.plan, "SPARED_BYTES", 0)


def test_nothing_in_common(stage, make_batch):
    batch = make_batch([90, 70, 100], [1, 1, 2])
    plan = batch.plan(stage)
    assert plan.shared.num_items == 0
    plain = stage.new_plan(3, 4, 4, 2, 16, dtype=batch.q.dtype, device=DEVICE)
    stage.plan_attention(plain, batch.seq_lens, batch.query_start_loc)
    for found, expected in zip(
        batch.run(stage, plan=plan), batch.run(stage, plan=plain), strict=True
    ):
        assert torch.equal(found, expected)


def test_a_window_looks_for_nothing(stage, make_batch):
    """The keys that rows have in common lie behind it."""
    batch = make_batch([90, 90], [1, 1])
    batch.share([0, 1], 16)
    plan = batch.plan(stage, window=40)
    assert plan.shared is None
    batch.check(stage, AttentionSpec(window=40), plan=plan)


def test_shared_blocks_are_read_through_the_first_members_table(stage, make_batch):
    """So bytes are saved: once the plan is made, the other members' own entries of shared columns
    may name another block, and nobody notices. In a plain plan it is noticed."""
    batch = make_batch([170, 80, 190, 175], [1, 1, 2, 1])
    batch.share([0, 2, 3], 16)
    batch.share([2, 3], 40)
    plan = batch.plan(stage)
    batch.k_cache[0] = batch.v_cache[0] = 100.0
    batch.block_table[2, :16] = 0
    batch.block_table[3, :40] = 0
    batch.check(stage, plan=plan)
    error = (batch.run(stage)[0] - batch.dense()[0]).abs()
    assert error[0].max() < 1 < error[2:].max(), "a plain plan reads every row's own table"


SPECS = {
    "plain": AttentionSpec(),
    "scale and cap": AttentionSpec(scale=0.7, soft_cap=3.0),
    "slopes": AttentionSpec(alibi_slopes=(0.5, 0.25, 0.125, 0.0625)),
    "sinks": AttentionSpec(sinks=(0.5, -1.0, 2.0, 0.0)),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_what_attention_adds_to_a_score(stage, make_batch, spec):
    """Several queries a row: each has its own distance to a shared key. A sink counts once."""
    batch = make_batch([90, 110, 101], [1, 3, 2])
    batch.share([0, 1, 2], 16)
    batch.share([1, 2], 24)
    plan = batch.plan(stage)
    assert plan.shared.num_items > 0
    batch.check(stage, spec, plan)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (8, 8), (20, 1), (14, 2)])
def test_heads_that_share(stage, make_batch, num_heads, num_kv_heads):
    """With 20 heads a tile has the queries of one token: then nothing is worth sharing."""
    batch = make_batch([70, 70], [1, 1], num_heads=num_heads, num_kv_heads=num_kv_heads)
    batch.share([0, 1], 16)
    plan = batch.plan(stage)
    assert (plan.shared.num_items > 0) == (num_heads != 20)
    batch.check(stage, plan=plan)


def test_fp8_cache(stage, make_batch):
    """K and V are stored divided by 0.5 and 0.25."""
    batch = make_batch([70, 90], [1, 1])
    batch.share([0, 1], 16)
    scales = {}
    for name, contents, scale in (("k", batch.keys, 0.5), ("v", batch.values, 0.25)):
        setattr(batch, f"{name}_cache", (getattr(batch, f"{name}_cache") / scale).to(FP8))
        contents[:] = [(row / scale).to(FP8).double() * scale for row in contents]
        scales[f"{name}_scale"] = torch.tensor([scale], device=DEVICE)
    plan = batch.plan(stage)
    assert plan.shared.num_items > 0
    batch.check(stage, plan=plan, **scales)


@pytest.mark.parametrize("num_rows", [2, 20])
def test_few_members_and_many(stage, make_batch, monkeypatch, num_rows):
    """With 16-bit numbers a full tile has 128 rows, but few members have a smaller one: here those
    of up to 32 rows, two query heads each."""
    monkeypatch.setattr(stage.groups, "SHARED_KEYS", 128)
    batch = make_batch(
        [140] * num_rows, [1] * num_rows, num_heads=2, num_kv_heads=1, dtype=torch.float16
    )
    batch.share(range(num_rows), 32)
    plan = batch.plan(stage)
    assert plan.shared.num_items > 0
    batch.check(stage, plan=plan)


def test_what_an_earlier_step_left(stage, make_batch):
    """Old groups, items and counts in the same buffers are none of this step's."""
    batch = make_batch([70, 90, 80, 75], [1, 1, 1, 1])
    batch.share([0, 1, 2, 3], 16)
    plan = batch.plan(stage, max_rows=6)
    batch.check(stage, plan=plan)
    shared = plan.shared
    integers = (
        shared.leaders, shared.ends, shared.num_tokens, shared.order, shared.items,
        shared.num_items, shared.members, shared.parts,
    )  # fmt: skip
    for number in (2**30, -1):
        for buffer in integers:
            buffer.fill_(number)
        shared.partial_out.fill_(math.nan)
        shared.partial_lse.fill_(math.nan)
        batch.fill(stage, plan)
        batch.check(stage, plan=plan)
    apart = make_batch([70, 90], [1, 1])
    apart.fill(stage, plan)
    assert plan.shared.num_items == 0
    apart.check(stage, plan=plan)


def test_a_plan_for_many_layers(stage, make_batch):
    batch = make_batch([70, 90], [1, 1])
    batch.share([0, 1], 16)
    plan = batch.plan(stage)
    first = batch.run(stage, plan=plan)
    for _ in range(2):
        for found, expected in zip(batch.run(stage, plan=plan), first, strict=True):
            assert torch.equal(found, expected)


def test_no_rows(stage, make_batch):
    batch = make_batch([70, 90], [1, 1])
    plan = batch.plan(stage)
    table, lens, starts = batch.block_table[:0], batch.seq_lens[:0], batch.query_start_loc[:1]
    stage.plan_attention(plan, lens, starts, table)
    assert not plan.shared.num_items.any() and not plan.num_items.any()


def test_forks_and_prefix_hits_in_the_cache(stage, monkeypatch):
    """A prompt, a fork of it, and a request with the same prompt that is found in the cache."""
    found = []
    library_attention = stage.cache.paged_attention

    def paged_attention(*args):
        shared = args[-1].shared
        found.append(0 if shared is None else int(shared.num_items))
        return library_attention(*args)

    monkeypatch.setattr(stage.cache, "paged_attention", paged_attention)
    witness = Witness(stage, num_layers=1, num_blocks=80, max_seq_len=80, dtype=torch.float32)
    prompt = list(range(66))
    witness.add("A", prompt)
    witness.step({"A": 66})
    witness.fork("A", "B")
    witness.append("A")
    witness.append("B")
    witness.add("C", prompt)
    assert found == [0]
    witness.step({"A": 1, "B": 1, "C": witness.waiting("C")})
    assert found[1] > 0
    witness.free("A")
    witness.decode("B", "C")
    assert found[2] > 0
    witness.check_contents()


def int32(numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


TABLES = [
    (None, "the plan shares prefixes: it needs a block_table"),
    (int32([[1, 2]]), r"block_table has shape \[1, 2\]; it must be \[2, width\]"),
    (int32([[1, 2], [3, 4]]).long(), "block_table is torch.int64; it must be torch.int32"),
    (int32([[1, 2], [3, 4]]).to("meta"), "block_table is on meta"),
    (int32([[1, 0, 2], [3, 0, 4]])[:, ::2], "rows of the block_table have gaps"),
]


@pytest.mark.parametrize(("table", "message"), TABLES, ids=[words for _, words in TABLES])
def test_tables_that_are_refused(stage, make_batch, table, message):
    batch = make_batch([70, 90], [1, 1])
    batch.share([0, 1], 16)
    plan = batch.plan(stage)
    before = plan.shared.items.clone(), plan.decode_items.clone()
    with pytest.raises(ValueError, match=message):
        stage.plan_attention(plan, int32([3, 3]), batch.query_start_loc, table)
    assert torch.equal(plan.shared.items, before[0]) and torch.equal(plan.decode_items, before[1])


def test_a_cache_of_other_blocks(stage, make_batch):
    plan = make_batch([70, 90], [1, 1], block_size=8).plan(stage)
    with pytest.raises(ValueError, match="the plan shares blocks of 8; the cache has blocks of 4"):
        make_batch([70, 90], [1, 1]).run(stage, plan=plan)


def test_plans_that_are_refused(stage):
    sizes = {"dtype": torch.float32, "device": DEVICE}
    with pytest.raises(ValueError, match="share_block_size is 0; a block has at least 1 slot"):
        stage.new_plan(2, 2, 4, 2, 16, share_block_size=0, **sizes)
    with pytest.raises(ValueError, match="a batch-invariant plan shares no prefixes"):
        stage.new_plan(2, 2, 4, 2, 16, share_block_size=4, batch_invariant=True, **sizes)
