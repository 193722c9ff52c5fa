"""Chapter 05's kernels as operators of torch: ``torch.compile`` and ``torch.export`` see them.

A compiler for models follows tensors through Python. It cannot look into a Triton launch that
plans, checks and allocates, so it would break the graph there. Registered with ``torch.library`` a
kernel is one node of the graph, ``torch.ops.pagedattn.write_kv`` say. Torch must know two things
about it: which arguments it writes, and the shape of what it returns (its *fake*: the same call on
tensors that have shapes and no numbers).

The functions here have the names and arguments of those in ``pagedattn.kernels``; what they do is
done there. Left out is ``out``: an operator returns new tensors. Nothing here has a gradient.

    from pagedattn import operators

    @torch.compile(fullgraph=True)
    def layer(q, k, v, k_cache, v_cache, slot_mapping, *batch):
        operators.write_kv(k_cache, v_cache, k, v, slot_mapping)
        return operators.paged_attention(q, k_cache, v_cache, *batch)
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from pagedattn import kernels
from pagedattn.attention import AttentionSpec
from pagedattn.kernels import AttentionPlan
from pagedattn.kernels.shared import SharedPrefixes

__all__ = [
    "compute_slot_mapping",
    "copy_blocks",
    "merge_attention_states",
    "paged_attention",
    "plan_attention",
    "write_kv",
]

PLAIN = AttentionSpec()

copy_blocks = custom_op(
    "pagedattn::copy_blocks", kernels.copy_blocks, mutates_args=("k_cache", "v_cache")
)
merge_attention_states = custom_op(
    "pagedattn::merge_attention_states", kernels.merge_attention_states, mutates_args=()
)


@custom_op("pagedattn::write_kv", mutates_args=("k_cache", "v_cache"))
def write_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """As ``kernels.write_kv``."""
    kernels.write_kv(k_cache, v_cache, k, v, slot_mapping, k_scale=k_scale, v_scale=v_scale)


@merge_attention_states.register_fake
def _(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)


@custom_op("pagedattn::compute_slot_mapping", mutates_args=())
def compute_slot_mapping(
    block_table: Tensor, query_start_loc: Tensor, positions: Tensor, block_size: int
) -> Tensor:
    """As ``kernels.compute_slot_mapping``: int64 [num_tokens]."""
    return kernels.compute_slot_mapping(block_table, query_start_loc, positions, block_size)


@compute_slot_mapping.register_fake
def _(block_table: Tensor, query_start_loc: Tensor, positions: Tensor, block_size: int) -> Tensor:
    return torch.empty_like(positions, dtype=torch.int64)


# A plan is a Python object, and operators take tensors and numbers. So it is taken apart on one
# side and put together on the other: its own fields first, then those of its shared prefixes, if it
# has them. A number may be None, which stands as -1.


def _names(cls: type[AttentionPlan | SharedPrefixes]) -> tuple[list[str], list[str]]:
    """The fields that are tensors, and those that are numbers."""
    own = [field for field in fields(cls) if field.init and field.name != "shared"]
    tensors = [field.name for field in own if field.type == "Tensor"]
    return tensors, [field.name for field in own if field.name not in tensors]


_PLAN_TENSORS, _PLAN_NUMBERS = _names(AttentionPlan)
_SHARED_TENSORS, _SHARED_NUMBERS = _names(SharedPrefixes)


def _parts(plan: AttentionPlan | None) -> tuple[list[Tensor], list[int]]:
    if plan is None:
        return [], []
    tensors = [getattr(plan, name) for name in _PLAN_TENSORS]
    numbers = [getattr(plan, name) for name in _PLAN_NUMBERS]
    if plan.shared is not None:
        tensors += [getattr(plan.shared, name) for name in _SHARED_TENSORS]
        numbers += [getattr(plan.shared, name) for name in _SHARED_NUMBERS]
    return tensors, [-1 if number is None else int(number) for number in numbers]


def _whole(tensors: list[Tensor], numbers: list[int]) -> AttentionPlan:
    values = [None if number == -1 else number for number in numbers]
    own, its_own = len(_PLAN_TENSORS), len(_PLAN_NUMBERS)
    named: dict[str, Any] = dict(zip(_PLAN_TENSORS, tensors[:own], strict=True))
    named |= zip(_PLAN_NUMBERS, values[:its_own], strict=True)
    shared: dict[str, Any] = {}
    if len(tensors) > own:
        shared |= zip(_SHARED_TENSORS, tensors[own:], strict=True)
        shared |= zip(_SHARED_NUMBERS, values[its_own:], strict=True)
    return AttentionPlan(**named, shared=SharedPrefixes(**shared) if shared else None)


@custom_op("pagedattn::plan_attention", mutates_args=("plan_tensors",))
def _plan_attention(
    plan_tensors: list[Tensor],
    plan_numbers: list[int],
    seq_lens: Tensor,
    query_start_loc: Tensor,
    block_table: Tensor | None = None,
) -> None:
    plan = _whole(plan_tensors, plan_numbers)
    kernels.plan_attention(plan, seq_lens, query_start_loc, block_table)


def plan_attention(
    plan: AttentionPlan,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    block_table: Tensor | None = None,
) -> None:
    """As ``kernels.plan_attention``: fills the buffers of a plan that ``new_plan`` has made."""
    _plan_attention(*_parts(plan), seq_lens, query_start_loc, block_table)


@custom_op("pagedattn::paged_attention", mutates_args=("plan_tensors", "lse"))
def _paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    plan_tensors: list[Tensor],
    plan_numbers: list[int],
    lse: Tensor | None,  # no default: torch 2.11 does not find what is written, then
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: list[float] | None = None,
    sinks: list[float] | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    spec = AttentionSpec(
        scale,
        window,
        soft_cap,
        None if alibi_slopes is None else tuple(alibi_slopes),
        None if sinks is None else tuple(sinks),
    )
    return kernels.paged_attention(
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        query_start_loc,
        spec,
        _whole(plan_tensors, plan_numbers) if plan_tensors else None,
        k_scale=k_scale,
        v_scale=v_scale,
        lse=lse,
    )


@_paged_attention.register_fake
def _(q: Tensor, *arguments: object, **named: object) -> Tensor:
    return torch.empty_like(q)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    spec: AttentionSpec = PLAIN,
    plan: AttentionPlan | None = None,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """As ``kernels.paged_attention``. With a plan its buffers count as written: the parts of split
    rows lie there."""
    return _paged_attention(
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        query_start_loc,
        *_parts(plan),
        lse,
        spec.scale,
        spec.window,
        spec.soft_cap,
        None if spec.alibi_slopes is None else list(spec.alibi_slopes),
        None if spec.sinks is None else list(spec.sinks),
        k_scale,
        v_scale,
    )
