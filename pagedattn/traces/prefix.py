"""How much of recorded prompts a prefix cache holds already: the hit rate, by size of the pool.

Requests go through the pool of chapter 04 one at a time, in file order; one ends before the next
begins. The cache is empty at first. A request looks for the longest run of blocks that are cached,
from its first on, and touches them. It takes the rest of its blocks from the head of the free
queue, so evicting what lies there, and the full blocks of its prompt are registered at once. In the
end all its blocks go to the tail of the queue, the last one first: ends of prompts are evicted
before their beginnings.

Traces have ids in place of tokens, so an id takes the place of a digest. Only full blocks of a
prompt have one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pagedattn.prefix import BlockPool
from pagedattn.prefix.hashing import DIGEST_SIZE
from pagedattn.traces.recorded import HASH_BLOCK_SIZE, Request

VARIANTS = ("prompt", "whole")


@dataclass(frozen=True)
class Hits:
    """One run: what was found in the cache, of all that was looked for."""

    block_size: int
    prompt_tokens: int
    full_blocks: int  # of all prompts: those that can be found
    hit_blocks: int
    evictions: int
    cached_blocks: int  # at the end

    @property
    def token_hit_rate(self) -> float:
        """Prompt tokens in blocks that were found, of all prompt tokens."""
        return self.hit_blocks * self.block_size / self.prompt_tokens

    @property
    def block_hit_rate(self) -> float:
        """The same in blocks, of the full ones."""
        return self.hit_blocks / self.full_blocks if self.full_blocks else 0.0


def check_prefixes(requests: Sequence[Request], block_size: int) -> None:
    """Raise ValueError for an empty trace, requests without ids, and a block size that doesn't
    divide the 512 tokens that an id stands for."""
    if not requests:
        raise ValueError("the trace is empty")
    if block_size < 1 or HASH_BLOCK_SIZE % block_size:
        raise ValueError(
            f"block_size is {block_size}, but must divide {HASH_BLOCK_SIZE}, the tokens that one "
            "of a trace's hash_ids stands for"
        )
    for number, request in enumerate(requests, start=1):
        if request.hash_ids is None:
            raise ValueError(
                f"request {number} has no hash_ids: which prompts begin alike is not known"
            )


def check_pool(requests: Sequence[Request], block_size: int, num_blocks: int, variant: str) -> None:
    """Raise ValueError for an unknown variant, and for a pool that doesn't hold each request."""
    if variant not in VARIANTS:
        raise ValueError(f"variant is {variant!r}, but must be one of {', '.join(VARIANTS)}")
    if num_blocks < 1:
        raise ValueError(f"num_blocks is {num_blocks}, but must be at least 1")
    largest = max(requests, key=lambda request: blocks_held(request, block_size, variant))
    needed = blocks_held(largest, block_size, variant)
    if num_blocks < needed:
        raise ValueError(
            f"{num_blocks} blocks of {block_size} are too few: {largest} needs {needed}"
        )


def blocks_held(request: Request, block_size: int, variant: str) -> int:
    """The blocks that a request has while it runs.

    `prompt`: the full blocks of its prompt alone. `whole`: those of all its tokens, generated ones
    and the partial last block included.
    """
    if variant == "prompt":
        return request.input_length // block_size
    return -(-request.total_length // block_size)


def block_ids(request: Request, block_size: int) -> Iterator[int]:
    """The ids of the full blocks of a prompt, in order.

    An id x of 512 tokens becomes the ids x * k + j of its k = 512 / block_size parts, j = 0 .. k-1;
    of a partial last block those parts that are full.
    """
    parts = HASH_BLOCK_SIZE // block_size
    num_tokens = request.input_length
    for hash_id in request.hash_ids or ():
        full = min(num_tokens // block_size, parts)
        yield from range(hash_id * parts, hash_id * parts + full)
        num_tokens -= HASH_BLOCK_SIZE


def prefix_hits(
    requests: Sequence[Request], block_size: int, num_blocks: int, variant: str = "prompt"
) -> Hits:
    """Run the requests through a pool of `num_blocks` blocks, the null block not counted.

    Raises ValueError, before the first request, as `check_prefixes` and `check_pool` do.
    """
    check_prefixes(requests, block_size)
    check_pool(requests, block_size, num_blocks, variant)
    pool = BlockPool(num_blocks + 1)
    full_blocks = hit_blocks = 0
    for request in requests:
        digests = [id_.to_bytes(DIGEST_SIZE, "big") for id_ in block_ids(request, block_size)]
        blocks = pool.find_longest_cache_hit(digests)
        num_hits = len(blocks)
        pool.touch(blocks)
        blocks += pool.get_new_blocks(blocks_held(request, block_size, variant) - num_hits)
        pool.cache_full_blocks(blocks, digests, num_hits, len(digests))
        pool.free_blocks(reversed(blocks))
        full_blocks += len(digests)
        hit_blocks += num_hits
    return Hits(
        block_size,
        prompt_tokens=sum(request.input_length for request in requests),
        full_blocks=full_blocks,
        hit_blocks=hit_blocks,
        evictions=pool.num_evictions,
        cached_blocks=pool.num_cached_blocks,
    )


def infinite_hits(
    requests: Sequence[Request], block_size: int, recompute_last: bool = False
) -> Hits:
    """The same for a cache that never evicts: the most that any pool can find.

    With `recompute_last` a prompt is never found whole: an engine that has to say what comes after
    the last token must compute at least that one (vLLM: `vllm/v1/core/kv_cache_manager.py`,
    `get_computed_blocks`).

    Raises ValueError as `check_prefixes` does.
    """
    check_prefixes(requests, block_size)
    seen: set[int] = set()
    full_blocks = hit_blocks = 0
    for request in requests:
        ids = list(block_ids(request, block_size))
        num_hits = next((i for i, id_ in enumerate(ids) if id_ not in seen), len(ids))
        if recompute_last:
            num_hits = min(num_hits, (request.input_length - 1) // block_size)
        seen.update(ids)
        full_blocks += len(ids)
        hit_blocks += num_hits
    return Hits(
        block_size,
        prompt_tokens=sum(request.input_length for request in requests),
        full_blocks=full_blocks,
        hit_blocks=hit_blocks,
        evictions=0,
        cached_blocks=len(seen),
    )
