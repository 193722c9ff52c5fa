"""What the kernels of a Hopper GPU do by themselves: tiles out of pieces of blocks, and their ends.

All other tests of attention run on them as well, where they can.
"""

import math

import pytest
import torch

from pagedattn.attention import AttentionSpec
from pagedattn.course.witness import DEVICE
from pagedattn.kernels.hopper import is_hopper

pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" or not is_hopper(torch.device(DEVICE)), reason="needs a Hopper GPU"
)
FP8 = torch.float8_e4m3fn


@pytest.fixture
def no_others(stage, monkeypatch):
    """The kernels of every machine may not be launched."""

    class Forbidden:
        def __getitem__(self, grid):
            raise AssertionError("the kernels of every machine are launched here")

    monkeypatch.setattr(stage.attend, "attend_kernel", Forbidden())
    monkeypatch.setattr(stage.attend_shared, "attend_shared_kernel", Forbidden())


@pytest.mark.usefixtures("no_others")
@pytest.mark.parametrize("block_size", [8, 16, 24, 48, 128, 2048])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_ends_of_tiles_and_of_blocks(stage, make_batch, block_size, head_dim, dtype):
    """Lengths around those of a piece, a block, a tile, and a share; queries around a tile's end.
    Slots behind a length hold NaN."""
    lengths = [1, 7, 8, 9, 63, 64, 65, 127, 128, 129, 2047, 2048, 2049]
    queries = [1, 1, 2, 1, 63, 31, 32, 33, 128, 1, 1, 2048, 5]
    batch = make_batch(
        lengths, queries, block_size=block_size, num_heads=8, num_kv_heads=2, head_dim=head_dim,
        dtype=dtype,
    )  # fmt: skip
    batch.check(stage)


@pytest.mark.usefixtures("no_others")
@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8, 16, 32])
def test_any_group(stage, make_batch, group):
    batch = make_batch(
        [700, 33, 1500, 260], [1, 2, 1, 260], block_size=16, num_heads=2 * group, num_kv_heads=2,
        head_dim=128, dtype=torch.bfloat16,
    )  # fmt: skip
    batch.check(stage)


