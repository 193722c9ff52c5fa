"""What only a GPU can tell: errors of 16-bit products next to torch's own, and races."""

from itertools import pairwise

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from pagedattn.attention import AttentionSpec
from pagedattn.course.witness import DEVICE

pytestmark = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
SHAPES = {
    "decode": ([1000, 513, 64, 2048], [1, 1, 1, 1]),
    "prefill": ([700, 256], [700, 256]),
}


@pytest.fixture(autouse=True, params=["this machine's kernels", "every machine's kernels"])
def which_kernels(request, stage, monkeypatch):
    """A Hopper GPU has kernels of its own. Those of other machines are to be right on it, too."""
    if request.param == "every machine's kernels":
        monkeypatch.setattr(stage.hopper, "is_hopper", lambda device: False)


def sdpa(batch, backend):
    """Torch's attention of each sequence alone. Causal, with the queries at the end: so either one
    query, or as many as keys."""
    rows = []
    for (begin, end), k, v in zip(
        pairwise(batch.query_start_loc.tolist()), batch.keys, batch.values, strict=True
    ):
        assert end - begin in (1, len(k))
        q, k, v = (x.transpose(0, 1)[None] for x in (batch.q[begin:end], k, v))
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(q, k, v, is_causal=end - begin > 1, enable_gqa=True)
        rows.append(out[0].transpose(0, 1))
    return torch.cat(rows)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("kind", SHAPES)
def test_errors_next_to_torchs(stage, make_batch, kind, scale, dtype, backend):
    """Against float64: root mean square at most 1.2 times, greatest at most twice that of SDPA."""
    batch = make_batch(
        *SHAPES[kind], block_size=16, num_heads=16, num_kv_heads=4, head_dim=128, dtype=dtype,
        scale=scale,
    )  # fmt: skip
    expected, _ = batch.dense()
    theirs = sdpa(batch, BACKENDS[backend]).double() - expected
    ours = batch.run(stage)[0].double() - expected
    for name, measure, factor in (
        ("root mean square", lambda error: error.square().mean().sqrt(), 1.2),
        ("greatest", lambda error: error.abs().max(), 2.0),
    ):
        mine, allowed = float(measure(ours)), factor * float(measure(theirs))
        assert mine <= allowed, (
            f"{name} error {mine:.3g}; SDPA ({backend}) has {allowed / factor:.3g}, "
            f"allowed are {factor} times that"
        )


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("block_size", [1, 16, 544, 2048])
def test_long_sequences(stage, make_batch, head_dim, block_size):
    """With blocks of 544, position 1000 lies in block 1 at offset 456."""
    batch = make_batch(
        [1001, 3000, 64, 2500], [1, 1, 64, 300], block_size=block_size, num_heads=10,
        num_kv_heads=2, head_dim=head_dim, dtype=torch.bfloat16,
    )  # fmt: skip
    batch.check(stage)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "spec",
    [AttentionSpec(), AttentionSpec(window=1500, sinks=(0.5,) * 8)],
    ids=["plain", "window and sinks"],
)
def test_the_same_bits_every_time(stage, make_batch, dtype, spec):
    """Many splits, which end in any order; the last one merges all of them, always in the same
    order. A split that was read before it was written would show."""
    batch = make_batch(
        [30000, 17, 9000, 4000, 1], [1, 1, 2, 1, 1], block_size=16, num_heads=8, num_kv_heads=2,
        head_dim=64, dtype=dtype,
    )  # fmt: skip
    plan = stage.new_plan(
        5, 6, 8, 2, 64, dtype=dtype, window=spec.window, has_prefill=False, device=DEVICE
    )
    stage.plan_attention(plan, batch.seq_lens, batch.query_start_loc)
    assert int(plan.num_items[0]) > 30, "many splits"
    out, lse = batch.run(stage, spec, plan)
    for _ in range(20):
        plan.partial_out.fill_(float("nan"))
        plan.partial_lse.fill_(float("nan"))
        again, lse_again = batch.run(stage, spec, plan)
        assert torch.equal(again, out) and torch.equal(lse_again, lse)
    batch.check(stage, spec, plan)


def test_nothing_waits_for_the_gpu(stage, make_batch):
    batch = make_batch([900, 40], [1, 40])
    batch.run(stage)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan = stage.new_plan(2, 41, 4, 2, 16, dtype=torch.float32, device=DEVICE)
        stage.plan_attention(plan, batch.seq_lens, batch.query_start_loc)
        stage.paged_attention(
            batch.q, batch.k_cache, batch.v_cache, batch.block_table, batch.seq_lens,
            batch.query_start_loc, AttentionSpec(), plan,
        )  # fmt: skip
    finally:
        torch.cuda.set_sync_debug_mode("default")
