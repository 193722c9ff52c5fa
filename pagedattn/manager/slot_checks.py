"""What ``allocate_slots`` and ``cache_blocks`` of a manager refuse, before they change anything."""

from __future__ import annotations

from collections.abc import Sequence

from pagedattn.prefix import KVCacheBlock
from pagedattn.whole_number import whole_number

from .keys import group_suffix
from .pool import block_hashes_of
from .request import Request
from .single_type import SingleTypeKVCacheManager
from .specs import FullAttentionSpec

Managers = Sequence[SingleTypeKVCacheManager]
Hits = Sequence[Sequence[KVCacheBlock]]


def check_request(request: Request, num_slots: int, hash_block_size: int | None) -> None:
    """Raises ValueError for computed tokens that have no slots, and for a request without slots
    whose digests are not of ``hash_block_size`` tokens (None: nobody asks for them)."""
    what, hasher = f"request {request.request_id}", request.hasher
    num_computed_tokens = request.num_computed_tokens
    whole_number(num_computed_tokens, f"num_computed_tokens of {what}")
    if not 0 <= num_computed_tokens <= num_slots:
        raise ValueError(
            f"{what} has {num_slots} slots, so {num_computed_tokens} computed tokens cannot be; "
            "a request that lost its blocks begins with 0"
        )
    if hash_block_size and (hasher is None or hasher.block_size != hash_block_size):
        raise ValueError(f"{what} lacks digests of {hash_block_size} tokens")


def check_slots(
    request: Request,
    managers: Managers,
    hits: Hits,
    max_model_len: int,
    num_new_tokens: int,
    num_hit_tokens: int,
    num_external_tokens: int,
    num_lookahead_tokens: int,
    num_encoder_tokens: int,
) -> None:
    """Raises ValueError for numbers of tokens or hits that ``allocate_slots`` cannot take."""
    what = f"request {request.request_id}"
    for name, number in (
        ("new", num_new_tokens),
        ("new computed", num_hit_tokens),
        ("external", num_external_tokens),
        ("lookahead", num_lookahead_tokens),
        ("encoder", num_encoder_tokens),
    ):
        if type(number) is not int:
            whole_number(number, f"the number of {name} tokens of {what}")
        if number < 0:
            raise ValueError(f"{what}: {number} {name} tokens are nothing to give slots for")
    if num_new_tokens + num_external_tokens == 0:
        raise ValueError(f"{what}: 0 new and 0 external tokens are nothing to give slots for")
    if num_hit_tokens or any(hits):
        _check_hits(request, managers, hits, num_hit_tokens)
    if num_external_tokens:
        end = request.num_computed_tokens + num_hit_tokens + num_external_tokens
        _check_external(request, managers, end, max_model_len)


def check_tokens_to_register(request: Request, managers: Managers, num_tokens: int) -> None:
    """Raises ValueError if a group has no slots for so many tokens, or the request no digests."""
    whole_number(num_tokens, "the number of tokens to register")
    for manager in managers:
        num_blocks = len(manager.req_to_blocks.get(request.request_id, ()))
        num_digests = len(block_hashes_of(request, manager.block_size))
        if num_tokens // manager.block_size > min(num_blocks, num_digests):
            raise ValueError(
                f"{num_tokens} tokens of request {request.request_id} are to be registered; in "
                f"group {manager.group_id} it has {num_blocks} blocks and {num_digests} digests of "
                f"{manager.block_size} tokens"
            )


def _check_external(request: Request, managers: Managers, end: int, max_model_len: int) -> None:
    """They must end before ``max_model_len``, and come before all tokens that are computed here."""
    what = f"request {request.request_id}"
    if end > max_model_len:
        raise ValueError(f"{what}: external tokens up to {end}, max_model_len is {max_model_len}")
    for manager in managers:
        table = manager.req_to_blocks.get(request.request_id)
        if table and request.request_id not in manager.num_cached_blocks:
            raise ValueError(f"{what} has {len(table)} blocks; external tokens come first")


def _check_hits(request: Request, managers: Managers, hits: Hits, num_hit_tokens: int) -> None:
    """They must be of all groups and the right length, and begin the tables of the request; each
    block must be registered for these tokens still."""
    what = f"request {request.request_id}"
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
        if blocks and not manager.enable_caching:
            raise ValueError(f"{what} has {len(blocks)} hits, and caching is off")
        _check_digests(what, manager, blocks, block_hashes_of(request, manager.block_size))


def _check_digests(
    what: str,
    manager: SingleTypeKVCacheManager,
    blocks: Sequence[KVCacheBlock],
    block_hashes: Sequence[bytes],
) -> None:
    pool, suffix = manager.pool, group_suffix(manager.group_id)
    keys = [block_hash + suffix for block_hash in block_hashes[: len(blocks)]]
    if [*map(pool.cached_blocks.get, keys)] == blocks:
        return  # which is the rule
    if len(blocks) > len(keys):
        raise ValueError(f"{what}: {len(blocks)} hits, and {len(keys)} full blocks")
    may_be_null = not isinstance(manager.spec, FullAttentionSpec)
    for block, key in zip(blocks, keys, strict=True):
        same = pool.cached_blocks.get(key), *pool.duplicates.get(key, ())
        if block not in same and not (may_be_null and block is pool.null_block):
            gone = block.block_hash is None and not block.is_null
            why = "was evicted since it was found" if gone else "does not hold these tokens"
            raise ValueError(f"{what}: block {block.block_id} {why}")
