"""How many blocks are full is judged by the tokens that are known, not by those that are computed.

A prompt that is computed in chunks is known from the start. After its first chunk its last block so
far is registered under the digest of tokens that are not in it yet. In the field attention was told
the length of the whole prompt instead of the end of the chunk: GeeeekExplorer/nano-vllm#212.
"""

SYMPTOM = "a block of a prompt in chunks is found before it is full"
KILLED_BY = (
    "test_prefix_cache.py::test_a_prompt_in_chunks_is_registered_block_by_block",
    "test_prefix_cache.py::test_an_aborted_chunk_is_not_found",
)


def apply(stage):
    cache = stage.PagedKVCache
    library_commit = super(cache, cache)._commit

    def _commit(self, batch):
        library_commit(self, batch)
        for seq_id in batch.num_new_tokens:
            sequence = self.sequences[seq_id]
            self._hash_full_blocks(sequence)
            known = min(len(sequence.block_hashes), len(sequence.blocks))
            cached = sum(block.block_hash is not None for block in sequence.blocks)
            self.pool.cache_full_blocks(sequence.blocks, sequence.block_hashes, cached, known)

    cache._commit = _commit
