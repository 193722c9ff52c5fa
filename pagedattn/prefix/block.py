"""A block with a name, and a place in the queue of the free ones."""

from __future__ import annotations

from dataclasses import dataclass

from pagedattn import sharing


@dataclass(eq=False, slots=True)
class KVCacheBlock(sharing.KVCacheBlock):
    """Chapter 03's block. ``block_hash`` is the digest of its contents and of all before them, or
    None; ``queue_position`` belongs to the free queue."""

    block_hash: bytes | None = None
    queue_position: int = -1
