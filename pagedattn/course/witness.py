"""A cache under observation: beside it stands everything that it should remember.

The tests of the verbs drive a cache through a `Witness`. It makes up Q, K and V of every token,
keeps all of them, and compares what the cache computes with attention that has no cache.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from pagedattn.attention import attention
from pagedattn.cache import Batch, Config, InvariantError, SeqId
from pagedattn.course.history import History
from pagedattn.sharing import Heir

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Outputs are means of numbers around 1. The cache may sum in another order than the reference,
# which is always computed in float64: a few units in the last place of either type.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}


class Witness:
    """A cache with the verbs of a stage, and the history of each of its sequences.

    ``stage`` is a module with ``build_cache``; ``options`` replace fields of the small ``Config``
    that it starts from: float64, poison on, 120 slots, sequences of up to 24 tokens. Everything
    random comes from ``seed``.
    """

    def __init__(
        self, stage: ModuleType, *, num_heads: int = 4, seed: int = 0, **options: Any
    ) -> None:
        defaults: dict[str, Any] = {
            "num_layers": 2,
            "num_kv_heads": 2,
            "head_dim": 8,
            "block_size": 4,
            "num_blocks": 31,
            "max_seq_len": 24,
            "dtype": torch.float64,
            "poison": True,
            "device": DEVICE,
        }
        self.config = Config(**(defaults | options))
        self.cache: Any = stage.build_cache(self.config)  # a KVCache, of whatever stage
        self.num_heads = num_heads
        self.random = torch.Generator().manual_seed(seed)
        self.histories: dict[SeqId, History] = {}

    def __repr__(self) -> str:
        return repr(self.cache)

    # The verbs, as a cache has them. Tokens are given, or only how many: then they are random.

    def add(
        self,
        seq_id: SeqId,
        tokens: int | Sequence[int],
        max_tokens: int | None = None,
        **identity: Any,
    ) -> int:
        """Add a sequence; ``identity``: salt and extra_keys. Raises what the cache raises."""
        token_ids = self._token_ids(tokens)
        num_computed: int = self.cache.add(seq_id, token_ids, max_tokens, **identity)
        history = History(self.config, self.num_heads, **identity)
        history.extend(token_ids)
        history.num_computed = num_computed
        self.histories[seq_id] = history
        return num_computed

    def append(self, seq_id: SeqId, tokens: int | Sequence[int] = 1) -> None:
        token_ids = self._token_ids(tokens)
        self.cache.append(seq_id, token_ids)
        self.histories[seq_id].extend(token_ids)

    def reserve(self, counts: Mapping[SeqId, int]) -> Batch:
        """Reserve, and look at every tensor of the batch that a contract speaks of."""
        batch = self.cache.reserve(counts)
        starts = {s: self.histories[s].num_computed for s in counts}
        positions = {s: list(range(starts[s], starts[s] + n)) for s, n in counts.items()}
        token_ids = [self.histories[s].token_ids[p] for s in counts for p in positions[s]]
        assert batch.seq_ids == list(counts), f"the batch holds {batch.seq_ids}, not {list(counts)}"
        for name, expected in (
            ("positions", [p for s in counts for p in positions[s]]),
            ("token_ids", token_ids),
            ("seq_lens", [starts[s] + n for s, n in counts.items()]),
            ("query_start_loc", [0, *accumulate(counts.values())]),
        ):
            found = getattr(batch, name).tolist()
            assert found == expected, (
                f"reserve({dict(counts)}): {name} is {found}, expected {expected}; {self!r}"
            )
        return batch

    def inputs(self, batch: Batch, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Q, K, V of the batch's tokens in one layer."""
        pieces = [
            [t[layer, h.num_computed : h.num_computed + n] for t in (h.q, h.k, h.v)]
            for h, n in self._rows(batch)
        ]
        q, k, v = (torch.cat(piece) for piece in zip(*pieces, strict=True))
        return q, k, v

    def attend(self, batch: Batch) -> list[Tensor]:
        """Attend in every layer and compare with attention that has no cache."""
        return [self.attend_layer(batch, layer) for layer in range(self.config.num_layers)]

    def attend_layer(self, batch: Batch, layer: int) -> Tensor:
        """Attend in one layer, compare, and return the output of the cache."""
        out = batch.attend(layer, *self.inputs(batch, layer))
        begin = 0
        for seq_id, (history, n) in zip(batch.seq_ids, self._rows(batch), strict=True):
            self._compare(seq_id, layer, history, out[begin : begin + n])
            begin += n
        return out

    def commit(self, batch: Batch) -> None:
        """Commit, and see every length advance: not before, and by the right number."""
        self._check_lengths("before commit")
        for history, n in self._rows(batch):
            history.num_computed += n
        batch.commit()
        self._check_lengths("after commit")

    def step(self, counts: Mapping[SeqId, int]) -> list[Tensor]:
        """Reserve, attend, commit, check: one whole step. Returns one output for each layer."""
        batch = self.reserve(counts)
        outputs = self.attend(batch)
        self.commit(batch)
        self.check()
        return outputs

    def decode(self, *seq_ids: SeqId) -> list[Tensor]:
        """Append one token to each sequence and compute it."""
        for seq_id in seq_ids:
            self.append(seq_id)
        return self.step(dict.fromkeys(seq_ids, 1))

    def free(self, seq_id: SeqId) -> None:
        self.cache.free(seq_id)
        del self.histories[seq_id]

    def live(self, tokens: int | Sequence[int], **identity: Any) -> int:
        """A whole life: add, compute, free. Returns what ``add`` found."""
        seq_id = "a whole life"
        num_computed = self.add(seq_id, tokens, **identity)
        assert self.waiting(seq_id), f"all tokens are computed, none is left for scores; {self!r}"
        self.step({seq_id: self.waiting(seq_id)})
        self.free(seq_id)
        self.check()
        return num_computed

    # From chapter 03 on.

    def fork(self, parent: SeqId, child: SeqId) -> None:
        """Fork: the child has the whole history of its parent, as numbers of its own."""
        self.cache.fork(parent, child)
        self.histories[child] = deepcopy(self.histories[parent])

    def replace(self, seq_ids: list[SeqId], heirs: Sequence[tuple[SeqId, SeqId]]) -> None:
        """One step of a beam search; ``heirs`` are (parent, child), each with a random token."""
        more = {child: self._token_ids(1) for _, child in heirs}
        self.cache.replace(
            seq_ids, [Heir(parent, child, more[child][0]) for parent, child in heirs]
        )
        begun = {child: deepcopy(self.histories[parent]) for parent, child in heirs}
        for child, history in begun.items():
            history.extend(more[child])
        for seq_id in seq_ids:
            del self.histories[seq_id]
        self.histories |= begun

    def check_contents(self) -> None:
        """Through its table every sequence finds K and V of all its computed tokens, bit by bit."""
        for seq_id, history in self.histories.items():
            ids = self.cache.block_ids(seq_id)
            blocks = torch.tensor(ids, dtype=torch.int64, device=self.config.device)
            num_slots = len(ids) * self.config.block_size
            assert num_slots >= history.num_computed, (
                f"sequence {seq_id!r} has computed {history.num_computed} tokens, its table names "
                f"{len(ids)} blocks of {self.config.block_size}; {self!r}"
            )
            for name in ("k", "v"):
                stored = getattr(self.cache, f"{name}_cache")[:, blocks].flatten(1, 2)
                right = getattr(history, name)[:, : history.num_computed]
                wrong = (stored[:, : history.num_computed] != right).flatten(2).any(2).nonzero()
                assert not len(wrong), (
                    f"sequence {seq_id!r}: {name.upper()} of position {int(wrong[0, 1])} in layer "
                    f"{int(wrong[0, 0])} is not what was stored there; {self!r}"
                )

    # What must always hold.

    def waiting(self, seq_id: SeqId) -> int:
        """Tokens of a sequence that are known and not computed yet."""
        history = self.histories[seq_id]
        return len(history.token_ids) - history.num_computed

    def check(self) -> None:
        """Invariants, lengths, and slots that add up."""
        try:
            self.cache.check_invariants()
        except InvariantError as broken:
            raise AssertionError(str(broken)) from broken
        self._check_lengths("now")
        usage = self.cache.usage()
        used = self._num_used_slots()
        assert usage.total == self.config.num_slots, (
            f"{usage.total} slots in all, expected {self.config.num_slots}; {self!r}"
        )
        assert usage.used == used, f"{usage} but {used} slots hold computed tokens; {self!r}"
        assert usage.used <= usage.reserved <= usage.total, f"{usage} does not add up; {self!r}"
        assert usage.wasted == usage.reserved - usage.used, f"{usage}: wasted; {self!r}"
        assert usage.free == usage.total - usage.reserved, f"{usage}: free; {self!r}"

    def snapshot(self) -> dict[str, bytes]:
        """Every structure of the cache as bytes, to be compared with a later snapshot."""
        return {name: pickle.dumps(value) for name, value in vars(self.cache).items()}

    def assert_unchanged(self, before: dict[str, bytes], after_what: str) -> None:
        """The cache is, byte for byte, what it was at the snapshot."""
        now = self.snapshot()
        changed = [name for name in now if now[name] != before.get(name)]
        assert not changed, f"after {after_what} the cache's {', '.join(changed)} changed: {self!r}"

    def _num_used_slots(self) -> int:
        """Slots with a computed token in them. Where blocks are shared, tables tell them apart."""
        lengths = {seq_id: h.num_computed for seq_id, h in self.histories.items()}
        if not hasattr(self.cache, "fork"):
            return sum(lengths.values())
        block_size, slots = self.config.block_size, set()
        for seq_id, length in lengths.items():
            blocks = self.cache.block_ids(seq_id)
            slots |= {(blocks[p // block_size], p % block_size) for p in range(length)}
        return len(slots)

    def _check_lengths(self, when: str) -> None:
        expected = list(self.histories)
        assert set(self.cache.seq_ids) == set(expected), (
            f"{when} the cache holds {self.cache.seq_ids}, expected {expected}; {self!r}"
        )
        for seq_id, history in self.histories.items():
            known, computed = (
                self.cache.num_tokens(seq_id),
                self.cache.num_computed_tokens(seq_id),
            )
            assert (known, computed) == (len(history.token_ids), history.num_computed), (
                f"{when} sequence {seq_id!r} has {known} tokens known and {computed} computed, "
                f"expected {len(history.token_ids)} and {history.num_computed}; {self!r}"
            )

    def _compare(self, seq_id: SeqId, layer: int, history: History, out: Tensor) -> None:
        begin, end = history.num_computed, history.num_computed + len(out)
        q, k, v = (t[layer].double() for t in (history.q, history.k, history.v))
        spec = self.config.layer_specs[layer]
        expected = attention(q[begin:end], k[:end], v[:end], spec)
        errors = (out.double() - expected).abs().amax(dim=(1, 2))  # one a token; NaN stays NaN
        tolerance = TOLERANCE[self.config.dtype]
        for position, error in enumerate(errors.tolist(), start=begin):
            assert error <= tolerance, (
                f"sequence {seq_id!r}, layer {layer}, position {position}: "
                + (
                    "the output is NaN: it used a slot that holds no computed token"
                    if error != error
                    else f"the output differs by {error:.3g} from attention with no cache "
                    f"over positions 0 .. {position} (allowed: {tolerance:g})"
                )
                + f"; {self!r}"
            )

    def _rows(self, batch: Batch) -> list[tuple[History, int]]:
        return [(self.histories[s], n) for s, n in batch.num_new_tokens.items()]

    def _token_ids(self, tokens: int | Sequence[int]) -> list[int]:
        if isinstance(tokens, int):
            return torch.randint(50_000, (tokens,), generator=self.random).tolist()
        return list(tokens)
