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
    s by c * tanh(s / c).

    Raises ValueError for a scale or a cap that is not a positive finite number, or a window below
    1.
    """

    scale: float | None = None
    window: int | None = None
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        for name in ("scale", "soft_cap"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}; it must be a positive finite number")
        if self.window is not None and self.window < 1:
            raise ValueError(
                f"window is {self.window}; a query sees itself, so it must be at least 1"
            )


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
    the log of the sum of the exponentials of each row's scores, [num_queries, num_heads]. A query
    that sees no key gives 0 and minus infinity.

    Raises ValueError when the shapes do not fit together.
    """
    check_attention_shapes(q, k, v)
    num_queries, num_keys = q.shape[0], k.shape[0]
    key_positions = torch.arange(num_keys, device=q.device)
    query_positions = torch.arange(num_keys - num_queries, num_keys, device=q.device)
    visible = visible_keys(query_positions, key_positions, spec, causal=causal)
    out, lse = masked_attention(q[None], k[None], v[None], visible[None], spec)
    return (out[0], lse[0]) if return_lse else out[0]


def visible_keys(
    query_positions: Tensor, key_positions: Tensor, spec: AttentionSpec, *, causal: bool = True
) -> Tensor:
    """Which query sees which key: [..., num_queries] and [num_keys] positions give [...,
    num_queries, num_keys]."""
    distance = query_positions[..., None] - key_positions
    visible = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if spec.window is not None:
        visible &= distance < spec.window
    return visible


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """The arithmetic of attention, for a batch of rows of equal shape.

    Shapes: ``q`` [batch, num_queries, num_heads, head_dim]; ``k``, ``v`` [batch, num_keys,
    num_kv_heads, head_dim]; ``visible`` [batch, num_queries, num_keys]. Returns the output in the
    shape of ``q`` and the log-sum-exp [batch, num_queries, num_heads]. Scores and sums are at least
    float32 whatever the dtype of the inputs.

    Every value must be finite: a hidden value gets weight 0, and 0 times NaN is NaN.
    """
    batch, num_queries, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    dtype = torch.promote_types(q.dtype, torch.float32)
    scale = head_dim**-0.5 if spec.scale is None else spec.scale

    # Query heads that share a KV head become rows of one matrix product: b is the batch, g the KV
    # heads, r = (num_heads / num_kv_heads) * num_queries the rows, n the keys, d the head_dim.
    rows = q.to(dtype).unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4)
    group = rows.shape[2]
    scores = rows.flatten(2, 3) @ k.to(dtype).permute(0, 2, 3, 1) * scale  # [b, g, r, n]
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    scores = scores.unflatten(2, (group, num_queries))
    scores = scores.masked_fill(~visible[:, None, None], -math.inf)

    lse = scores.logsumexp(dim=-1, keepdim=True)  # [b, g, group, num_queries, 1]
    # Where nothing is visible lse is -inf, and -inf minus -inf is NaN: subtract 0 there instead.
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0))
    out = weights.flatten(2, 3) @ v.to(dtype).transpose(1, 2)  # [b, g, r, d]
    out = out.unflatten(2, (group, num_queries)).permute(0, 3, 1, 2, 4).reshape(q.shape)
    lse = lse.permute(0, 3, 1, 2, 4).reshape(batch, num_queries, num_heads)
    return out.to(q.dtype), lse


def check_attention_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless q [queries, heads, dim] and k, v [keys, kv_heads, dim] fit
    together."""
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
