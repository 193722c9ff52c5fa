"""Tokens count as computed as soon as they have slots.

Then the step fails, or its request is dropped, and nobody takes the count back: the sequence goes
on with K and V that were never written. huggingface/text-generation-inference#2489 let other
requests find such tokens, and answered from them.
"""

from typing import Any

from pagedattn.cache import Batch, SeqId

SYMPTOM = "5 tokens count as computed after reserve and abort"
KILLED_BY = (
    "test_verbs.py::test_lengths_advance_only_at_commit",
    "test_verbs.py::test_abort_leaves_everything",
)


def apply(stage: Any) -> None:
    cache_class = stage.ContiguousKVCache
    build_batch = cache_class._build_batch

    def _build_batch(self, counts: dict[SeqId, int]) -> Batch:
        batch = build_batch(self, counts)
        for seq_id, n in counts.items():
            self.sequences[seq_id].num_computed_tokens += n
        return batch

    def _commit(self, batch: Batch) -> None:
        """The lengths are what they should be already."""

    cache_class._build_batch, cache_class._commit = _build_batch, _commit
