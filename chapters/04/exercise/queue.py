# Chapter 04, yours to write: pagedattn/prefix/queue.py without the bodies of its tasks.
#   pytest chapters/04 --student                all its tests on this folder
#   pytest chapters/04 --student --task 4.2     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 b54e82daeb129844332353897e4d73ae292688df3382e2225b57fd5ef5d7314f

"""The queue of the free blocks, in the order in which they will be used again.

Blocks leave at the head and come back at the tail, so the head has been free for longest: taking
from it evicts the least recently used block (LRU). A hit takes a free block out of the middle.

Source: ``vllm/v1/core/kv_cache_utils.py``, ``FreeKVCacheBlockQueue``: a doubly linked list through
the blocks, because taking out of the middle must not search. Here it is a list of which each block
knows its own place. That is O(1) as well, on average, and in Python it is faster where most blocks
go, from head to tail: n blocks are one slice, where a linked list takes n steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from .block import KVCacheBlock


class FreeKVCacheBlockQueue:
    """A queue of blocks; any of them can be taken out in O(1), averaged over the calls.

    ``len(queue)`` is the number of blocks, and iterating goes from head to tail.

    Blocks are numbered in the order in which they come, and ``block.queue_position`` keeps the
    number. Number ``_first + i`` stands in ``_entries[i]``; those before ``_entries[_head]`` have
    left at the head. What leaves elsewhere leaves a hole, None. The list is shortened when more
    than half of it lies before the head, or more than half of it is holes: so each block that
    leaves pays for moving one other. Numbers are needed by ``remove`` alone, and given when it is
    called, to those that came since.
    """

    def __init__(self, blocks: Iterable[KVCacheBlock]) -> None:
        self._entries: list[KVCacheBlock | None] = list(blocks)
        self._first = 0
        self._head = 0
        self._num_holes = 0
        self._next_number = 0

    def __len__(self) -> int:
        return len(self._entries) - self._head - self._num_holes

    def __iter__(self) -> Iterator[KVCacheBlock]:
        entries = self._entries[self._head :]
        return iter([block for block in entries if block is not None])

    def append(self, block: KVCacheBlock) -> None:
        """Add a block at the tail. It must not be in the queue already."""
        self._entries.append(block)

    def append_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Add blocks at the tail, in this order. None of them may be in the queue already."""
        self._entries += blocks

    def popleft(self) -> KVCacheBlock:
        """Take the block at the head. Raises ValueError when there is none."""
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take the n blocks at the head, in their order. Raises ValueError unless so many are
        there; then none is taken."""
        raise NotImplementedError(
            "task 4.2: the head is a mark that moves, a block that leaves elsewhere leaves a hole; "
            "call _number_new_entries before you read queue_position; shorten the list when more "
            "than half of it lies before the mark, or is holes"
        )

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block out, wherever it stands. Raises ValueError when it is not in the queue."""
        raise NotImplementedError(
            "task 4.2: the head is a mark that moves, a block that leaves elsewhere leaves a hole; "
            "call _number_new_entries before you read queue_position; shorten the list when more "
            "than half of it lies before the mark, or is holes"
        )

    def _number_new_entries(self) -> None:
        begin = max(self._next_number - self._first, self._head)
        new: list[Any] = self._entries[begin:]  # without holes: who leaves one has a number
        for number, block in enumerate(new, self._first + begin):
            block.queue_position = number
        self._next_number = self._first + len(self._entries)
