"""Shared prefixes at the sizes that they are made for: 16-bit tiles, many splits, races, graphs."""

import math

import pytest
import torch

from pagedattn.attention import AttentionSpec
from pagedattn.course.witness import DEVICE

pytestmark = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")

SIZES = {"block_size": 16, "num_heads": 8, "num_kv_heads": 2, "dtype": torch.bfloat16}


@pytest.fixture(autouse=True, params=["this machine's kernels", "every machine's kernels"])
def which_kernels(request, stage, monkeypatch):
    """A Hopper GPU has kernels of its own. Those of other machines are to be right on it, too."""
    if request.param == "every machine's kernels":
        monkeypatch.setattr(stage.hopper, "is_hopper", lambda device: False)


@pytest.fixture(autouse=True)
def small_groups(stage, monkeypatch):
    """Sharing need not pay."""
    monkeypatch.setattr(stage.plan, "SPARED_BYTES", 0)


@pytest.fixture
def crowd(make_batch):
    """``crowd(num_rows, **sizes)``: rows that share 4096 tokens, every second one 8192; each has up
    to 300 of its own and one to three queries."""

    def make(num_rows, **sizes):
        seq_lens = [(8192 if row % 2 else 4096) + 7 * row % 293 + 8 for row in range(num_rows)]
        batch = make_batch(seq_lens, [1 + row % 3 for row in range(num_rows)], **SIZES | sizes)
        block_size = batch.k_cache.shape[1]
        batch.share(range(num_rows), 4096 // block_size)
        batch.share(range(1, num_rows, 2), 8192 // block_size)
        return batch

    return make


@pytest.mark.parametrize("num_rows", [2, 4, 9, 40])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_long_prefixes(stage, crowd, num_rows, head_dim):
    batch = crowd(num_rows, head_dim=head_dim)
    plan = batch.plan(stage)
    assert int(plan.shared.num_items) > 1
    batch.check(stage, plan=plan)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("block_size", [1, 16, 48])
def test_types_and_block_sizes(stage, crowd, dtype, block_size):
    batch = crowd(5, dtype=dtype, block_size=block_size, head_dim=128)
    spec = AttentionSpec(sinks=(0.5,) * 8, alibi_slopes=tuple(2.0**-n for n in range(1, 9)))
    batch.check(stage, spec, batch.plan(stage))


def test_fp8(stage, crowd):
    batch = crowd(12, head_dim=128)
    for name, contents in (("k_cache", batch.keys), ("v_cache", batch.values)):
        setattr(batch, name, getattr(batch, name).to(torch.float8_e4m3fn))
        contents[:] = [row.to(torch.float8_e4m3fn).double() for row in contents]
    batch.check(stage, plan=batch.plan(stage))


def test_no_worse_than_without(stage, crowd):
    """Root mean square of the error against float64: at most 1.2 times that of a plain plan."""
    batch = crowd(20, head_dim=128)
    expected, _ = batch.dense()
    shared, plain = (
        float((batch.run(stage, plan=plan)[0].double() - expected).square().mean().sqrt())
        for plan in (batch.plan(stage), None)
    )
    assert shared <= 1.2 * plain, f"{shared:.3g}, without sharing {plain:.3g}"


def test_the_same_bits_every_time(stage, crowd):
    """A part that was read before it was written would show."""
    batch = crowd(40, head_dim=128)
    plan = batch.plan(stage)
    out, lse = batch.run(stage, plan=plan)
    for _ in range(20):
        for partial in (plan, plan.shared):
            partial.partial_out.fill_(math.nan)
            partial.partial_lse.fill_(math.nan)
        again, lse_again = batch.run(stage, plan=plan)
        assert torch.equal(again, out) and torch.equal(lse_again, lse)


def test_a_captured_graph_finds_other_groups(stage, crowd):
    """Tables, queries and numbers of rows change under the graph. What is captured cannot wait for
    the device."""
    batch, other = (crowd(12, head_dim=128, seed=seed) for seed in (0, 1))
    for row in range(0, 12, 4):
        first = other.block_table[row, :100]
        other.block_table[row, :100] = first.flip(0)  # these are a group of their own now
    num_blocks = len(batch.k_cache)
    k_cache, v_cache = (
        torch.cat([getattr(batch, name), getattr(other, name)]) for name in ("k_cache", "v_cache")
    )
    other.block_table += num_blocks * (other.block_table > 0)
    batch.k_cache = other.k_cache = k_cache
    batch.v_cache = other.v_cache = v_cache
    table, out = batch.block_table.clone(), torch.empty_like(batch.q)
    plan = batch.plan(stage, has_prefill=False)
    q, seq_lens, starts = batch.q.clone(), batch.seq_lens.clone(), batch.query_start_loc.clone()

    def step():
        stage.plan_attention(plan, seq_lens, starts, table)
        stage.paged_attention(
            q, k_cache, v_cache, table, seq_lens, starts, AttentionSpec(), plan, out=out
        )

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    plain = stage.new_plan(12, len(q), 8, 2, 128, dtype=q.dtype, has_prefill=False, device=DEVICE)
    found = []
    for now, num_rows in ((other, 12), (batch, 12), (batch, 7), (other, 3), (batch, 12)):
        q.copy_(now.q)
        seq_lens.copy_(now.seq_lens)
        table.copy_(now.block_table)
        starts.copy_(now.query_start_loc.clamp(max=int(now.query_start_loc[num_rows])))
        out.zero_()
        graph.replay()
        found.append(int(plan.shared.num_items))
        stage.plan_attention(plain, seq_lens, starts)
        expected = torch.zeros_like(out)
        stage.paged_attention(
            q, k_cache, v_cache, table, seq_lens, starts, AttentionSpec(), plain, out=expected
        )
        # Both are within some units in the last place of bfloat16, which has 8 bits.
        torch.testing.assert_close(out, expected, rtol=0, atol=2e-2)
    assert found[0] > 0 and found[1] == found[4] > 0
