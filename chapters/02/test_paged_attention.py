"""Attention through block tables equals dense attention over the same keys and values."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedattn.attention import AttentionSpec, attention
from pagedattn.course.witness import DEVICE

PLAIN = AttentionSpec()
# What rounding leaves of outputs of size 1. Float32 outputs are compared with float64 ones.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}

pytestmark = pytest.mark.contract


@dataclass
class Case:
    """Some sequences twice: dense, and scattered over the blocks of a cache."""

    q: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: list[int]
    query_lens: list[int]

    def paged(self, stage, spec=PLAIN):
        starts = [sum(self.query_lens[:i]) for i in range(len(self.query_lens) + 1)]
        return stage.paged_attention(
            self.q,
            self.k_cache,
            self.v_cache,
            self.block_table,
            torch.tensor(self.seq_lens, dtype=torch.int32, device=DEVICE),
            torch.tensor(starts, dtype=torch.int32, device=DEVICE),
            spec,
        )

    def dense(self, spec=PLAIN):
        """Each sequence alone, in float64."""
        rows = self.q.double().split(self.query_lens)
        kv = zip(rows, self.keys, self.values, strict=True)
        return torch.cat([attention(q, k.double(), v.double(), spec) for q, k, v in kv])

    def check(self, stage, spec=PLAIN):
        out = self.paged(stage, spec)
        assert (out.shape, out.dtype) == (self.q.shape, self.q.dtype)
        assert out.isfinite().all(), (
            f"{int(out.isnan().sum())} numbers are NaN: a slot that holds no token was used; "
            f"lengths {self.seq_lens}, new tokens {self.query_lens}"
        )
        error = (out.double() - self.dense(spec)).abs().max().item()
        assert error <= TOLERANCE[self.q.dtype], (
            f"differs from dense attention by {error:.2g}; "
            f"lengths {self.seq_lens}, new tokens {self.query_lens}, "
            f"block table {self.block_table.tolist()}"
        )


def make_case(
    seq_lens,
    query_lens,
    *,
    block_size=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    dtype=torch.float64,
    unused=math.nan,
    seed=0,
):
    """Random sequences in blocks of a random order. Slots of no token hold ``unused``."""
    torch.manual_seed(seed)
    num_blocks = [-(-length // block_size) for length in seq_lens]
    order = iter((torch.randperm(sum(num_blocks) + 2) + 1).tolist())
    block_table = torch.zeros(len(seq_lens), max(num_blocks), dtype=torch.int32)
    shape = (sum(num_blocks) + 3, block_size, num_kv_heads, head_dim)
    k_cache, v_cache = torch.full((2, *shape), unused, dtype=dtype).unbind()
    keys, values = [], []
    for row, length in enumerate(seq_lens):
        k, v = torch.randn(2, length, num_kv_heads, head_dim, dtype=dtype).unbind()
        for column in range(num_blocks[row]):
            block_table[row, column] = block_id = next(order)
            part = slice(column * block_size, min((column + 1) * block_size, length))
            k_cache[block_id, : part.stop - part.start] = k[part]
            v_cache[block_id, : part.stop - part.start] = v[part]
        keys.append(k.to(DEVICE))
        values.append(v.to(DEVICE))
    q = torch.randn(sum(query_lens), num_heads, head_dim, dtype=dtype)
    tensors = (x.to(DEVICE) for x in (k_cache, v_cache, block_table))
    return Case(q.to(DEVICE), keys, values, *tensors, list(seq_lens), list(query_lens))


MIXED = ([9, 1, 16, 7, 30, 12], [1, 1, 16, 3, 1, 5])  # decodes, whole prompts, chunks


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("seed", range(3))
def test_mixed_batch(stage, dtype, seed):
    make_case(*MIXED, dtype=dtype, seed=seed).check(stage)


def test_one_sequence_that_decodes(stage):
    make_case([11], [1]).check(stage)


def test_one_sequence_that_prefills(stage):
    make_case([11], [11]).check(stage)


def test_decodes_of_different_lengths(stage):
    make_case([1, 4, 5, 33, 8], [1, 1, 1, 1, 1]).check(stage)


def test_chunks_of_a_prompt(stage):
    make_case([8, 16, 19], [8, 8, 3]).check(stage)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (6, 6), (9, 3), (8, 1), (7, 1)])
def test_query_heads_share_kv_heads(stage, num_heads, num_kv_heads):
    make_case(*MIXED, num_heads=num_heads, num_kv_heads=num_kv_heads).check(stage)


@pytest.mark.parametrize("head_dim", [1, 3, 16, 64, 80])
def test_head_dims(stage, head_dim):
    make_case(*MIXED, head_dim=head_dim).check(stage)


@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 20, 256])
def test_block_sizes(stage, block_size):
    make_case(*MIXED, block_size=block_size).check(stage)


@pytest.mark.parametrize("window", [1, 2, 4, 5, 100])
def test_window(stage, window):
    make_case(*MIXED).check(stage, AttentionSpec(window=window))


def test_soft_cap_and_scale(stage):
    make_case(*MIXED).check(stage, AttentionSpec(soft_cap=0.7, scale=0.9))


def test_window_with_soft_cap_in_float32(stage):
    spec = AttentionSpec(window=6, soft_cap=2.0)
    make_case(*MIXED, dtype=torch.float32).check(stage, spec)


@pytest.mark.parametrize("poisoned", ["K", "V", "both"])
@pytest.mark.parametrize("query_len", [1, 6], ids=["decode", "prefill"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e9], ids=str)
def test_unused_slots_never_matter(stage, poisoned, query_len, value):
    """Length 6 in blocks of 4: slots 6 and 7 of the sequence hold no token."""
    case = make_case([6], [query_len], unused=0.0)
    last_block = int(case.block_table[0, 1])
    for name, cache in (("K", case.k_cache), ("V", case.v_cache)):
        if poisoned in (name, "both"):
            cache[last_block, 2:] = value
    case.check(stage)


@pytest.mark.parametrize("num_heads", [1, 4])
def test_the_padding_of_short_rows_never_matters(stage, num_heads):
    """The row of the short sequence is padded with block 0, whose slots hold NaN."""
    case = make_case([2, 20], [1, 1], num_heads=num_heads, num_kv_heads=1)
    assert case.block_table[0].tolist()[1:] == [0, 0, 0, 0]
    case.check(stage)


@pytest.mark.parametrize("length", range(15, 34))
def test_a_block_reserved_ahead_is_not_attended_to(stage, length):
    """One block more than the length needs stands in the table, full of someone's old numbers."""
    case = make_case([length], [1], block_size=16)
    num_blocks = case.block_table.shape[1]
    ahead = next(b for b in range(1, num_blocks + 3) if b not in case.block_table.tolist()[0])
    case.block_table = torch.cat(
        [case.block_table, torch.tensor([[ahead]]).to(case.block_table)], 1
    )
    for cache in (case.k_cache, case.v_cache):
        cache[ahead] = 7.0
    out, expected = case.paged(stage), case.dense()
    assert torch.allclose(out, expected, rtol=0, atol=1e-12), (
        f"length {length} needs {num_blocks} blocks of 16; the table names one more, reserved for "
        f"later tokens. The output differs by {float((out - expected).abs().max()):.2g}"
    )


