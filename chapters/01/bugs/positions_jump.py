"""Positions jump after the first decode step.

The offset of a sequence grew by the length of the input before, which at the first decode step is
the whole prompt, not the one token that was added. The slots are right and the rotary angles are
not, so the text derails after a word or two. skyzh/tiny-llm#46.
"""

from typing import Any

from pagedattn.cache import Batch, SeqId

SYMPTOM = "after a prompt of 6 tokens come the positions 6, 12, 13 instead of 6, 7, 8"
KILLED_BY = ("test_verbs.py::test_positions_count_on",)


def apply(stage: Any) -> None:
    cache_class = stage.ContiguousKVCache
    build_batch, begin = cache_class._build_batch, cache_class._begin
    offsets: dict[SeqId, tuple[int, int]] = {}  # the next offset, and the length of the last input

    def _begin(self, sequence):
        begin(self, sequence)
        offsets[sequence.seq_id] = (0, 0)

    def _build_batch(self, counts: dict[SeqId, int]) -> Batch:
        batch = build_batch(self, counts)
        starts = batch.query_start_loc.tolist()
        for i, (seq_id, n) in enumerate(counts.items()):
            offset, last_input = offsets[seq_id]
            first = self.num_computed_tokens(seq_id) == 0
            tokens = slice(starts[i], starts[i + 1])
            batch.positions[tokens] += offset - self.num_computed_tokens(seq_id)
            offsets[seq_id] = (offset + (n if first else last_input), n)
        return batch

    cache_class._begin, cache_class._build_batch = _begin, _build_batch
