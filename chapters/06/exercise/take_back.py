# Chapter 06, given: pagedattn/manager/take_back.py; the tasks stand in the files beside it.
#   pytest chapters/06 --student                all its tests on this folder
#   pytest chapters/06 --student --task 6.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 85d4a0d4c39f0f03b82f8fdce4a6131e2bf66a1ea8345571d7b735644c86811d

"""A step that does not run is taken back, and the requests go on from where they were."""

from __future__ import annotations

from .manager import KVCacheManager
from .page import ceil_div
from .request import Request


def take_back_slots(manager: KVCacheManager, request: Request) -> None:
    """Take back what ``allocate_slots`` gave to a request in a step that does not run.

    ``abort`` takes everything from a request that leaves; this one stays, with the blocks of its
    ``num_computed_tokens``. Blocks behind them are free again, the last one first. What was
    registered in this step holds nothing, so its digests are forgotten. No other request may have
    hit them. In attention layers; what has left a window meanwhile does not come back.
    """
    request_id, pool = request.request_id, manager.pool
    void = pool.registered_in_step.pop(request_id, [])
    pool.evict_blocks([block.block_id for block in void])
    for group in manager.coordinator.single_type_managers:
        table = group.req_to_blocks.get(request_id, [])
        kept = ceil_div(request.num_computed_tokens, group.block_size)
        pool.free_blocks(table[kept:][::-1])
        del table[kept:]
        if not table:
            group.free(request_id)
        elif request_id in group.num_cached_blocks:
            num_full_blocks = request.num_computed_tokens // group.block_size
            group.num_cached_blocks[request_id] = num_full_blocks
