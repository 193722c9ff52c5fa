"""Policies that know how long each answer will become.

No server knows that. They show what other ways to reserve could reach at best: even with perfect
knowledge, a slab holds slots that its request uses only later, and slabs leave gaps between them.
"""

from pagedattn.cache import OutOfBlocks
from pagedattn.contiguous import SlabArena
from pagedattn.traces.buddy import BuddyArena, buddy_size
from pagedattn.traces.policies import Paged, Policy, Running
from pagedattn.traces.recorded import Request


class ReserveExact(Policy):
    """As many slots as the request will fill, wherever they are: a limit, not an allocator.

    The vLLM paper's baseline Orca (Oracle), section 6.1, without placing anything.
    """

    name = "exact"

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots is {num_slots}, but must be at least 1")
        self.num_slots = num_slots
        self.largest = num_slots  # what one request can have
        self.num_reserved = 0

    @property
    def reserved(self) -> int:
        return self.num_reserved

    def slots(self, request: Request) -> int:
        """What is reserved for this request."""
        return request.total_length

    def check(self, request: Request) -> None:
        if self.slots(request) > self.largest:
            raise ValueError(
                f"{request} needs {self.slots(request)} slots, but gets at most {self.largest} of "
                f"the pool's {self.num_slots}"
            )

    def admit(self, running: Running, num_tokens: int) -> bool:
        size = self.slots(running.request)
        if self.num_reserved + size > self.num_slots:
            return False
        self.num_reserved += size
        return True

    def release(self, running: Running, num_tokens: int) -> None:
        self.num_reserved -= self.slots(running.request)


class ReserveSlab(ReserveExact):
    """The same at an address: the slots have to be free in one piece."""

    def __init__(self, num_slots: int, arena: SlabArena | BuddyArena) -> None:
        super().__init__(num_slots)
        self.arena = arena
        self.starts: dict[Running, int] = {}

    def admit(self, running: Running, num_tokens: int) -> bool:
        try:
            self.starts[running] = self.arena.take(self.slots(running.request))
        except OutOfBlocks:
            return False
        return super().admit(running, num_tokens)

    def release(self, running: Running, num_tokens: int) -> None:
        self.arena.give_back(self.starts.pop(running), self.slots(running.request))
        super().release(running, num_tokens)


class ExactFirstFit(ReserveSlab):
    """A slab of the exact length, cut from the first hole that holds it: the arena of chapter 01.

    The vLLM paper's baseline Orca (Oracle), section 6.1.
    """

    name = "exact_ff"

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots, SlabArena(num_slots))


class Buddy(ReserveSlab):
    """A slab of the next power of two, from a binary buddy allocator.

    The vLLM paper's baseline Orca (Pow2), section 6.1, but with the whole length known.
    """

    name = "buddy"

    def __init__(self, num_slots: int) -> None:
        arena = BuddyArena(num_slots)
        super().__init__(num_slots, arena)
        self.largest = arena.largest

    def slots(self, request: Request) -> int:
        return buddy_size(request.total_length)


class PagedOracle(Paged):
    """Blocks that are taken when the tokens reach them, but promised in advance: a request is
    admitted only if the pool can hold all running requests at their full length. Nothing is
    preempted then."""

    def __init__(self, num_slots: int, block_size: int) -> None:
        super().__init__(num_slots, block_size)
        self.name = f"pagedR{block_size}"
        self.num_promised_blocks = 0

    def admit(self, running: Running, num_tokens: int) -> bool:
        promised = self.num_promised_blocks + self.blocks(running.request.total_length)
        if promised > self.num_blocks:
            return False
        self.num_promised_blocks = promised
        return super().admit(running, num_tokens)

    def release(self, running: Running, num_tokens: int) -> None:
        super().release(running, num_tokens)
        self.num_promised_blocks -= self.blocks(running.request.total_length)
