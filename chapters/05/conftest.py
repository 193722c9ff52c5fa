"""What several test files of this chapter need."""

import math
from dataclasses import dataclass

import pytest
import torch

from pagedattn.attention import AttentionSpec, attention
from pagedattn.course.witness import DEVICE

PLAIN = AttentionSpec()
# Of outputs of size 1. Float32: a few units in the last place. 16 bits: outputs are rounded, and so
# is each weight before the tensor cores multiply it.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 4e-6,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}


@pytest.fixture
def far_apart(tmp_path):
    """``far_apart(shape, strides, start)``: a float16 tensor whose numbers may lie 2^31 apart.

    As much memory lies in front of it: there go addresses that were computed in 32 bits, which are
    negative. On the CPU it is a sparse file, which takes no such space. A GPU must have it.
    """
    size, middle = 2**32 + 256, 2**31
    if DEVICE == "cpu":
        path = str(tmp_path / "sparse")
        numbers = torch.from_file(path, shared=True, size=size, dtype=torch.float16)
    elif torch.cuda.mem_get_info()[0] > 2 * size:
        numbers = torch.zeros(size, dtype=torch.float16, device=DEVICE)
    else:
        pytest.skip("needs 8 GiB of the GPU's memory")
    return lambda shape, strides, start: numbers.as_strided(shape, strides, middle + start)


