"""One decode program, step by step: the table of its row, two tiles of keys, and what it keeps."""

import torch
from matplotlib.figure import Figure

from pagedattn import viz
from pagedattn.attention import AttentionSpec
from pagedattn.course.witness import DEVICE
from pagedattn.kernels import paged_attention
from pagedattn.viz.script import run_script
from pagedattn.viz.walks import walk

TABLE, SEQ_LEN, BLOCK_SIZE, KEYS = (5, 2, 7, 3), 14, 4, 8


def draw() -> Figure:
    torch.manual_seed(3)
    k_cache, v_cache = torch.randint(-4, 5, (2, 8, BLOCK_SIZE, 1, 2)) / 2
    for cache in (k_cache, v_cache):
        cache[TABLE[-1], SEQ_LEN % BLOCK_SIZE :] = torch.nan
    q = torch.tensor([[1.0, 1.0], [-1.0, 1.0]])
    check(q, k_cache, v_cache)
    title = "One program walks a block table"
    return viz.draw_walk(q, k_cache, v_cache, TABLE, SEQ_LEN, KEYS, title)


def check(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """The kernel itself comes to the same end."""
    lse = torch.empty(1, len(q), device=DEVICE)
    out = paged_attention(
        q[None].to(DEVICE),
        k_cache.to(DEVICE),
        v_cache.to(DEVICE),
        torch.tensor([TABLE], dtype=torch.int32, device=DEVICE),
        torch.tensor([SEQ_LEN], dtype=torch.int32, device=DEVICE),
        torch.tensor([0, 1], dtype=torch.int32, device=DEVICE),
        AttentionSpec(scale=1.0),
        lse=lse,
    )
    end = walk(q, k_cache, v_cache, TABLE, SEQ_LEN, KEYS)[-1]
    found = torch.cat([out[0], lse.T], 1).double().cpu()
    expected = torch.cat([end.acc / end.total[:, None], (end.top + end.total.log())[:, None]], 1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    run_script(__file__, draw)
