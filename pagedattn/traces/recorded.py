"""Recorded requests, and the part of a trace that a model could serve."""

from collections.abc import Sequence
from dataclasses import dataclass, field

VIEWS = ("le4096", "full")
HASH_BLOCK_SIZE = 512  # tokens that one of a request's hash_ids stands for


@dataclass(frozen=True)
class Request:
    """One recorded request. Lengths are in tokens, `arrival_ms` in milliseconds.

    `hash_ids`, where a trace has them, name the prompt's blocks of 512 tokens in order; a partial
    last block has an id too. Equal ids mean equal prompts up to the end of that block.

    Raises ValueError for a length under 1, for an arrival or an id under 0, and for more or fewer
    ids than blocks.
    """

    input_length: int
    output_length: int
    arrival_ms: int | None = None
    hash_ids: tuple[int, ...] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name, value, limit in (
            ("input_length", self.input_length, 1),
            ("output_length", self.output_length, 1),
            ("arrival_ms", self.arrival_ms, 0),
            ("the least of hash_ids", min(self.hash_ids or (0,)), 0),
        ):
            if value is not None and value < limit:
                raise ValueError(f"{name} is {value}, but must be at least {limit}")
        if self.hash_ids is not None:
            num_blocks = -(-self.input_length // HASH_BLOCK_SIZE)
            if len(self.hash_ids) != num_blocks:
                raise ValueError(
                    f"{len(self.hash_ids)} hash_ids, but a prompt of {self.input_length} tokens "
                    f"has {num_blocks} blocks of {HASH_BLOCK_SIZE}"
                )

    @property
    def total_length(self) -> int:
        """Slots in use when the last token is stored."""
        return self.input_length + self.output_length


def select(requests: Sequence[Request], view: str, num_slots: int) -> tuple[list[Request], int]:
    """The requests that a model with a given context could serve, and its `max_seq_len`.

    `le4096` keeps requests of at most 4096 tokens in all; `max_seq_len` is 4096. `full` keeps those
    within the greatest power of two that is no greater than `num_slots`; `max_seq_len` is the
    longest of them.

    Raises ValueError for an unknown view, an empty trace, and if no request is kept.
    """
    if view not in VIEWS:
        raise ValueError(f"view is {view!r}, but must be one of {', '.join(VIEWS)}")
    if num_slots < 1:
        raise ValueError(f"num_slots is {num_slots}, but must be at least 1")
    if not requests:
        raise ValueError("the trace is empty")
    limit = 4096 if view == "le4096" else 1 << (num_slots.bit_length() - 1)
    kept = [request for request in requests if request.total_length <= limit]
    if not kept:
        shortest = min(request.total_length for request in requests)
        raise ValueError(
            f"view {view} keeps no request: its limit is {limit} tokens, the shortest has "
            f"{shortest}"
        )
    longest = max(request.total_length for request in kept)
    return kept, 4096 if view == "le4096" else longest
