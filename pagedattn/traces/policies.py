"""Ways of reserving KV slots. A policy knows what fits; `fcfs` decides who runs."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from pagedattn.traces.recorded import Request


@dataclass(frozen=True, slots=True, eq=False)
class Running:
    """A request in the pool. Two of them are never equal.

    Every step adds one token to it, so no token count has to be kept: `origin` is the step in which
    it would have had 0 tokens, and after step s it has s - origin.
    """

    request: Request
    origin: int


class Policy(ABC):
    """What a pool of `num_slots` slots reserves for a request, and when another one fits."""

    name: str
    num_slots: int

    @property
    @abstractmethod
    def reserved(self) -> int:
        """Slots that are reserved now, by all running requests together."""

    @abstractmethod
    def check(self, request: Request) -> None:
        """Raise ValueError if the request could never run, not even alone."""

    @abstractmethod
    def admit(self, running: Running, num_tokens: int) -> bool:
        """Reserve for a request that stores `num_tokens` now; False, changing nothing, if
        it doesn't fit."""

    def grow(self, step: int) -> bool:
        """Reserve for one more token of every running request, so that after `step` each has
        step - origin of them; False, changing nothing, if that doesn't fit."""
        return True

    @abstractmethod
    def release(self, running: Running, num_tokens: int) -> None:
        """Free all that is reserved for a request that has `num_tokens`."""


class ReserveMax(Policy):
    """`max_seq_len` slots for every request, for its whole life: the slab of chapter 01.

    The vLLM paper's baseline Orca (Max), section 6.1.
    """

    def __init__(self, num_slots: int, max_seq_len: int) -> None:
        if not 1 <= max_seq_len <= num_slots:
            raise ValueError(
                f"max_seq_len is {max_seq_len}, but must be from 1 to the pool's {num_slots} slots"
            )
        self.name = "max"
        self.num_slots = num_slots
        self.max_seq_len = max_seq_len
        self.num_running = 0

    @property
    def reserved(self) -> int:
        return self.num_running * self.max_seq_len

    def check(self, request: Request) -> None:
        if request.total_length > self.max_seq_len:
            raise ValueError(
                f"{request} has {request.total_length} tokens, but max_seq_len is "
                f"{self.max_seq_len}"
            )

    def admit(self, running: Running, num_tokens: int) -> bool:
        if self.reserved + self.max_seq_len > self.num_slots:
            return False
        self.num_running += 1
        return True

    def release(self, running: Running, num_tokens: int) -> None:
        self.num_running -= 1


class Paged(Policy):
    """Blocks of `block_size` slots, taken when the tokens reach them: the pages of chapter 02."""

    def __init__(self, num_slots: int, block_size: int) -> None:
        if not 1 <= block_size <= num_slots:
            raise ValueError(
                f"block_size is {block_size}, but must be from 1 to the pool's {num_slots} slots"
            )
        self.name = f"paged{block_size}"
        self.num_slots = num_slots
        self.block_size = block_size
        self.num_blocks = num_slots // block_size
        self.num_free_blocks = self.num_blocks
        # Before step s a request has s - 1 - origin tokens. It needs a block in s if that is a
        # multiple of block_size, so if origin and s - 1 leave the same remainder. Running requests
        # are counted by this remainder: what a step needs is then known without visiting them.
        self.num_by_remainder = [0] * block_size

    @property
    def reserved(self) -> int:
        return (self.num_blocks - self.num_free_blocks) * self.block_size

    def blocks(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens`: the quotient, rounded up."""
        return -(-num_tokens // self.block_size)

    def check(self, request: Request) -> None:
        if self.blocks(request.total_length) > self.num_blocks:
            raise ValueError(
                f"{request} needs {self.blocks(request.total_length)} blocks of {self.block_size}, "
                f"but the pool has {self.num_blocks}"
            )

    def admit(self, running: Running, num_tokens: int) -> bool:
        if self.blocks(num_tokens) > self.num_free_blocks:
            return False
        self.num_free_blocks -= self.blocks(num_tokens)
        self.num_by_remainder[running.origin % self.block_size] += 1
        return True

    def grow(self, step: int) -> bool:
        needed = self.num_by_remainder[(step - 1) % self.block_size]
        if needed > self.num_free_blocks:
            return False
        self.num_free_blocks -= needed
        return True

    def release(self, running: Running, num_tokens: int) -> None:
        self.num_free_blocks += self.blocks(num_tokens)
        self.num_by_remainder[running.origin % self.block_size] -= 1
