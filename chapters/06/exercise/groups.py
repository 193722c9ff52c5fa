# Chapter 06, yours to write: pagedattn/manager/groups.py without the bodies of its tasks.
#   pytest chapters/06 --student                all its tests on this folder
#   pytest chapters/06 --student --task 6.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 76cf774e84360a85653f0476f870b33107909e96d869f8c0de50db739cd9aa62

"""From layers to groups. The layers of one *group* share one block table.

A block is a number. In every layer of its group it stands for one page, and all groups take their
blocks from one pool, so a page must have the same number of bytes in all of them. Layers that are
not alike are therefore brought to one page size, and dealt out to groups of nearly equal size::

    full, sliding, sliding, full, sliding   →   (f0, f1)  (s0, s2)  (s1, –)

Source: ``vllm/v1/core/kv_cache_utils.py``, ``get_kv_cache_groups``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from .limits import Limits
from .merging import are_equal, check_records, merge
from .page import KVCacheSpec, ceil_div
from .specs import (
    ChunkedLocalAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)

# A group of the smallest kind's size leaves no place empty, but there may be many groups. If the
# largest kind has less than 1.5 times as many layers, one group a kind is better.
MOST_UNEVEN = 1.5


class UnequalPages(ValueError):
    """The pages of these layers cannot be brought to one size."""


@dataclass(frozen=True, kw_only=True)
class UniformTypeKVCacheSpecs(KVCacheSpec):
    """One spec for layers of one kind that differ in width. A page is a page of each of them.

    ``specs`` are pairs of a layer's name and its spec, all of one ``block_size`` and kind.
    """

    specs: tuple[tuple[str, KVCacheSpec], ...]

    @property
    def content_bytes(self) -> int:
        return sum(spec.page_size_bytes for _, spec in self.specs)

    @property
    def kind(self) -> tuple[object, ...]:
        return self.specs[0][1].kind

    def max_num_pages(self, limits: Limits) -> int:
        return max((spec.max_num_pages(limits) for _, spec in self.specs), default=0)

    def restricted_to(self, layer_names: Iterable[str]) -> UniformTypeKVCacheSpecs:
        """The same for some of the layers."""
        kept = set(layer_names)
        return UniformTypeKVCacheSpecs(
            block_size=self.block_size,
            specs=tuple((name, spec) for name, spec in self.specs if name in kept),
        )


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """Layers with one block table, and the spec that stands for them."""

    layer_names: tuple[str, ...]
    kv_cache_spec: KVCacheSpec


def get_kv_cache_groups(
    specs: Mapping[str, KVCacheSpec], *, enable_hybrid: bool = True
) -> tuple[KVCacheGroupSpec, ...]:
    """The groups of a model whose layers have these specs, by name.

    - Layers that keep nothing (encoder-only) are in no group.
    - Layers that are all alike are one group; so are those that differ in width only.
    - Otherwise each kind of layer gets one group or several, in the order in which the kinds first
      appear. With ``enable_hybrid`` off, all layers are kept as full attention instead.

    Raises UnequalPages if pages cannot be brought to one size, ValueError if one group would record
    two windows, or if a layer cannot be kept as full attention.
    """
    specs = {
        name: spec for name, spec in specs.items() if not isinstance(spec, EncoderOnlyAttentionSpec)
    }
    if not specs:
        return ()
    if not enable_hybrid and not _differ_in_width_only(specs.values()):
        specs = {name: _as_full_attention(name, spec) for name, spec in specs.items()}
    names = tuple(specs)
    if are_equal(specs.values()):
        return (KVCacheGroupSpec(names, merge(specs.values())),)
    if _differ_in_width_only(specs.values()):
        check_records(specs.values())
        block_size = specs[names[0]].block_size
        wide = UniformTypeKVCacheSpecs(block_size=block_size, specs=tuple(specs.items()))
        return (KVCacheGroupSpec(names, wide),)
    if not enable_hybrid:
        raise ValueError(
            "without hybrid groups all layers must be full attention of one block size, got "
            f"{_kinds(specs.values())}"
        )
    return _deal(unify_page_sizes(specs))


def unify_page_sizes(specs: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """The same layers, each with blocks of so many tokens that its page is as large as the largest.

    Raises UnequalPages, which names the layer and both sizes in bytes, if a page does not divide
    the largest, or does not grow with its block.
    """
    raise NotImplementedError(
        "task 6.1: the largest page decides; the ratio of the pages is that of the block sizes; "
        "what does not divide, or does not grow, is an UnequalPages that names the layer, its "
        "bytes and the largest"
    )


def _deal(specs: Mapping[str, KVCacheSpec]) -> tuple[KVCacheGroupSpec, ...]:
    """Groups of at most so many layers as suits the kinds, layers dealt out in turn.

    Dealt, not cut: a pipeline stage that has the first half of the layers then has about half of
    each group.
    """
    layers: dict[KVCacheSpec, list[str]] = {}
    for name, spec in specs.items():
        layers.setdefault(spec, []).append(name)
    fewest, most = (pick(len(names) for names in layers.values()) for pick in (min, max))
    group_size = most if most < MOST_UNEVEN * fewest else fewest
    groups = []
    for spec, names in layers.items():
        num_groups = ceil_div(len(names), group_size)
        groups += [KVCacheGroupSpec(tuple(names[i::num_groups]), spec) for i in range(num_groups)]
    return tuple(groups)


def _differ_in_width_only(specs: Iterable[KVCacheSpec]) -> bool:
    return len({(spec.kind, spec.block_size) for spec in specs}) == 1


def _as_full_attention(name: str, spec: KVCacheSpec) -> KVCacheSpec:
    """The layer with the blocks of all its tokens; what it attends to is recorded."""
    if isinstance(spec, FullAttentionSpec):
        return spec
    if not isinstance(spec, (SlidingWindowSpec, ChunkedLocalAttentionSpec)):
        raise ValueError(
            f"layer {name} of kind {spec.kind} cannot be kept as full attention; it needs hybrid "
            "groups"
        )
    # The fields that both have: those of K and V, and the window or the chunk under its own name.
    return FullAttentionSpec(**{field.name: getattr(spec, field.name) for field in fields(spec)})


def _kinds(specs: Iterable[KVCacheSpec]) -> Sequence[str]:
    return sorted({f"{spec.kind} in blocks of {spec.block_size}" for spec in specs})
