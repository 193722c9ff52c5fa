"""Free queues to compare with the one of chapter 04: each can give the head, take blocks at the
tail, and give up one block from anywhere."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable


class Node:
    """A block with links to its two neighbours in the queue; alone it is its own neighbour."""

    __slots__ = ("after", "before", "block_id", "queue_position")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.before = self.after = self
        self.queue_position = -1


class LinkedQueue:
    """A doubly linked list through the blocks, with a fake block at each end."""

    def __init__(self, blocks: Iterable[Node]) -> None:
        self.head, self.tail = Node(-1), Node(-1)
        self.head.after, self.tail.before = self.tail, self.head
        self.append_n(blocks)

    def append_n(self, blocks: Iterable[Node]) -> None:
        last = self.tail.before
        for block in blocks:
            block.before, last.after = last, block
            last = block
        last.after, self.tail.before = self.tail, last

    def popleft_n(self, n: int) -> list[Node]:
        blocks, block = [], self.head.after
        for _ in range(n):
            blocks.append(block)
            following = block.after
            block.before = block.after = block
            block = following
        self.head.after, block.before = block, self.head
        return blocks

    def remove(self, block: Node) -> None:
        block.before.after, block.after.before = block.after, block.before
        block.before = block.after = block


class OrderedDictQueue:
    """``collections.OrderedDict``: a linked list and a hash table, both in C."""

    def __init__(self, blocks: Iterable[Node]) -> None:
        self.blocks = OrderedDict.fromkeys(blocks)

    def append_n(self, blocks: Iterable[Node]) -> None:
        self.blocks.update(dict.fromkeys(blocks))

    def popleft_n(self, n: int) -> list[Node]:
        popitem = self.blocks.popitem
        return [popitem(last=False)[0] for _ in range(n)]

    def remove(self, block: Node) -> None:
        del self.blocks[block]


class DequeQueue:
    """``collections.deque``: fast at both ends; for the middle it must search."""

    def __init__(self, blocks: Iterable[Node]) -> None:
        self.blocks = deque(blocks)

    def append_n(self, blocks: Iterable[Node]) -> None:
        self.blocks.extend(blocks)

    def popleft_n(self, n: int) -> list[Node]:
        popleft = self.blocks.popleft
        return [popleft() for _ in range(n)]

    def remove(self, block: Node) -> None:
        self.blocks.remove(block)
