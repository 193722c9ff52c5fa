"""Both forms of a decode launch on a Hopper GPU, whatever the batch: one that begins before the
kernel before it has ended, and one with two fetch warps for each of K and V."""

import math

import pytest
import torch

from pagedattn.attention import AttentionSpec
from pagedattn.course.witness import DEVICE
from pagedattn.kernels.hopper import is_hopper

pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" or not is_hopper(torch.device(DEVICE)), reason="needs a Hopper GPU"
)


@pytest.fixture(autouse=True, params=[2**60, 0], ids=["brief", "long"])
def form(stage, monkeypatch, request):
    monkeypatch.setattr(stage.hopper, "BRIEF_BYTES", request.param)


def decode_plan(stage, batch, window=None):
    num_tokens, num_heads, head_dim = batch.q.shape
    plan = stage.new_plan(
        len(batch.seq_lens), num_tokens, num_heads, batch.k_cache.shape[2], head_dim,
        dtype=batch.q.dtype, window=window, has_prefill=False, device=DEVICE,
    )  # fmt: skip
    batch.fill(stage, plan)
    assert plan.is_shared_out
    return plan


@pytest.mark.parametrize("head_dim", [64, 128])
def test_rows_of_one_tile_and_of_many(stage, make_batch, head_dim):
    """Rings turn, items of one tile stand between items of many, rows are cut and merged. Twenty
    times the same bits: parts are merged in their order, not in that of their arrival."""
    lengths = [4 + 37 * row % 140 if row % 3 else 4 + 811 * row % 3000 for row in range(150)]
    batch = make_batch(
        lengths, [1 + row % 4 for row in range(150)], block_size=16, num_heads=32, num_kv_heads=8,
        head_dim=head_dim, dtype=torch.bfloat16,
    )  # fmt: skip
    plan = decode_plan(stage, batch)
    batch.check(stage, plan=plan)
    out, _ = batch.run(stage, plan=plan)
    for _ in range(20):
        plan.partial_out.fill_(math.nan)
        plan.partial_lse.fill_(math.nan)
        assert torch.equal(batch.run(stage, plan=plan)[0], out)


@pytest.mark.parametrize("block_size", [16, 24])
@pytest.mark.parametrize("window", [1, 17, 300, 1000])
def test_blocks_that_left_the_window(stage, make_batch, window, block_size):
    """They may have been given away: they hold NaN."""
    batch = make_batch(
        [2000, 130, 7000, 300, 301], [1, 3, 4, 1, 2], block_size=block_size, num_heads=8,
        num_kv_heads=2, head_dim=128, dtype=torch.float16,
    )  # fmt: skip
    for blocks, seq_len, new in zip(
        batch.block_table, batch.seq_lens.tolist(), batch.query_lens, strict=True
    ):
        gone = blocks[: max(0, seq_len - new + 1 - window) // block_size].long()
        batch.k_cache[gone] = batch.v_cache[gone] = math.nan
    batch.check(stage, AttentionSpec(window=window), decode_plan(stage, batch, window))


def test_layers_right_behind_each_other(stage, make_batch):
    """Each layer writes K and V of what the layer before has found, and reads them. A launch that
    begins early must not read early: the bits are those with a pause after every launch."""
    batch = make_batch(
        [500, 17, 3000, 900, 129, 1], [1] * 6, block_size=16, num_heads=16, num_kv_heads=2,
        head_dim=128, dtype=torch.bfloat16,
    )  # fmt: skip
    last = batch.seq_lens.long() - 1
    blocks = batch.block_table.long().gather(1, (last // 16)[:, None])[:, 0]
    slots = blocks * 16 + last % 16
    plan = decode_plan(stage, batch)
    q, k_cache, v_cache = batch.q.clone(), batch.k_cache.clone(), batch.v_cache.clone()
    first, second = torch.empty_like(q), torch.empty_like(q)

    def step(pause=lambda: None):
        for now, before in ((first, q), (batch.k_cache, k_cache), (batch.v_cache, v_cache)):
            now.copy_(before)
        now, then = first, second
        for layer in range(12):
            if layer % 3:  # or attention stands right behind attention
                stage.write_kv(batch.k_cache, batch.v_cache, now[:, :2], now[:, 2:4], slots)
                pause()
            stage.paged_attention(
                now, batch.k_cache, batch.v_cache, batch.block_table, batch.seq_lens,
                batch.query_start_loc, AttentionSpec(), plan, out=then,
            )  # fmt: skip
            pause()
            now, then = then, now
        return now

    expected = step(torch.cuda.synchronize).clone()
    assert expected.isfinite().all() and expected.any()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for run in [step, graph.replay] * 20:
        for buffer in (first, second, plan.partial_out, plan.partial_lse):
            buffer.fill_(math.nan)
        run()
        assert torch.equal(out, expected)