def int32(numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


@dataclass
class PagedBatch:
    """Some sequences twice: dense, and scattered over the blocks of a cache. Slots of no token,
    those of block 0 among them, hold NaN."""

    q: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor

    @property
    def query_lens(self):
        return self.query_start_loc.diff().tolist()

    def plan(self, stage, *, max_rows=None, **options):
        """A plan of this batch, which looks for shared prefixes."""
        num_tokens, num_heads, head_dim = self.q.shape
        _, block_size, num_kv_heads, _ = self.k_cache.shape
        plan = stage.new_plan(
            max_rows or len(self.seq_lens), num_tokens, num_heads, num_kv_heads, head_dim,
            dtype=self.q.dtype, share_block_size=block_size, device=DEVICE, **options,
        )  # fmt: skip
        self.fill(stage, plan)
        return plan

    def fill(self, stage, plan):
        stage.plan_attention(plan, self.seq_lens, self.query_start_loc, self.block_table)

    def run(self, stage, spec=PLAIN, plan=None, **more):
        """What the kernel gives: output and log-sum-exp. Where it writes nothing, 7 stays."""
        out = torch.full_like(self.q, 7.0)
        lse = torch.full(self.q.shape[:2], 7.0, device=DEVICE)
        returned = stage.paged_attention(
            self.q, self.k_cache, self.v_cache, self.block_table, self.seq_lens,
            self.query_start_loc, spec, plan, out=out, lse=lse, **more,
        )  # fmt: skip
        assert returned is out
        return out, lse

    def dense(self, spec=PLAIN):
        """Each sequence alone, in float64: output and log-sum-exp."""
        num_tokens = int(self.query_start_loc[-1])
        rows = self.q[:num_tokens].double().split(self.query_lens)
        parts = [
            attention(q, k.double(), v.double(), spec, return_lse=True)
            for q, k, v in zip(rows, self.keys, self.values, strict=True)
        ]
        out, lse = zip(*parts, strict=True)
        return torch.cat(out), torch.cat(lse)

    def check(self, stage, spec=PLAIN, plan=None, **more):
        out, lse = self.run(stage, spec, plan, **more)
        expected, expected_lse = self.dense(spec)
        end, what = len(expected), self.describe()
        num_nan = int(out.isnan().sum())
        assert num_nan == 0, f"{num_nan} numbers are NaN: a slot of no token was used; {what}"
        tolerance = TOLERANCE[self.q.dtype]
        assert_near(out[:end], expected, tolerance, f"differs from dense attention; {what}")
        # A score is the sum of head_dim products; the log of the sum of some lies close to them.
        assert_near(lse[:end], expected_lse, max(tolerance, 4e-6), f"log-sum-exp; {what}")
        assert (out[end:] == 7).all() and (lse[end:] == 7).all(), f"padding was written; {what}"

    def share(self, rows, num_blocks):
        """From now on these rows begin with the same blocks, those of the first of them. The blocks
        that they had are nobody's: NaN."""
        leader, *others = rows
        block_size = self.k_cache.shape[1]
        for row in others:
            own = set(self.block_table[row, :num_blocks].tolist())
            own -= set(self.block_table[leader, :num_blocks].tolist())
            self.block_table[row, :num_blocks] = self.block_table[leader, :num_blocks]
            for block in own - set(self.block_table.flatten().tolist()):
                self.k_cache[block] = self.v_cache[block] = math.nan
            for contents in (self.keys, self.values):
                common = slice(num_blocks * block_size)
                contents[row][common] = contents[leader][common]

    def describe(self):
        return f"lengths {self.seq_lens.tolist()}, new tokens {self.query_lens}"


def assert_near(found, expected, tolerance, words):
    """Close in every number, relative to those above 1; minus infinity is minus infinity."""
    found, expected = found.double(), expected.double()
    infinite = expected.isinf()
    assert torch.equal(found[infinite], expected[infinite]), f"{words}: not infinite where it ought"
    error = ((found - expected).abs() / expected.abs().clamp(min=1))[~infinite]
    worst = float(error.max()) if len(error) else 0.0
    assert worst <= tolerance, f"{words}: off by {worst:.2g}, allowed {tolerance:g}"


def _make_batch(
    seq_lens,
    query_lens,
    *,
    block_size=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    dtype=torch.float32,
    num_padding=0,
    gaps=0,
    scale=1.0,
    seed=0,
):
    """Random sequences in blocks of a random order. ``gaps``: so many numbers, slots and heads that
    are none of the cache's lie between its own, and hold NaN. ``num_padding`` tokens hold NaN."""
    torch.manual_seed(seed)
    num_blocks = [-(-length // block_size) for length in seq_lens]
    order = iter((torch.randperm(sum(num_blocks) + 2) + 1).tolist())
    table = torch.zeros(len(seq_lens), max(num_blocks, default=0) + 1, dtype=torch.int32)
    shape = (sum(num_blocks) + 3, block_size + gaps, num_kv_heads + gaps, head_dim + gaps)
    caches = torch.full((2, *shape), math.nan, dtype=dtype)
    caches = caches[:, :, :block_size, :num_kv_heads, :head_dim]
    sequences = []
    for row, length in enumerate(seq_lens):
        kv = (torch.randn(2, length, num_kv_heads, head_dim) * scale).to(dtype)
        for column in range(num_blocks[row]):
            table[row, column] = block_id = next(order)
            part = kv[:, column * block_size : (column + 1) * block_size]
            caches[:, block_id, : part.shape[1]] = part
        sequences.append(kv.to(DEVICE))
    q = (torch.randn(sum(query_lens) + num_padding, num_heads, head_dim) * scale).to(dtype)
    q[sum(query_lens) :] = math.nan
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    # Gaps survive: a view of what was copied whole.
    whole = caches._base.to(DEVICE)
    k_cache, v_cache = whole[:, :, :block_size, :num_kv_heads, :head_dim].unbind()
    return PagedBatch(
        q=q.to(DEVICE),
        keys=[kv[0] for kv in sequences],
        values=[kv[1] for kv in sequences],
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=table.to(DEVICE),
        seq_lens=int32(list(seq_lens)),
        query_start_loc=int32(starts.tolist()),
    )


@pytest.fixture
def make_batch():
    """``make_batch(seq_lens, query_lens, **options)``: a random ``PagedBatch``."""
    return _make_batch


@pytest.fixture
def by_hand():
    """``by_hand(q, k, v)``: a ``PagedBatch`` of one sequence in blocks of 4, from numbers.

    ``q`` [num_queries][head_dim], ``k`` and ``v`` [num_keys][head_dim]: one head.
    """

    def make(q, k, v, dtype=torch.float32):
        batch = _make_batch([len(k)], [len(q)], num_heads=1, num_kv_heads=1, head_dim=len(q[0]))
        q, k, v = (torch.tensor(x, dtype=dtype, device=DEVICE)[:, None] for x in (q, k, v))
        caches = torch.full_like(batch.k_cache, math.nan, dtype=dtype).repeat(2, 1, 1, 1, 1)
        for position in range(len(k)):
            block = int(batch.block_table[0, position // 4])
            caches[0, block, position % 4] = k[position]
            caches[1, block, position % 4] = v[position]
        batch.q, batch.keys, batch.values = q, [k], [v]
        batch.k_cache, batch.v_cache = caches
        return batch

    return make
