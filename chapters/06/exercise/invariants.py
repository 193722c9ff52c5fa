# Chapter 06, given: pagedattn/manager/invariants.py; the tasks stand in the files beside it.
#   pytest chapters/06 --student                all its tests on this folder
#   pytest chapters/06 --student --task 6.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 d9a4028256094742fcaf26b2d0522e6753d247772efe087010959be6fd6c0240

"""What must be true of a manager between any two calls.

- I1: each usable block is in use, or once in the free queue; the null block is neither.
- I3: ``ref_cnt`` of a block is the number of tables that name it (one more for the blocks of sinks,
  which are set aside).
- I6: the map and the blocks agree on the digests.
- A block stands in tables of one group, and its digest is one of that group.
- The tables of a request are as long as its tokens need, in each group; what left a window is null,
  from the beginning on, and full attention has no null block.
- Blocks behind the number of registered ones carry no digest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, NoReturn

from pagedattn.cache import InvariantError
from pagedattn.prefix import KVCacheBlock

from .keys import split_key
from .pool import BlockPool
from .specs import CrossAttentionSpec, FullAttentionSpec, MambaSpec

if TYPE_CHECKING:
    from .single_type import SingleTypeKVCacheManager


def check_invariants(pool: BlockPool, managers: Iterable[SingleTypeKVCacheManager]) -> None:
    """Raises InvariantError, which names the invariant and shows the pool, if one does not hold."""
    managers = list(managers)
    tables = {
        (group_id, request_id): blocks
        for group_id, manager in enumerate(managers)
        for request_id, blocks in manager.req_to_blocks.items()
    }
    try:
        _check_pool(pool, managers, tables)
        _check_map(pool)
        _check_groups(tables)
        for group_id, manager in enumerate(managers):
            for request_id, blocks in manager.req_to_blocks.items():
                what = f"request {request_id} in group {group_id}"
                _check_table(what, blocks, manager, manager.num_cached_blocks.get(request_id, 0))
        _check_lengths(managers)
    except InvariantError as error:
        queue = [block.block_id for block in pool.free_queue]
        held = {key: [block.block_id for block in blocks] for key, blocks in tables.items()}
        raise InvariantError(f"{error}; free queue {queue}, tables {held}") from None


Tables = dict[tuple[int, str], list[KVCacheBlock]]


def _fail(message: str) -> NoReturn:
    raise InvariantError(message)


def _check_pool(pool: BlockPool, managers: list[SingleTypeKVCacheManager], tables: Tables) -> None:
    free = Counter(pool.free_queue)
    uses = Counter(block for blocks in tables.values() for block in blocks if not block.is_null)
    for manager in managers:
        uses.update(getattr(manager, "sink_blocks", ()))
    if pool.null_block in free or pool.null_block.ref_cnt or pool.null_block.block_hash:
        _fail("I1: the null block is free, counted or registered")
    for block in pool.blocks[1:]:
        if free[block] != (block.ref_cnt == 0):
            _fail(
                f"I1: block {block.block_id} has ref_cnt {block.ref_cnt} and stands {free[block]} "
                "times in the free queue"
            )
        if block.ref_cnt != uses[block]:
            _fail(
                f"I3: block {block.block_id} has ref_cnt {block.ref_cnt} and stands in "
                f"{uses[block]} tables"
            )


def _check_map(pool: BlockPool) -> None:
    found = set()
    for key, first in pool.cached_blocks.items():
        for block in (first, *pool.duplicates.get(key, ())):
            found.add(block)
            if block.block_hash != key:
                _fail(f"I6: the map leads to block {block.block_id}, which has another digest")
    for key, others in pool.duplicates.items():
        if not others or key not in pool.cached_blocks:
            _fail("I6: twins are kept of a digest that has none")
    for block in pool.blocks:
        if block.block_hash is not None and block not in found:
            _fail(f"I6: the digest of block {block.block_id} is not in the map")


def _check_groups(tables: Tables) -> None:
    owner: dict[KVCacheBlock, int] = {}
    for (group_id, _), blocks in tables.items():
        for block in blocks:
            if block.is_null:
                continue
            if owner.setdefault(block, group_id) != group_id:
                _fail(f"block {block.block_id} is in groups {owner[block]} and {group_id}")
            if block.block_hash is not None and split_key(block.block_hash)[1] != group_id:
                _fail(f"block {block.block_id} of group {group_id} has another group's digest")


def _check_table(
    what: str, blocks: list[KVCacheBlock], manager: SingleTypeKVCacheManager, num_cached: int
) -> None:
    if num_cached > len(blocks):
        _fail(f"{what}: {num_cached} blocks are registered, of {len(blocks)}")
    for block in blocks[num_cached:]:
        if block.block_hash is not None:
            _fail(f"{what}: block {block.block_id} has a digest and counts as unregistered")
    nulls = [block.is_null for block in blocks]
    if isinstance(manager.spec, FullAttentionSpec | CrossAttentionSpec) and any(nulls):
        _fail(f"{what}: there is a null block in {nulls}")
    if not isinstance(manager.spec, MambaSpec) and nulls != sorted(nulls, reverse=True):
        _fail(f"{what}: a null block stands behind one that is not: {nulls}")


def _check_lengths(managers: list[SingleTypeKVCacheManager]) -> None:
    """Tables of all groups hold the same number of tokens, up to the end of a block.

    States of Mamba and the tokens of an encoder are counted in another way.
    """
    alike = [m for m in managers if not isinstance(m.spec, CrossAttentionSpec | MambaSpec)]
    for request_id in {request_id for manager in alike for request_id in manager.req_to_blocks}:
        lengths = [(len(m.req_to_blocks.get(request_id, ())), m.block_size) for m in alike]
        least = max((length - 1) * block_size for length, block_size in lengths) + 1
        most = min(length * block_size for length, block_size in lengths)
        if least > most and any(length for length, _ in lengths):
            _fail(f"request {request_id} has tables of {lengths} (blocks, tokens in each)")
