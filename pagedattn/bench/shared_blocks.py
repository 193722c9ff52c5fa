"""How many blocks samples or beams take, step by step, on the cache of chapter 03. No model runs:
which beams live on is an input, and everything else follows from lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count

import torch
from torch import Tensor

from pagedattn import sharing
from pagedattn.cache import Batch, Config, SeqId
from pagedattn.sharing import BlockPool, Heir
from pagedattn.traces import Request

Done = Callable[[], object]


@dataclass(frozen=True)
class Blocks:
    """Blocks in use, summed over steps. ``own`` counts the entries of all block tables: the blocks
    that sequences with copies of their own would hold. ``shared`` counts each block once."""

    own: int = 0
    shared: int = 0
    copies: int = 0

    def __add__(self, other: Blocks) -> Blocks:
        return Blocks(self.own + other.own, self.shared + other.shared, self.copies + other.copies)

    @property
    def saved(self) -> float:
        """The share of ``own`` that sharing saves: the measure of the vLLM paper, section 6.3."""
        return 1 - self.shared / self.own


class CountingCache(sharing.PagedKVCache):
    """The cache of chapter 03 without attention: its counts do not depend on K and V."""

    def _attend(self, batch: Batch, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q


class Generation:
    """Samples or beams of many prompts in one pool, all a token further with every step.

    ``running`` holds the sequences of each request, by its index. Each prompt is computed once, and
    forked. ``blocks`` grows with every step, that of the prompts included: there, too, a sequence
    counts as having its own copy.
    """

    def __init__(self, requests: Sequence[Request], num_seqs: int, block_size: int) -> None:
        # The last token of an answer is never computed.
        blocks_a_seq = [-(-(r.total_length - 1) // block_size) for r in requests]
        config = Config(
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            num_blocks=1 + num_seqs * sum(blocks_a_seq),
            max_seq_len=max(r.total_length for r in requests),
            block_size=block_size,
            max_num_seqs=num_seqs * (len(requests) + 1),  # one has two generations, for a moment
            device="cpu",
        )
        self.cache = CountingCache(config, BlockPool(config.num_blocks))
        self.names = count()
        self.running: dict[int, list[SeqId]] = {}
        for index, request in enumerate(requests):
            first = next(self.names)
            self.cache.add(first, range(request.input_length))
            self.running[index] = [first]
        self._compute({s: self.cache.num_tokens(s) for s in self.cache.seq_ids})
        for seqs in self.running.values():
            seqs += [next(self.names) for _ in range(num_seqs - 1)]
            for seq_id in seqs[1:]:
                self.cache.fork(seqs[0], seq_id)
        self.blocks = self.now()

    def step(self, num_new_tokens: int = 1) -> None:
        """Compute so many known tokens of every sequence, and count the blocks."""
        before = self.cache.num_copies
        self._compute(dict.fromkeys(self.cache.seq_ids, num_new_tokens))
        self.blocks += self.now(self.cache.num_copies - before)

    def end(self, index: int) -> None:
        """The answer of this request is complete."""
        for seq_id in self.running.pop(index):
            self.cache.free(seq_id)

    def now(self, copies: int = 0) -> Blocks:
        """The blocks of this moment."""
        own = sum(len(sequence.blocks) for sequence in self.cache.sequences.values())
        pool = self.cache.pool
        return Blocks(own, len(pool.blocks) - 1 - pool.num_free_blocks, copies)

    def _compute(self, num_new_tokens: dict[SeqId, int]) -> None:
        batch = self.cache.reserve(num_new_tokens)
        nothing = torch.empty(len(batch.token_ids), 1, 1, device="cpu")
        batch.attend(0, nothing, nothing, nothing)
        batch.commit()


def sample_blocks(
    requests: Sequence[Request], num_samples: int, block_size: int, done: Done = lambda: None
) -> Blocks:
    """Parallel sampling: so many samples of each prompt, all as long as the recorded answer.

    An answer of n tokens takes n steps: one for the prompt, and n - 1, since its last token is
    never computed. ``done`` is called after each step.
    """
    generation = Generation(requests, num_samples, block_size)
    for _ in _steps(generation, requests, done):
        for seqs in generation.running.values():
            for seq_id in seqs:
                generation.cache.append(seq_id, [0])
    return generation.blocks


def beam_blocks(
    requests: Sequence[Request],
    width: int,
    block_size: int,
    parents: Iterable[Iterable[Sequence[int]]],
    done: Done = lambda: None,
) -> Blocks:
    """Beam search: ``width`` beams over the whole recorded answers, steps as in parallel sampling.

    ``parents`` says for each request, for each step, for each new beam, which of the old ones it
    continues: its index. It begins with the second token, since all first ones continue the prompt.
    Raises ValueError when it ends before the answer does.
    """
    generation = Generation(requests, width, block_size)
    choices = [chain([range(width)], steps) for steps in parents]
    for step in _steps(generation, requests, done):
        for index, beams in generation.running.items():
            chosen = next(choices[index], None)
            if chosen is None:
                raise ValueError(f"parents of {step} steps are known; {requests[index]} needs more")
            heirs = [Heir(beams[parent], next(generation.names), 0) for parent in chosen]
            generation.cache.replace(beams, heirs)
            generation.running[index] = [heir.seq_id for heir in heirs]
    return generation.blocks


def most_shared(requests: Iterable[Request], width: int, block_size: int) -> Blocks:
    """The bound of what beams can share: in every step all of them continue the same one.

    Then they share all blocks but the one that each is writing: with n tokens computed, (n - 1) //
    block_size shared blocks and ``width`` others. No cache is needed for that.
    """
    total = Blocks()
    for request in requests:
        for length in range(request.input_length, request.total_length):
            in_full, begun = divmod(length - 1, block_size)
            first = length == request.input_length
            total += Blocks(
                own=width * (in_full + 1),
                shared=in_full + (1 if first else width),
                copies=0 if first or not begun else width - 1,
            )
    return total


def _steps(generation: Generation, requests: Sequence[Request], done: Done) -> Iterator[int]:
    """For every token after the first: end what is complete, let the caller add tokens, compute."""
    for step in range(max(request.output_length for request in requests)):
        for index in [i for i in generation.running if requests[i].output_length == step + 1]:
            generation.end(index)
        if generation.running:
            yield step
            generation.step()
            done()
