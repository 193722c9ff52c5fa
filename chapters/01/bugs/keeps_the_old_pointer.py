"""The second prompt begins where the first one ended.

The cache was emptied between two prompts, the pointer to its end was not. The first answer is
right, and every later one sees a stretch of memory that nobody wrote for it.
rasbt/LLMs-from-scratch#925.
"""

from typing import Any

from pagedattn.cache import SeqId

SYMPTOM = "a sequence that has the name of an old one starts with some tokens computed already"
KILLED_BY = ("test_verbs.py::test_a_new_sequence_owes_nothing_to_an_old_one",)


def apply(stage: Any) -> None:
    cache_class = stage.ContiguousKVCache
    begin, end = cache_class._begin, cache_class._end
    pointers: dict[SeqId, int] = {}

    def _begin(self, sequence) -> None:
        begin(self, sequence)
        known = len(sequence.token_ids)
        sequence.num_computed_tokens = min(pointers.get(sequence.seq_id, 0), known - 1)

    def _end(self, sequence) -> None:
        pointers[sequence.seq_id] = sequence.num_computed_tokens
        end(self, sequence)

    cache_class._begin, cache_class._end = _begin, _end
