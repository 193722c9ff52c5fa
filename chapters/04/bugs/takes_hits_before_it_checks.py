"""The hit is taken out of the free queue first, and then the request is refused.

Nobody gives the blocks back: they are in use, and no table names them. In the field hits were
counted up before the check for new blocks failed, until nothing could be scheduled any more:
vllm-project/vllm#11562.
"""

SYMPTOM = "every refused request costs the pool the blocks of its hit"
KILLED_BY = (
    "test_eviction.py::test_one_sequence_too_many_takes_nothing",
    "test_eviction.py::test_a_refused_add_takes_nothing[its limit is too low]",
)


def apply(stage):
    cache = stage.PagedKVCache
    library_add, sequence_class = cache.add, cache.sequence_class

    def add(self, seq_id, token_ids, max_tokens=None, **identity):
        token_ids = list(token_ids)
        sequence = sequence_class(seq_id, token_ids, len(token_ids), **identity)
        hits = self._find_hits(sequence)
        self.pool.touch(hits)
        num_computed_tokens = library_add(self, seq_id, token_ids, max_tokens, **identity)
        self.pool.free_blocks(hits)
        return num_computed_tokens

    cache.add = add