@pytest.mark.usefixtures("no_others")
@pytest.mark.parametrize("window", [1, 17, 128, 1000, 2**31 - 1])
@pytest.mark.parametrize("sinks", [None, (0.5, -3.0, 20.0, 0.0)], ids=["", "sinks"])
def test_windows_and_sinks(stage, make_batch, window, sinks):
    """Keys that have left the window may be in blocks that were given away: they hold NaN."""
    batch = make_batch(
        [2000, 130, 700, 300], [1, 3, 500, 300], block_size=16, num_heads=4, num_kv_heads=2,
        head_dim=64, dtype=torch.float16,
    )  # fmt: skip
    for blocks, seq_len, new in zip(
        batch.block_table, batch.seq_lens.tolist(), batch.query_lens, strict=True
    ):
        gone = blocks[: max(0, seq_len - new + 1 - window) // 16].long()
        batch.k_cache[gone] = batch.v_cache[gone] = math.nan
    batch.check(stage, AttentionSpec(window=window, sinks=sinks))


@pytest.mark.usefixtures("no_others")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0])
def test_fp8_with_a_scale_for_each_head(stage, make_batch, head_dim, dtype, size):
    """Queries of any size: beside an fp8 cache they become float16, whose range is small."""
    batch = make_batch(
        [3000, 40, 513, 64], [1, 2, 1, 1], block_size=16, num_heads=8, num_kv_heads=2,
        head_dim=head_dim, dtype=dtype,
    )  # fmt: skip
    batch.q *= size
    scales = torch.tensor([0.25 / size, 2.0 / size]), torch.tensor([3.0, 0.5])
    for name, contents, scale in zip(
        ("k_cache", "v_cache"), (batch.keys, batch.values), scales, strict=True
    ):
        setattr(batch, name, getattr(batch, name).to(FP8))
        factor = scale.double().to(DEVICE)[:, None]
        contents[:] = [row.to(FP8).double() * factor for row in contents]
    plan = stage.new_plan(4, 5, 8, 2, head_dim, dtype=dtype, has_prefill=False, device=DEVICE)
    stage.plan_attention(plan, batch.seq_lens, batch.query_start_loc)
    expected, _ = batch.dense()
    out = torch.full_like(batch.q, float("nan"))
    k_scale, v_scale = (scale.to(DEVICE) for scale in scales)
    stage.paged_attention(
        batch.q, batch.k_cache, batch.v_cache, batch.block_table, batch.seq_lens,
        batch.query_start_loc, AttentionSpec(), plan, k_scale=k_scale, v_scale=v_scale, out=out,
    )  # fmt: skip
    error = (out.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < 4e-3, f"off by {float(error):.1e} of what is right; 16 bits allow 4e-3"


LONG = [32768 + 1000 * row for row in range(8)]
SHORT = [(1, 128, 129, 256, 257, 300, 384)[row % 7] + row % 5 for row in range(333)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("lengths", [LONG, SHORT], ids=["long", "short"])
def test_the_same_bits_with_full_rings(stage, make_batch, lengths, dtype):
    """A ring turns a thousand times. A tile overwritten before it was read would show, and with
    rows of one to four tiles one that was taken for another."""
    num_rows = len(lengths)
    batch = make_batch(
        lengths, [1] * num_rows, block_size=16, num_heads=32, num_kv_heads=8, head_dim=128,
        dtype=torch.bfloat16,
    )  # fmt: skip
    for name, contents in (("k_cache", batch.keys), ("v_cache", batch.values)):
        setattr(batch, name, getattr(batch, name).to(dtype))
        contents[:] = [row.to(dtype).double() for row in contents]
    plan = stage.new_plan(
        num_rows, num_rows, 32, 8, 128, dtype=torch.bfloat16, has_prefill=False, device=DEVICE
    )
    stage.plan_attention(plan, batch.seq_lens, batch.query_start_loc)
    expected, _ = batch.dense()
    out, _ = batch.run(stage, plan=plan)
    error = (out.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < 4e-3, f"off by {float(error):.1e} of what is right; 16 bits allow 4e-3"
    for _ in range(30):
        assert torch.equal(batch.run(stage, plan=plan)[0], out)


@pytest.mark.parametrize("head_dim", [80, 128])
def test_what_they_do_not_know(stage, make_batch, head_dim):
    """Then the others attend, on the same plan."""
    batch = make_batch(
        [3000, 40, 700], [1, 2, 300], block_size=16, num_heads=8, num_kv_heads=2,
        head_dim=head_dim, dtype=torch.bfloat16,
    )  # fmt: skip
    plan = stage.new_plan(3, 303, 8, 2, head_dim, dtype=torch.bfloat16, device=DEVICE)
    stage.plan_attention(plan, batch.seq_lens, batch.query_start_loc)
    assert plan.is_shared_out == (head_dim == 128)
    batch.check(stage, AttentionSpec(soft_cap=20.0), plan)
    batch.check(stage, AttentionSpec(alibi_slopes=(0.5, 0.25) * 4), plan)
    batch.k_cache, batch.v_cache = (
        torch.cat([cache, cache[..., :1]], -1)[..., :head_dim]  # rows of an odd number of elements
        for cache in (batch.k_cache, batch.v_cache)
    )
    batch.check(stage, AttentionSpec(), plan)


def test_a_graph_serves_other_lengths(stage, make_batch):
    """Captured at one length, replayed at others; rows in the end are padding."""
    sizes = {
        "block_size": 16, "num_heads": 8, "num_kv_heads": 2, "head_dim": 128,
        "dtype": torch.bfloat16,
    }  # fmt: skip
    batches = [
        make_batch(lengths, [1] * 6, **sizes)
        for lengths in ([4000] * 6, [1, 5000, 20, 300, 64, 17], [9000, 1, 1, 1, 1, 1])
    ]
    width = max(batch.block_table.shape[1] for batch in batches)
    blocks = max(len(batch.k_cache) for batch in batches)
    first = batches[0]
    q, table = first.q.clone(), torch.zeros(6, width, dtype=torch.int32, device=DEVICE)
    k_cache, v_cache = (first.k_cache.new_zeros(blocks, *first.k_cache.shape[1:]) for _ in "kv")
    seq_lens, starts = first.seq_lens.clone(), first.query_start_loc.clone()
    out = torch.empty_like(q)
    plan = stage.new_plan(
        6, 6, 8, 2, 128, dtype=torch.bfloat16, has_prefill=False, share_block_size=16, device=DEVICE
    )

    def step():
        stage.plan_attention(plan, seq_lens, starts, table)
        stage.paged_attention(
            q, k_cache, v_cache, table, seq_lens, starts, AttentionSpec(), plan, out=out
        )

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for batch in [*batches, batches[1]]:
        rows, columns = batch.block_table.shape
        table[:rows, :columns] = batch.block_table
        k_cache[: len(batch.k_cache)] = batch.k_cache
        v_cache[: len(batch.v_cache)] = batch.v_cache
        q.copy_(batch.q)
        seq_lens.copy_(batch.seq_lens)
        out.fill_(float("nan"))
        graph.replay()
        expected, _ = batch.dense()
        assert (out.double() - expected).abs().max() < 3e-2
