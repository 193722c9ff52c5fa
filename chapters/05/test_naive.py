"""The first version of the climb: one query a row, one program a head; and its splits, merged."""

import re

import pytest
import torch

from pagedattn.course.witness import DEVICE

COMPILED = DEVICE == "cuda"
DTYPES = [torch.float32] + [torch.float16, torch.bfloat16] * COMPILED
LENGTHS = [9, 1, 0, 37, 16]


@pytest.fixture
def decode(stage, make_batch):
    """``decode(batch, num_splits)``: the output, compared with dense attention."""

    def run(batch, num_splits=1):
        out = stage.naive_paged_decode(
            batch.q, batch.k_cache, batch.v_cache, batch.block_table, batch.seq_lens,
            num_splits=num_splits,
        )  # fmt: skip
        assert (out.shape, out.dtype) == (batch.q.shape, batch.q.dtype)
        num_nan = int(out.isnan().sum())
        assert num_nan == 0, f"{num_nan} numbers are NaN: a slot that holds no token was used"
        expected, _ = batch.dense()
        error = float((out.double() - expected).abs().max())
        # In float32 all along; then the output is rounded once.
        allowed = 4e-6 + 4 * torch.finfo(batch.q.dtype).eps
        assert error <= allowed, (
            f"differs from dense attention by {error:.2g}, allowed {allowed:.2g}; "
            f"lengths {batch.seq_lens.tolist()}, {num_splits} splits"
        )
        return out

    return run


def rows_of(make_batch, lengths=LENGTHS, **options):
    """One query a row. A row without keys has one as well: it gives 0."""
    return make_batch(lengths, [1] * len(lengths), **{"num_heads": 2} | options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode(make_batch, decode, dtype):
    decode(rows_of(make_batch, dtype=dtype))


@pytest.mark.parametrize("block_size", [1, 3, 16, 20, 544])
def test_block_sizes(make_batch, decode, block_size):
    decode(rows_of(make_batch, [33, 5], block_size=block_size))


@pytest.mark.parametrize("head_dim", [5, 64, 80, 256])
def test_head_dims(make_batch, decode, head_dim):
    decode(rows_of(make_batch, [18, 3], head_dim=head_dim, gaps=3))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(6, 2), (7, 1), (3, 3)])
def test_heads_that_share(make_batch, decode, num_heads, num_kv_heads):
    decode(rows_of(make_batch, [18, 3], num_heads=num_heads, num_kv_heads=num_kv_heads))


def test_any_strides_of_q(make_batch, decode):
    batch = rows_of(make_batch, [18, 3, 4])
    heads_first = batch.q.transpose(0, 1).contiguous().transpose(0, 1)
    whole = torch.full((3, 2, 32), float("nan"), device=DEVICE)
    whole[..., ::2] = batch.q
    expected = decode(batch)
    for q in (heads_first, whole[..., ::2]):
        batch.q = q
        assert torch.equal(decode(batch), expected)


@pytest.mark.parametrize("far", ["blocks", "slots", "heads", "dims"])
def test_further_apart_than_32_bits(make_batch, decode, far, far_apart):
    batch = make_batch(
        [6], [1], block_size=3, num_heads=6, num_kv_heads=3, head_dim=3, dtype=torch.float16
    )
    batch.block_table[0, :2] = torch.tensor([2, 1])
    near = iter((1, 3, 9))
    strides = [
        2**30 if far == name else next(near) for name in ("blocks", "slots", "heads", "dims")
    ]
    for start, name, rows in ((0, "k_cache", batch.keys), (128, "v_cache", batch.values)):
        cache = far_apart((3, 3, 3, 3), strides, start)
        cache[0] = float("nan")
        cache[2], cache[1] = rows[0].split(3)
        setattr(batch, name, cache)
    decode(batch)


def test_k_and_v_lie_differently(make_batch, decode):
    """K: slots before heads, with gaps. V: numbers before heads before slots, without."""
    batch = rows_of(make_batch, gaps=2, num_heads=6)
    batch.v_cache = batch.v_cache.permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1)
    decode(batch)


