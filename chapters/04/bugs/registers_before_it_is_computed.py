"""Blocks are registered when they are handed out, before anything is computed.

If the forward pass never comes, they are found all the same, and hold what was there before. In the
field a request that was dropped before its prefill left its prefix findable and empty:
huggingface/text-generation-inference#2489.
"""

SYMPTOM = "a prompt whose batch was aborted is found, and its blocks hold nothing"
KILLED_BY = (
    "test_prefix_cache.py::test_what_was_never_computed_is_never_found[aborted]",
    "test_prefix_cache.py::test_an_aborted_chunk_is_not_found",
)


def apply(stage):
    cache = stage.PagedKVCache
    library_take, library_commit = cache._take, super(cache, cache)._commit

    def _take(self, num_new_tokens):
        library_take(self, num_new_tokens)
        for seq_id, n in num_new_tokens.items():
            sequence = self.sequences[seq_id]
            self._hash_full_blocks(sequence)
            begin = sequence.num_computed_tokens // self.config.block_size
            end = (sequence.num_computed_tokens + n) // self.config.block_size
            self.pool.cache_full_blocks(sequence.blocks, sequence.block_hashes, begin, end)

    def _commit(self, batch):
        library_commit(self, batch)

    cache._take, cache._commit = _take, _commit
