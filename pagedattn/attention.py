"""Attention with no cache at all: the reference that every chapter is measured against.

One sequence at a time, in plain torch. Each query looks at the keys at or before its own position,
weighs them with a softmax, and returns the weighted mean of their values. In grouped-query
attention several query heads read the same key and value head: query head ``h`` reads KV head ``h
// (num_heads // num_kv_heads)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, overload

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionSpec:
    """What one layer's attention is.

    ``scale`` multiplies the scores; None means 1 / sqrt(head_dim). With a ``window`` W the query at
    position i sees the keys i - W + 1 .. i, itself included. A ``soft_cap`` c replaces every score
    s by c * tanh(s / c). ``alibi_slopes``, one a query head, lower the score of a key by the slope
    times its distance from the query (Press et al., "Train Short, Test Long", 2021). ``sinks``, one
    a query head, are the scores of a key that is not there: it takes weight and gives no value
    (Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023).

    Raises ValueError for a scale or a cap that is not a positive finite number, a window below 1,
    or slopes or sinks that are not a tuple of finite numbers.
    """

    scale: float | None = None
    window: int | None = None
    soft_cap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None
    sinks: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("scale", "soft_cap"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}; it must be a positive finite number")
        window = self.window
        if window is not None and (type(window) is not int or window < 1):
            raise ValueError(
                f"window is {window!r}; it must be a whole number, at least 1: a query sees itself"
            )
        for name in ("alibi_slopes", "sinks"):
            values = getattr(self, name)
            if values is not None and not (
                isinstance(values, tuple) and all(math.isfinite(value) for value in values)
            ):
                raise ValueError(f"{name} is {values!r}; it must be a tuple of finite numbers")


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec = ...,
    *,
    causal: bool = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec = ...,
    *,
    causal: bool = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec = AttentionSpec(),
    *,
    causal: bool = True,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of one sequence.

    Shapes: ``q`` [num_queries, num_heads, head_dim]; ``k`` and ``v`` [num_keys, num_kv_heads,
    head_dim]. The queries stand at the last ``num_queries`` of the ``num_keys`` positions, so a
    query may look back at keys that were computed long before it. With ``causal=False`` no key is
    hidden for being later than the query.

    Returns [num_queries, num_heads, head_dim] in the dtype of ``q``, and with ``return_lse`` also
    the log of the sum of the exponentials of each row's scores, its sink among them, [num_queries,
    num_heads]. A query that sees no key gives 0, and minus infinity or its sink.

    Raises ValueError when the shapes do not fit together.
    """
    _check_shapes(q, k, v, spec)
    shape, dtype = q.shape, q.dtype
    num_queries, num_heads, head_dim = shape
    num_keys, num_kv_heads, _ = k.shape
    scale = head_dim**-0.5 if spec.scale is None else spec.scale
    if dtype.itemsize < 4:  # scores and sums are never half precision
        q, k, v = q.float(), k.float(), v.float()

    # The query heads that share a KV head are rows of one matrix product; row r of KV head g is
    # query r // group of query head g * group + r % group.
    group = num_heads // num_kv_heads
    rows = (q * scale).reshape(num_queries, num_kv_heads, group * head_dim).transpose(0, 1)
    rows = rows.reshape(num_kv_heads, num_queries * group, head_dim)
    scores = torch.bmm(rows, k.permute(1, 2, 0))  # [num_kv_heads, rows, num_keys]
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    if spec.alibi_slopes is not None:
        slopes = _per_row(spec.alibi_slopes, num_queries, scores)
        positions = torch.arange(num_keys - num_queries, num_keys, device=q.device)
        distance = positions.repeat_interleave(group)[:, None] - torch.arange(
            num_keys, device=q.device
        )
        scores = scores - slopes * distance
    hidden = None
    if num_queries > 1 or spec.window is not None:  # a single query stands last and sees every key
        visible = visible_keys(num_queries, num_keys, spec, causal=causal, device=q.device)
        hidden = ~visible.repeat_interleave(group, dim=0)  # [rows, num_keys]
        scores = scores.masked_fill(hidden, -math.inf)
    if spec.sinks is not None:
        scores = torch.cat([scores, _per_row(spec.sinks, num_queries, scores)], dim=-1)
    weights = scores.softmax(dim=-1)[..., :num_keys]
    if hidden is not None:
        # The softmax of a row that sees nothing is NaN; its weights are 0 like all hidden ones.
        weights = weights.masked_fill(hidden, 0)

    out = torch.bmm(weights, v.transpose(0, 1))  # [num_kv_heads, rows, head_dim]
    out = out.view(num_kv_heads, num_queries, group * head_dim).transpose(0, 1)
    out = out.reshape(shape).to(dtype)
    if not return_lse:
        return out
    lse = scores.logsumexp(dim=-1).view(num_kv_heads, num_queries, group)
    return out, lse.transpose(0, 1).reshape(num_queries, num_heads)


def visible_keys(
    num_queries: int,
    num_keys: int,
    spec: AttentionSpec = AttentionSpec(),
    *,
    causal: bool = True,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Which query sees which key: bool [num_queries, num_keys]; the queries stand at the end."""
    key_positions = torch.arange(num_keys, device=device)
    query_positions = torch.arange(num_keys - num_queries, num_keys, device=device)
    distance = query_positions[:, None] - key_positions
    visible = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if spec.window is not None:
        visible &= distance < spec.window
    return visible


def _per_row(per_head: tuple[float, ...], num_queries: int, scores: Tensor) -> Tensor:
    """One number a query head, for each row of ``scores``: [num_kv_heads, rows, 1]."""
    heads = scores.new_tensor(per_head).view(len(scores), -1)  # [num_kv_heads, group]
    return heads.repeat(1, num_queries).unsqueeze(-1)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> None:
    """Raise ValueError unless q [queries, heads, dim], k, v [keys, kv_heads, dim] and what the spec
    has for each head fit together."""
    if q.dim() != 3 or k.dim() != 3:
        raise ValueError(
            f"q and k must be [tokens, heads, head_dim]; got {list(q.shape)} and {list(k.shape)}"
        )
    if k.shape != v.shape:
        raise ValueError(f"k is {list(k.shape)} but v is {list(v.shape)}; they must be equal")
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"q has head_dim {q.shape[2]} but k has {k.shape[2]}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"{q.shape[1]} query heads cannot share {k.shape[1]} KV heads evenly: not a multiple"
        )
    for name, values in (("alibi_slopes", spec.alibi_slopes), ("sinks", spec.sinks)):
        if values is not None and len(values) != q.shape[1]:
            raise ValueError(f"{len(values)} {name} for {q.shape[1]} query heads")
