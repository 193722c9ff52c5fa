"""The verbs of every KV cache in this book, and the checks that they share.

A cache is driven in steps. ``add`` begins a sequence; ``reserve`` asks for slots for the next
tokens of some sequences and returns a ``Batch``; the model runs over the batch and calls
``batch.attend`` once a layer; ``batch.commit`` says that the tokens are computed. Sampled tokens
come in with ``append``, and ``free`` ends a sequence::

    n = cache.add("A", prompt)                      # n tokens are already computed
    batch = cache.reserve({"A": len(prompt) - n})   # slots for the rest
    hidden = model(batch.token_ids, batch.positions, batch.attend)
    batch.commit()
    cache.append("A", [next_token])
    batch = cache.reserve({"A": 1})                 # … and so on

Where K and V lie is what a stage adds: it overrides the methods whose names begin with an
underscore.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from pagedattn.batch import Batch, SeqId
from pagedattn.config import Config
from pagedattn.whole_number import whole_number

__all__ = [
    "Batch",
    "Config",
    "InvariantError",
    "KVCache",
    "OutOfBlocks",
    "SeqId",
    "Sequence",
    "Usage",
]


class OutOfBlocks(ValueError):
    """The pool cannot give what was asked for. ``needed`` and ``free`` count blocks (slots in
    chapter 01)."""

    def __init__(self, needed: int, free: int, message: str | None = None) -> None:
        super().__init__(message or f"{needed} blocks are needed, {free} are free")
        self.needed = needed
        self.free = free


class InvariantError(AssertionError):
    """A structure contradicts itself. The message names the invariant and shows the pool."""


@dataclass(frozen=True)
class Usage:
    """Where the slots of a cache are, counted in slots.

    ``used`` hold a computed token, ``reserved`` belong to some sequence (the used ones among them).
    """

    total: int
    used: int
    reserved: int

    @property
    def wasted(self) -> int:
        """Reserved, but holding nothing."""
        return self.reserved - self.used

    @property
    def free(self) -> int:
        """Open to any sequence."""
        return self.total - self.reserved


@dataclass(eq=False)
class Sequence:
    """One sequence: the tokens that are known, and how many of them have K and V in the cache."""

    seq_id: SeqId
    token_ids: list[int]
    max_tokens: int
    num_computed_tokens: int = 0


class KVCache(ABC):
    """Keys and values of many sequences. Stages say where they lie; this class checks and
    counts."""

    sequence_class: type[Sequence] = Sequence

    def __init__(self, config: Config) -> None:
        self.config = config
        self.sequences: dict[SeqId, Any] = {}
        self.open_batch: Batch | None = None

    # The verbs.

    def add(self, seq_id: SeqId, token_ids: Iterable[int], max_tokens: int | None = None) -> int:
        """Begin a sequence of known tokens that may grow to ``max_tokens`` (default:
        ``max_seq_len``).

        Returns how many of its tokens are already computed: 0 before chapter 04. Raises ValueError
        for an id that is in use, an empty prompt, a prompt over the limit, a limit over
        ``max_seq_len`` or one sequence too many.
        """
        return self._add(self._new_sequence(seq_id, token_ids, max_tokens))

    def append(self, seq_id: SeqId, token_ids: Iterable[int]) -> None:
        """Tokens that are known now but not computed yet: those just sampled. ValueError over
        ``max_tokens``."""
        self._check_no_open_batch("append")
        sequence, tokens = self._sequence(seq_id), as_token_ids(token_ids)
        self._check_limit(sequence, len(tokens))
        sequence.token_ids.extend(tokens)

    def reserve(self, num_new_tokens: Mapping[SeqId, int]) -> Batch:
        """Slots for the next n tokens of each sequence named, for all of them or for none.

        Raises OutOfBlocks when the pool is short, ValueError for an unknown sequence, n below 1, or
        more tokens than are known and not computed yet. Then nothing has changed.
        """
        self._check_no_open_batch("reserve")
        if not num_new_tokens:
            raise ValueError("reserve needs at least one sequence")
        counts = {seq_id: whole_number(n, "n") for seq_id, n in num_new_tokens.items()}
        for seq_id, n in counts.items():
            sequence = self._sequence(seq_id)
            waiting = len(sequence.token_ids) - sequence.num_computed_tokens
            if not 1 <= n <= waiting:
                raise ValueError(
                    f"reserve {n} tokens of sequence {seq_id!r}: "
                    f"{waiting} are known and not computed yet"
                )
        batch = self._build_batch(counts)
        self._take(counts)
        try:
            batch.block_table, batch.slot_mapping = self._address(
                list(counts), batch.query_start_loc, batch.positions
            )
        except BaseException:  # no memory for two tensors, say
            self._abort(batch)
            raise
        self.open_batch = batch
        return batch

    def free(self, seq_id: SeqId) -> None:
        """End a sequence and give back all that it holds. ValueError if it is unknown."""
        self._check_no_open_batch("free")
        self._end(self._sequence(seq_id))
        del self.sequences[seq_id]

    # What can be asked.

    @property
    def seq_ids(self) -> list[SeqId]:
        """The sequences in the cache, oldest first."""
        return list(self.sequences)

    def num_tokens(self, seq_id: SeqId) -> int:
        """Tokens of a sequence that are known, computed or not."""
        return len(self._sequence(seq_id).token_ids)

    def num_computed_tokens(self, seq_id: SeqId) -> int:
        """Tokens of a sequence whose K and V are in the cache."""
        return self._sequence(seq_id).num_computed_tokens

    @abstractmethod
    def need(self, token_ids: Iterable[int], n: int) -> tuple[int, int]:
        """What ``add`` and then ``reserve`` of n tokens would find: (tokens already computed,
        blocks taken)."""

    @abstractmethod
    def usage(self) -> Usage:
        """Slots in all, used, reserved, wasted and free."""

    def check_invariants(self) -> None:
        """Raise InvariantError if the cache contradicts itself."""
        for sequence in self.sequences.values():
            known, computed = len(sequence.token_ids), sequence.num_computed_tokens
            if not 0 <= computed <= known <= sequence.max_tokens:
                raise InvariantError(
                    f"sequence {sequence.seq_id!r}: {computed} tokens computed, {known} known, "
                    f"at most {sequence.max_tokens} allowed"
                )

    # What a stage adds.

    @abstractmethod
    def _begin(self, sequence: Any) -> None:
        """Storage that a sequence needs from the start. Raises before any change."""

    @abstractmethod
    def _take(self, num_new_tokens: Mapping[SeqId, int]) -> None:
        """Storage for the next n tokens of every sequence, behind those that are computed.

        For all of them or for none: raises OutOfBlocks before any change.
        """

    @abstractmethod
    def _address(
        self, seq_ids: list[SeqId], query_start_loc: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Where a batch lies: its block table, int32 [num_seqs, width], and the slot of every
        token, int64 [num_tokens]. ``query_start_loc`` and ``positions`` are those of ``Batch``."""

    @abstractmethod
    def _attend(self, batch: Batch, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store K and V where ``batch.slot_mapping`` says (-1: nowhere), then attend.

        Shapes as in ``Batch.attend``. Reads of the batch its tensors alone.
        """

    def _commit(self, batch: Batch) -> None:
        for seq_id, n in batch.num_new_tokens.items():
            self.sequences[seq_id].num_computed_tokens += n

    @abstractmethod
    def _abort(self, batch: Batch) -> None:
        """Give back what ``_take`` took; with poison on, kill the slots that were to be written."""

    @abstractmethod
    def _end(self, sequence: Any) -> None:
        """Give back all that a sequence holds."""

    # Shared by all stages.

    def _new_sequence(self, seq_id: SeqId, token_ids: Iterable[int], max_tokens: int | None) -> Any:
        """A sequence that can begin now: all checks of ``add``, and no change."""
        self._check_no_open_batch("add")
        tokens = as_token_ids(token_ids)
        limit = (
            self.config.max_seq_len
            if max_tokens is None
            else whole_number(max_tokens, "max_tokens")
        )
        self._check_new([seq_id])
        if not tokens:
            raise ValueError(f"sequence {seq_id!r} has an empty prompt; at least 1 token is needed")
        if not 1 <= limit <= self.config.max_seq_len:
            raise ValueError(
                f"max_tokens is {limit}; max_seq_len allows 1 to {self.config.max_seq_len}"
            )
        if len(tokens) > limit:
            raise ValueError(f"sequence {seq_id!r} has {len(tokens)} tokens; its limit is {limit}")
        return self.sequence_class(seq_id, tokens, limit)

    def _add(self, sequence: Any) -> int:
        """Begin it; how many of its tokens are already computed."""
        self._begin(sequence)
        self.sequences[sequence.seq_id] = sequence
        num_computed_tokens: int = sequence.num_computed_tokens
        return num_computed_tokens

    def _build_batch(self, counts: dict[SeqId, int]) -> Batch:
        """A batch of these tokens; where they lie is not known yet."""
        sequences = [self.sequences[seq_id] for seq_id in counts]
        spans = [
            range(s.num_computed_tokens, s.num_computed_tokens + n)
            for s, n in zip(sequences, counts.values(), strict=True)
        ]
        device = self.config.device
        token_ids = [s.token_ids[p] for s, span in zip(sequences, spans, strict=True) for p in span]
        positions = torch.tensor([p for span in spans for p in span], device=device)
        starts = [0, *accumulate(counts.values())]
        query_start_loc = torch.tensor(starts, dtype=torch.int32, device=device)
        return Batch(
            cache=self,
            num_new_tokens=counts,
            token_ids=torch.tensor(token_ids, device=device),
            positions=positions,
            query_start_loc=query_start_loc,
            seq_lens=torch.tensor([s.stop for s in spans], dtype=torch.int32, device=device),
            block_table=query_start_loc.new_empty(0),
            slot_mapping=positions.new_empty(0),
        )

    def _sequence(self, seq_id: SeqId) -> Any:
        try:
            return self.sequences[seq_id]
        except KeyError:
            raise ValueError(
                f"unknown sequence {seq_id!r}; the cache holds {self.seq_ids}"
            ) from None

    def _check_new(self, seq_ids: list[SeqId]) -> None:
        """Raise ValueError unless sequences of these names can begin."""
        for index, seq_id in enumerate(seq_ids):
            if seq_id in self.sequences or seq_id in seq_ids[:index]:
                raise ValueError(f"sequence {seq_id!r} is in the cache already")
        held, most = len(self.sequences), self.config.max_num_seqs
        if held + len(seq_ids) > most:
            raise ValueError(
                f"{held} sequences are in the cache: max_num_seqs is {most}, "
                f"{len(seq_ids)} more would exceed it"
            )

    def _check_limit(self, sequence: Sequence, num_tokens: int) -> None:
        known = len(sequence.token_ids)
        if known + num_tokens > sequence.max_tokens:
            raise ValueError(
                f"sequence {sequence.seq_id!r} has {known} tokens; "
                f"{num_tokens} more exceed its limit of {sequence.max_tokens}"
            )

    def _check_no_open_batch(self, verb: str) -> None:
        if self.open_batch is not None:
            raise ValueError(
                f"{verb} while a batch of {self.open_batch.seq_ids} is open; "
                "commit or abort it first"
            )


def as_token_ids(token_ids: Iterable[int]) -> list[int]:
    """Token ids as Python ints. Raises ValueError for one that is not whole, negative or too
    large."""
    tokens = list(token_ids)
    if not set(map(type, tokens)) <= {int}:  # the rule is ints, and long prompts of them
        tokens = [whole_number(token, "token id") for token in tokens]
    for token in (min(tokens, default=0), max(tokens, default=0)):
        if not 0 <= token < 2**63:
            raise ValueError(f"token id {token}; ids are 0 or more, and below 2**63")
    return tokens
