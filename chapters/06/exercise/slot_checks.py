# Chapter 06, given: pagedattn/manager/slot_checks.py; the tasks stand in the files beside it.
#   pytest chapters/06 --student                all its tests on this folder
#   pytest chapters/06 --student --task 6.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 d2445cf2f747ffa3f2d8b52ce6969e876b82e8de83145edc11f8e6ba293bda14

"""What ``KVCacheManager.allocate_slots`` refuses, before it changes anything."""

from __future__ import annotations

from collections.abc import Sequence

from pagedattn.prefix import KVCacheBlock

from .request import Request
from .single_type import SingleTypeKVCacheManager

Managers = Sequence[SingleTypeKVCacheManager]


def check_numbers(
    request: Request,
    managers: Managers,
    num_new_tokens: int,
    num_lookahead_tokens: int,
    num_external_tokens: int,
) -> None:
    """Raises ValueError for a number below 0, neither new nor external tokens, or external tokens
    of a request whose tables have begun without any."""
    what = f"request {request.request_id}"
    numbers = (num_new_tokens, num_lookahead_tokens, num_external_tokens)
    if min(numbers) < 0 or num_new_tokens + num_external_tokens == 0:
        raise ValueError(
            f"{what}: {num_new_tokens} new, {num_external_tokens} external and "
            f"{num_lookahead_tokens} lookahead tokens are nothing to give slots for"
        )
    if num_external_tokens:
        for manager in managers:
            table = manager.req_to_blocks.get(request.request_id)
            if table and request.request_id not in manager.num_cached_blocks:
                raise ValueError(f"{what} has {len(table)} blocks; external tokens come first")


def check_hits(
    request: Request,
    managers: Managers,
    hits: Sequence[Sequence[KVCacheBlock]],
    num_hit_tokens: int,
) -> None:
    """Raises ValueError for hits of another number of groups or tokens, for a request that has
    blocks, or with a block that was evicted since."""
    what = f"request {request.request_id}"
    if not any(hits) and num_hit_tokens == 0:
        return
    if len(hits) != len(managers):
        raise ValueError(f"{what}: hits in {len(hits)} groups; there are {len(managers)}")
    for manager, blocks in zip(managers, hits, strict=True):
        if manager.req_to_blocks.get(request.request_id):
            raise ValueError(f"{what} has blocks; hits can only begin a table")
        if len(blocks) * manager.block_size != num_hit_tokens:
            raise ValueError(
                f"{what}: {len(blocks)} hits of {manager.block_size} tokens each are not "
                f"{num_hit_tokens} tokens"
            )
        for block in blocks:
            if block.ref_cnt == 0 and block.block_hash is None and not block.is_null:
                raise ValueError(f"{what}: block {block.block_id} was evicted since it was found")
