"""torch's own attention beside ours: `scaled_dot_product_attention` with its cuDNN and its flash
backend, and FlexAttention. They have no block table: K and V of each sequence lie in one piece."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from pagedattn.bench.kernel_inputs import MOST_SETS, ROTATED, Pool, Trial, attention_error
from pagedattn.bench.kernel_rows import FLEX, AttentionRow


class Absent(Exception):
    """A peer does not do this row, or is not installed; the message says why."""


class Shape(NamedTuple):
    """All of a row that a peer without blocks sees."""

    num_seqs: int
    num_queries: int
    num_keys: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


def dense_shape(row: AttentionRow) -> Shape:
    """Raises Absent for a row that is not a rectangle of bf16."""
    if len(set(row.seq_lens)) > 1 or len(set(row.query_lens)) > 1:
        raise Absent("K and V in one piece must have one length")
    if row.fp8:
        raise Absent("takes no fp8 cache")
    sizes = row.num_heads, row.num_kv_heads, row.head_dim
    return Shape(len(row.seq_lens), row.query_lens[0], row.seq_lens[0], *sizes)


QKV = tuple[Tensor, Tensor, Tensor]


def dense_trial(pool: Pool, row: AttentionRow, attend: Callable[[QKV], Tensor]) -> Trial:
    """``attend`` over Q [num_seqs, num_heads, num_queries, head_dim] and K, V of KV heads and keys,
    as many sets as a paged row has. It returns the shape of Q."""
    shape = dense_shape(row)
    kv_shape = shape.num_seqs, shape.num_kv_heads, shape.num_keys, shape.head_dim
    size = shape.num_seqs * shape.num_kv_heads * shape.num_keys * shape.head_dim
    wanted = max(1, min(MOST_SETS, -(-ROTATED // row.work.read)))
    sets = []
    for i in range(min(wanted, pool.k.numel() // size)):
        q = pool.randn(shape.num_seqs, shape.num_heads, shape.num_queries, shape.head_dim)
        k, v = (numbers[i * size : (i + 1) * size].view(kv_shape) for numbers in (pool.k, pool.v))
        sets.append((q, k, v))

    def packed(x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(0, 1)

    def error(out: Tensor) -> float:
        q, k, v = sets[0]
        return attention_error(
            row, packed(q), packed(out),
            lambda n: (k[n].transpose(0, 1).double(), v[n].transpose(0, 1).double()),
        )  # fmt: skip

    def call(qkv: QKV) -> Callable[[], Tensor]:
        return lambda: attend(qkv)

    return Trial([call(qkv) for qkv in sets], error)


def sdpa_trial(pool: Pool, row: AttentionRow, backend: SDPBackend) -> Trial:
    """torch's `scaled_dot_product_attention` with this backend and no other."""
    shape = dense_shape(row)
    options: dict[str, Any] = {"enable_gqa": shape.num_heads != shape.num_kv_heads}
    if shape.num_queries == shape.num_keys:
        options["is_causal"] = True
    elif shape.num_queries > 1:
        if backend != SDPBackend.FLASH_ATTENTION:
            raise Absent("has no causal mask that ends at the last key")
        options["attn_mask"] = causal_lower_right(shape.num_queries, shape.num_keys)

    trial = dense_trial(pool, row, lambda qkv: scaled_dot_product_attention(*qkv, **options))
    return replace(trial, context=partial(sdpa_kernel, backend))


@cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention, dynamic=False)


def flex_trial(pool: Pool, row: AttentionRow) -> Trial:
    """torch's FlexAttention, compiled; each shape takes seconds, so only some rows have it."""
    if row.name not in FLEX:
        raise Absent("not compiled for this row")
    shape = dense_shape(row)
    past = shape.num_keys - shape.num_queries
    mask = None
    if shape.num_queries > 1:

        def causal(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return query + past >= key

        device = str(pool.k.device)
        mask = create_block_mask(
            causal, None, None, shape.num_queries, shape.num_keys, device=device
        )
    compiled = _compiled_flex()
    grouped = shape.num_heads != shape.num_kv_heads
    return dense_trial(pool, row, lambda qkv: compiled(*qkv, block_mask=mask, enable_gqa=grouped))