def test_block_order_does_not_matter(stage):
    """The same sequences in other blocks: the same numbers, to the last bit."""
    one, other = make_case(*MIXED, seed=4), make_case(*MIXED, seed=4)
    num_blocks = len(other.k_cache)
    torch.manual_seed(9)
    places = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randperm(num_blocks - 1) + 1])
    places = places.to(DEVICE)
    for name in ("k_cache", "v_cache"):
        moved = torch.empty_like(getattr(other, name))
        moved[places] = getattr(one, name)
        setattr(other, name, moved)
    other.block_table = places[one.block_table.long()].int()
    assert not torch.equal(one.block_table, other.block_table)
    assert torch.equal(one.paged(stage), other.paged(stage)), (
        "attention must not notice in which blocks a sequence lies"
    )


def test_rows_of_the_batch_do_not_mix(stage):
    """Three requests in one batch, and each of them alone."""
    case = make_case([13, 6, 21], [1, 1, 1])
    together = case.paged(stage)
    for row in (2, 0, 1):
        alone = Case(
            case.q[row : row + 1],
            [],
            [],
            case.k_cache,
            case.v_cache,
            case.block_table[row : row + 1],
            [case.seq_lens[row]],
            [1],
        ).paged(stage)
        assert torch.allclose(together[row], alone[0], rtol=0, atol=1e-12), (
            f"row {row} of the batch gives another answer than the same request alone"
        )


def test_a_sequence_without_new_tokens_gives_no_output(stage):
    case = make_case([5, 9, 3], [2, 0, 3])
    case.check(stage)


def test_a_row_that_is_only_padding(stage):
    """Length 0 and no query: rows of this kind fill up batches of a fixed size."""
    case = make_case([0, 5, 0], [0, 5, 0])
    case.check(stage)


def test_padding_tokens_give_zero(stage):
    case = make_case([5, 9], [2, 1])
    expected = case.dense()
    case.q = torch.cat([case.q, torch.randn_like(case.q[:2])])
    out = case.paged(stage)
    assert torch.allclose(out[:3], expected, rtol=0, atol=1e-12)
    assert torch.equal(out[3:], torch.zeros_like(out[3:])), (
        "the 2 tokens behind query_start_loc[-1] are padding: they see nothing and give 0"
    )


def test_the_cache_is_only_read(stage):
    case = make_case(*MIXED, unused=5.0)
    before = case.k_cache.clone(), case.v_cache.clone()
    case.paged(stage)
    assert torch.equal(case.k_cache, before[0]), "attention changed a key"
    assert torch.equal(case.v_cache, before[1]), "attention changed a value"


def test_caches_with_padded_strides(stage):
    case = make_case(*MIXED)
    for name in ("k_cache", "v_cache"):
        cache = getattr(case, name)
        blocks, slots, heads, dim = cache.shape
        whole = torch.full((blocks, slots + 1, heads + 2, dim + 3), math.nan).to(cache)
        view = whole[:, :slots, :heads, :dim]
        view.copy_(cache)
        setattr(case, name, view)
    case.check(stage)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_batch(stage, data):
    batch = data.draw(
        st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=5).filter(
            lambda rows: any(new for _, new in rows)
        ),
        "already computed, new",
    )
    group = data.draw(st.integers(1, 3), "query heads a KV head")
    num_kv_heads = data.draw(st.integers(1, 3), "KV heads")
    case = make_case(
        [old + new for old, new in batch],
        [new for _, new in batch],
        block_size=data.draw(st.integers(1, 9), "block_size"),
        num_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        seed=data.draw(st.integers(0, 100), "seed"),
    )
    window = data.draw(st.none() | st.integers(1, 20), "window")
    case.check(stage, AttentionSpec(window=window))
