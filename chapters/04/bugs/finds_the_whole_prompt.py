"""A prompt that was computed before is found whole, its last token too.

Then no token is left to compute, and there is no query from which the model could tell the next
token. In the field a repeated prompt whose length was a multiple of the block size crashed the
attention with zero queries: GeeeekExplorer/nano-vllm#144.
"""

SYMPTOM = "8 tokens, blocks of 4: the second time 8 are found, and nothing is left to compute"
KILLED_BY = (
    "test_prefix_cache.py::test_whole_blocks_and_never_the_last_token[8-4]",
    "test_prefix_cache.py::test_block_sizes[1-12]",
)


def apply(stage):
    def _find_hits(self, sequence):
        self._hash_full_blocks(sequence)
        return self.pool.find_longest_cache_hit(sequence.block_hashes)

    stage.PagedKVCache._find_hits = _find_hits