@pytest.mark.parametrize("far", ["rows", "heads", "dims"])
def test_queries_further_apart_than_32_bits(make_batch, decode, far, far_apart):
    batch = rows_of(
        make_batch, [6, 9, 1], num_heads=3, num_kv_heads=1, head_dim=3, dtype=torch.float16
    )
    near = iter((1, 3))
    strides = [2**30 if far == name else next(near) for name in ("rows", "heads", "dims")]
    q = far_apart((3, 3, 3), strides, 0)
    batch.q = q.copy_(batch.q)
    decode(batch)


def test_a_table_may_be_a_view(make_batch, decode):
    """Every second row and column of a larger one; between them stands block 0, which holds NaN."""
    batch = rows_of(make_batch)
    num_rows, width = batch.block_table.shape
    whole = torch.zeros(2 * num_rows, 2 * width, dtype=torch.int32, device=DEVICE)
    whole[::2, ::2] = batch.block_table
    batch.block_table = whole[::2, ::2]
    decode(batch)


@pytest.mark.parametrize("num_splits", [2, 3, 12])
def test_splits(make_batch, decode, num_splits):
    """More splits than keys, too: those without a key weigh nothing."""
    decode(rows_of(make_batch), num_splits)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_large_scores(make_batch, decode, num_splits):
    """Sums are measured from the greatest score so far; exp(100) is more than float32 holds."""
    batch = rows_of(make_batch, [60, 37])
    batch.q *= 20
    decode(batch, num_splits)


def test_no_rows(stage):
    cache = torch.zeros(3, 4, 1, 8, device=DEVICE)
    table = torch.zeros(0, 2, dtype=torch.int32, device=DEVICE)
    out = stage.naive_paged_decode(
        torch.zeros(0, 2, 8, device=DEVICE), cache, cache, table, table[:, 0], num_splits=2
    )
    assert out.shape == (0, 2, 8)


CACHE = torch.zeros(3, 4, 2, 8, device=DEVICE)
ROWS = torch.zeros(2, 3, dtype=torch.int32, device=DEVICE)
REFUSED = [
    ({"q": CACHE}, "q has shape [3, 4, 2, 8]; it must be [num_seqs, num_heads, head_dim]"),
    ({"q": CACHE[:2, 0].double()}, "q is torch.float64; it must be torch.float16 or"),
    ({"q": CACHE[:2, :, 0, :7]}, "k_cache has shape [3, 4, 2, 8]; it must be [num_blocks, block"),
    ({"v_cache": CACHE[:2]}, "v_cache has shape [2, 4, 2, 8]; it must be [3, 4, 2, 8]"),
    ({"k_cache": CACHE.half()}, "k_cache is torch.float16; it must be torch.float32"),
    ({"v_cache": CACHE.half()}, "v_cache is torch.float16; it must be torch.float32"),
    ({"q": CACHE[:2, :3, 0]}, "3 query heads are not a multiple of 2 KV heads"),
    ({"block_table": ROWS[:1]}, "block_table has shape [1, 3]; it must be [2, width]"),
    ({"block_table": ROWS.long()}, "block_table is torch.int64; it must be torch.int32"),
    ({"seq_lens": ROWS}, "seq_lens has shape [2, 3]; it must be [2]"),
    ({"seq_lens": ROWS[0, :2].long()}, "seq_lens is torch.int64; it must be torch.int32"),
    ({"seq_lens": ROWS[:, 0]}, "seq_lens is not contiguous: its strides are (3,)"),
    ({"seq_lens": ROWS[0, :2].to("meta")}, "seq_lens is on meta"),
    ({"k_cache": CACHE[:, :0], "v_cache": CACHE[:, :0]}, "block_size must be at least 1, got 0"),
    (
        {"q": CACHE[:2, :, 0, :0], "k_cache": CACHE[..., :0], "v_cache": CACHE[..., :0]},
        "head_dim must be at least 1, got 0",
    ),
    ({"num_splits": 0}, "num_splits must be at least 1, got 0"),
    ({"num_splits": 2.0}, "num_splits is 2.0; it must be a whole number"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[words for _, words in REFUSED])
def test_refusals(stage, change, message):
    good = {
        "q": CACHE[:2, :, 0], "k_cache": CACHE, "v_cache": CACHE, "block_table": ROWS,
        "seq_lens": ROWS[0, :2],
    }  # fmt: skip
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        stage.naive_paged_decode(**good | change)
