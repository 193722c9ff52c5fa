# Chapter 06, given: pagedattn/manager/group_managers.py; the tasks stand in the files beside it.
#   pytest chapters/06 --student                all its tests on this folder
#   pytest chapters/06 --student --task 6.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 6fb5bee15794127eaefbefe381735b92791acdfc6cbd53a1b8a239269c51da15

"""The managers of all groups as one.

A request has one table in each group, and the groups move together: all of them have room for the
request's next tokens, or none takes a block. They come in order, so ids are the same in every run.
How much of a prompt is in the cache they must agree upon; that is left to ``coordinator``.

Source: ``vllm/v1/core/kv_cache_coordinator.py``, ``KVCacheCoordinator``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from pagedattn.prefix import KVCacheBlock

from .config import KVCacheConfig
from .kinds import get_manager_for_spec
from .limits import Limits
from .pool import BlockPool
from .request import Request
from .specs import FullAttentionSpec

Hits = tuple[list[KVCacheBlock], ...]


class KVCacheCoordinator(ABC):
    """One manager a group, ``single_type_managers``, in the order of the groups.

    ``eagle_groups`` are the groups with layers of an EAGLE draft model. With ``collect_new_block_
    ids`` groups of full attention keep the ids that they take until somebody asks for them. Raises
    ValueError for a group that does not exist, or layers that cannot be managed so.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        pool: BlockPool,
        limits: Limits,
        *,
        enable_caching: bool,
        eagle_groups: Collection[int],
        collect_new_block_ids: bool,
    ) -> None:
        self.pool = pool
        self.eagle_groups = frozenset(eagle_groups)
        self.single_type_managers = tuple(
            get_manager_for_spec(group.kv_cache_spec)(
                group.kv_cache_spec, pool, group_id, limits=limits, enable_caching=enable_caching
            )
            for group_id, group in enumerate(config.kv_cache_groups)
        )
        unknown = self.eagle_groups.difference(range(len(self.single_type_managers)))
        if unknown:
            raise ValueError(
                f"eagle_groups names {sorted(unknown)}; there are "
                f"{len(self.single_type_managers)} groups, counted from 0"
            )
        if collect_new_block_ids:
            for manager in self.single_type_managers:
                if type(manager.spec) is FullAttentionSpec:
                    manager.new_block_ids = []

    @abstractmethod
    def find_longest_cache_hit(
        self, block_hashes: Sequence[bytes], max_length: int
    ) -> tuple[Hits, int]:
        """The blocks of each group for the longest beginning that all groups can go on from, and
        its length: at most ``max_length`` tokens. Each list covers exactly that length.

        ``block_hashes`` are the request's digests. Changes nothing.
        """

    # What a request needs, and taking it.

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        hits: Sequence[Sequence[KVCacheBlock]],
        num_encoder_tokens: int,
        total_computed_tokens: int,
        num_tokens_main_model: int,
        *,
        apply_admission_cap: bool = False,
    ) -> int:
        """How many blocks would leave the free queue, over all groups. Changes nothing.

        ``hits`` are a list a group, or empty. Raises ValueError for hits of a request that runs.
        """
        num_blocks = 0
        for group_id, manager in enumerate(self.single_type_managers):
            if manager.is_cross_attention:
                num_blocks += manager.get_num_blocks_to_allocate(
                    request_id, num_encoder_tokens, (), 0, num_encoder_tokens
                )
                continue
            num_blocks += manager.get_num_blocks_to_allocate(
                request_id,
                num_tokens,
                hits[group_id] if hits else (),
                total_computed_tokens,
                num_tokens_main_model,
                apply_admission_cap=apply_admission_cap,
            )
        return num_blocks

    def allocate_new_computed_blocks(
        self,
        request_id: str,
        hits: Sequence[Sequence[KVCacheBlock]],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Begin the request's tables with its hits, and with new blocks for the tokens whose K and
        V come from outside.

        The hits of all groups come first: a block that is taken for one group must not be a hit of
        the next.
        """
        managers = self.single_type_managers
        missing = [
            manager.allocate_new_computed_blocks(
                request_id,
                hits[group_id] if hits else (),
                num_local_computed_tokens,
                num_external_computed_tokens,
            )
            for group_id, manager in enumerate(managers)
        ]
        for manager, num_blocks in zip(managers, missing, strict=True):
            if num_blocks:
                manager.append_new_blocks(request_id, num_blocks)

    def allocate_new_blocks(
        self,
        request_id: str,
        num_tokens: int,
        num_tokens_main_model: int,
        num_encoder_tokens: int = 0,
    ) -> Hits:
        """Lengthen all tables; returns what is new in each."""
        return tuple(
            [
                manager.allocate_new_blocks(request_id, num_encoder_tokens, num_encoder_tokens)
                if manager.is_cross_attention
                else manager.allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)
                for manager in self.single_type_managers
            ]
        )

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Register the blocks that the first ``num_tokens`` tokens fill, in all groups."""
        for manager in self.single_type_managers:
            manager.cache_blocks(request, num_tokens)

    # Giving back.

    def free(self, request_id: str) -> None:
        """Give back all blocks of a request: group by group, the last one first."""
        for manager in self.single_type_managers:
            manager.free(request_id)

    def remove_skipped_blocks(self, request_id: str, total_computed_tokens: int) -> None:
        """Give back what is out of reach once so many tokens are computed, in all groups."""
        for manager in self.single_type_managers:
            manager.remove_skipped_blocks(request_id, total_computed_tokens)

    # What can be asked, and what a step changes.

    def get_blocks(self, request_id: str) -> Hits:
        """The request's tables; an empty one where it has no block."""
        return tuple(
            manager.req_to_blocks.get(request_id, []) for manager in self.single_type_managers
        )

    def get_num_common_prefix_blocks(self, request_id: str) -> list[int]:
        """How many blocks at the beginning all requests share, in each group."""
        return [
            manager.get_num_common_prefix_blocks(request_id)
            for manager in self.single_type_managers
        ]

    def take_new_block_ids(self) -> list[int]:
        """The ids that were recorded since the last call, group by group."""
        return [i for manager in self.single_type_managers for i in manager.take_new_block_ids()]

    def new_step_starts(self) -> None:
        """What was registered in the step before is computed now."""
        for manager in self.single_type_managers:
            manager.new_step_starts()
