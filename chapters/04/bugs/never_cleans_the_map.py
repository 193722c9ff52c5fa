"""A lookup sees that an entry is stale, and nobody ever removes it.

The answers are right: an entry counts only if its block still carries the digest. But every block
of every prompt leaves an entry behind. The map grows for as long as the server runs, and lookups
become slower over days: a710128/nanovllm-voxcpm#62.
"""

SYMPTOM = "2000 short prompts through a pool of 8 blocks leave 2000 entries in the map"
KILLED_BY = (
    "test_register_and_find.py::test_the_map_never_outgrows_the_pool[2000]",
    "test_pool_cache.py::test_a_block_that_is_used_again_is_forgotten",
)


def apply(stage):
    def _evict(self, blocks):
        for block in blocks:
            block.block_hash = None
        self.num_evictions += len(blocks)

    def get_cached_block(self, block_hash):
        named = [self.cached_blocks.get(block_hash), *self.duplicates.get(block_hash, ())]
        return next((block for block in named if block and block.block_hash == block_hash), None)

    stage.BlockPool._evict = _evict
    stage.BlockPool.get_cached_block = get_cached_block
