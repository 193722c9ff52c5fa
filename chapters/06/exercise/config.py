# Chapter 06, given: pagedattn/manager/config.py; the tasks stand in the files beside it.
#   pytest chapters/06 --student                all its tests on this folder
#   pytest chapters/06 --student --task 6.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 c3a5d8586bb3347b6320c29c63cacf9723bfd98e2be929ff1c966fb70728d97e

"""The whole KV cache of a worker: its tensors, its groups, and how many blocks there are.

The workers of one model (the stages of a pipeline, say) hold different layers and have different
amounts of memory. One scheduler gives out block ids for all of them, so all have the same groups
and the same number of blocks.

Source: ``vllm/v1/core/kv_cache_utils.py``, ``get_kv_cache_configs``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pagedattn.whole_number import at_least_1

from .groups import KVCacheGroupSpec, UniformTypeKVCacheSpecs, get_kv_cache_groups
from .limits import Limits
from .memory import (
    Groups,
    blocks_per_request,
    bytes_per_block,
    check_enough_memory,
    get_num_blocks,
)
from .page import KVCacheSpec


@dataclass(frozen=True)
class KVCacheTensor:
    """``size`` bytes: one page for each block. ``shared_by`` are layers of different groups; since
    a block belongs to one group at a time, they never use the same page."""

    size: int
    shared_by: tuple[str, ...]


@dataclass(frozen=True)
class KVCacheConfig:
    """What one worker allocates. ``num_blocks`` counts the null block."""

    num_blocks: int
    kv_cache_tensors: tuple[KVCacheTensor, ...]
    kv_cache_groups: tuple[KVCacheGroupSpec, ...]


def get_kv_cache_configs(
    specs_of_workers: Sequence[Mapping[str, KVCacheSpec]],
    available_memory: Sequence[int],
    limits: Limits,
    *,
    num_blocks: int | None = None,
    enable_hybrid: bool = True,
) -> tuple[KVCacheConfig, ...]:
    """One configuration a worker, from the specs of its layers and its memory (bytes).

    ``num_blocks`` replaces the number that follows from the memory. Otherwise all workers get the
    number of the one that holds fewest. Without layers there is no tensor, and 1 block. Raises
    ValueError for lists of different lengths, a worker with layers and without memory, specs of one
    layer that differ, or layers that cannot be grouped; NotEnoughMemory if the longest sequence
    does not fit.
    """
    if len(specs_of_workers) != len(available_memory) or not specs_of_workers:
        raise ValueError(
            f"{len(specs_of_workers)} workers and {len(available_memory)} amounts of memory; one "
            "of each is needed for every worker"
        )
    if num_blocks is not None:
        at_least_1(num_blocks, "num_blocks")
    groups_of_workers = get_groups_of_workers(specs_of_workers, enable_hybrid=enable_hybrid)
    check_enough_memory(groups_of_workers, available_memory, limits)
    counts = [
        get_num_blocks(groups, memory)
        for groups, memory in zip(groups_of_workers, available_memory, strict=True)
        if bytes_per_block(groups)
    ]
    if not counts:
        num_blocks = 1
    elif num_blocks is None:
        num_blocks = min(counts)
    return tuple(
        KVCacheConfig(num_blocks, _tensors(groups, num_blocks), groups)
        for groups in groups_of_workers
    )


def get_groups_of_workers(
    specs_of_workers: Sequence[Mapping[str, KVCacheSpec]], *, enable_hybrid: bool = True
) -> list[tuple[KVCacheGroupSpec, ...]]:
    """The groups of the whole model, once for each worker with the layers that it holds.

    A worker without layers of a group keeps the group, empty: block tables are equal everywhere.
    Raises as ``get_kv_cache_configs``.
    """
    specs: dict[str, KVCacheSpec] = {}
    for worker_specs in specs_of_workers:
        for name, spec in worker_specs.items():
            if specs.setdefault(name, spec) != spec:
                raise ValueError(
                    f"layer {name} has two specs on different workers: {specs[name]} and {spec}"
                )
    groups = get_kv_cache_groups(specs, enable_hybrid=enable_hybrid)
    return [
        tuple(_restricted_to(worker_specs, group) for group in groups)
        for worker_specs in specs_of_workers
    ]


def _restricted_to(
    worker_specs: Mapping[str, KVCacheSpec], group: KVCacheGroupSpec
) -> KVCacheGroupSpec:
    names = tuple(name for name in group.layer_names if name in worker_specs)
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = spec.restricted_to(names)
    return KVCacheGroupSpec(names, spec)


def _tensors(groups: Groups, num_blocks: int) -> tuple[KVCacheTensor, ...]:
    """Tensor i is for layer i of each group; layers that differ in width have one each."""
    if len(groups) == 1 and isinstance(groups[0].kv_cache_spec, UniformTypeKVCacheSpecs):
        return tuple(
            KVCacheTensor(spec.page_size_bytes * num_blocks, (name,))
            for name, spec in groups[0].kv_cache_spec.specs
        )
    most = max((len(group.layer_names) for group in groups), default=0)
    return tuple(
        KVCacheTensor(
            groups[0].kv_cache_spec.page_size_bytes * num_blocks,
            tuple(group.layer_names[i] for group in groups if i < len(group.layer_names)),
        )
        for i in range(most)
    )


def get_scheduler_config(configs: Sequence[KVCacheConfig]) -> KVCacheConfig:
    """What the scheduler sees: the first worker's configuration, with one layer's spec a group.

    Widths do not concern it. Raises ValueError if the workers do not have equally many blocks.
    """
    counts = [config.num_blocks for config in configs]
    if len(set(counts)) != 1:
        raise ValueError(f"the workers have {counts} blocks; one scheduler needs equal numbers")
    groups = tuple(_representative(group) for group in configs[0].kv_cache_groups)
    return replace(configs[0], kv_cache_groups=groups)


def _representative(group: KVCacheGroupSpec) -> KVCacheGroupSpec:
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        specs = [layer_spec for _, layer_spec in spec.specs]
        spec = specs[0] if specs else spec
    return replace(group, kv_cache_spec=spec)


def add_kv_sharing_layers(config: KVCacheConfig, targets: Mapping[str, str]) -> KVCacheConfig:
    """``config`` with layers that read the K and V of another one: ``targets[layer]``.

    Such a layer joins the group of its target, whose block table it needs, and has no tensor.
    Raises ValueError for a layer that has pages of its own, or a target that has none.
    """
    group_of = {
        name: index for index, group in enumerate(config.kv_cache_groups)
        for name in group.layer_names
    }  # fmt: skip
    names = [list(group.layer_names) for group in config.kv_cache_groups]
    for layer, target in targets.items():
        if layer in group_of:
            raise ValueError(f"layer {layer} has pages of its own; it cannot use those of {target}")
        if target not in group_of:
            raise ValueError(f"layer {layer} is to use the pages of {target}, which has none")
        names[group_of[target]].append(layer)
    groups = tuple(
        replace(group, layer_names=tuple(layers))
        for group, layers in zip(config.kv_cache_groups, names, strict=True)
    )
    return replace(config, kv_cache_groups=groups)


def get_max_concurrency(config: KVCacheConfig, limits: Limits) -> float:
    """How many sequences of ``limits.max_model_len`` tokens the blocks hold at a time.

    Raises ValueError if a sequence needs no block.
    """
    blocks = blocks_per_request(config.kv_cache_groups, limits)
    if blocks == 0:
        raise ValueError("no layer needs a block, so blocks do not limit the number of sequences")
    return config.num_blocks / blocks


def get_num_cache_tokens(config: KVCacheConfig, limits: Limits) -> int:
    """How many tokens the cache holds if all sequences are of the greatest length. Raises as
    ``get_max_concurrency``."""
    return int(get_max_concurrency(config, limits) * limits.max_model_len)
