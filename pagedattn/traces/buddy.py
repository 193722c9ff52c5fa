"""Binary buddies: slabs whose sizes are powers of two.

A slab of 2n slots is cut into two buddies of n slots, and two free buddies become one slab again.
Whose buddy is whose can be read off the addresses, so merging is fast. The price is that every
request is rounded up to a power of two. (Knuth, The Art of Computer Programming, volume 1, 2.5.)
"""

from pagedattn.cache import OutOfBlocks

SMALLEST = 16  # slots; no slab is cut smaller


def buddy_size(num_slots: int) -> int:
    """The size of the slab that holds `num_slots`: the next power of two, at least 16."""
    return max(SMALLEST, 1 << (num_slots - 1).bit_length())


class BuddyArena:
    """A row of slots from which slabs of 16, 32, 64, … slots are cut.

    `free` holds, by size, the first slots of the free slabs. In the beginning the row is cut into
    the powers of two that add up to it, the largest first; what is left of fewer than 16 slots is
    never used. These pieces never merge: each is smaller than the one before. So a slab of n slots
    always starts at a multiple of n, and its buddy is at its own address with the bit n flipped.

    Raises ValueError for fewer slots than the smallest slab has.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < SMALLEST:
            raise ValueError(f"num_slots is {num_slots}, but must be at least {SMALLEST}")
        self.num_slots = num_slots
        self.free: dict[int, set[int]] = {}
        start = 0
        size = self.largest
        while size >= SMALLEST:
            self.free[size] = {start} if num_slots & size else set()
            start += num_slots & size
            size //= 2

    @property
    def num_free_slots(self) -> int:
        """Free slots, whether or not they lie in one slab."""
        return sum(size * len(starts) for size, starts in self.free.items())

    @property
    def largest(self) -> int:
        """Slots of the largest slab that an empty arena can give."""
        return 1 << (self.num_slots.bit_length() - 1)

    def take(self, num_slots: int) -> int:
        """Cut a slab for `num_slots` from the lowest of the smallest free slabs that hold it;
        returns its first slot.

        Raises OutOfBlocks, counted in slots, when no free slab is large enough; ValueError for
        less than 1 slot.
        """
        if num_slots < 1:
            raise ValueError(f"a slab of {num_slots} slots; at least 1 is needed")
        wanted = size = buddy_size(num_slots)
        while not self.free.get(size):
            if size > self.largest:
                free = self.num_free_slots
                message = f"{wanted} slots in one slab are needed; {free} are free"
                raise OutOfBlocks(wanted, free, message)
            size *= 2
        start = min(self.free[size])
        self.free[size].remove(start)
        while size > wanted:
            size //= 2
            self.free[size].add(start + size)  # the low half is cut on
        return start

    def give_back(self, start: int, num_slots: int) -> None:
        """Return the slab that was taken for `num_slots`; it merges with its buddy, and so on up.

        Raises ValueError when there is no such slab, or when it is free already.
        """
        size = buddy_size(num_slots)
        if start % size or not 0 <= start <= self.num_slots - size:
            raise ValueError(f"no slab of {size} slots starts at slot {start}")
        for free_size, starts in self.free.items():
            if any(first < start + size and start < first + free_size for first in starts):
                raise ValueError(f"slots {start} .. {start + size - 1}: some are free already")
        while start ^ size in self.free[size]:
            self.free[size].remove(start ^ size)
            start &= ~size
            size *= 2
        self.free[size].add(start)
