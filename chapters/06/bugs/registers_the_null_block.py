"""Full blocks get their digests, null blocks among them.

The block of a token that has left the window is null by the time its digest is registered. Then
the digest leads to the null block, and whoever finds it has a table of holes where K and V should
be. Where null blocks can stand in a table, each loop over blocks must know it:
vllm-project/vllm#29272.
"""

SYMPTOM = "the null block has a digest"
KILLED_BY = (
    "test_group_pool.py::test_null_blocks_get_no_digest",
    "test_single_type.py::test_null_blocks_are_counted_and_not_registered",
)


def apply(stage):
    pool_class = stage.BlockPool
    library_cache_full_blocks = pool_class.cache_full_blocks

    def cache_full_blocks(self, request, blocks, num_cached, num_full, block_size, group_id):
        given = request, blocks, num_cached, num_full, block_size, group_id
        library_cache_full_blocks(self, *given)
        digests = stage.block_hashes_of(request, block_size)
        for index in range(num_cached, num_full):
            if blocks[index] is self.null_block:
                key = digests[index] + group_id.to_bytes(4, "big")
                self.null_block.block_hash = key
                self.cached_blocks.setdefault(key, self.null_block)

    pool_class.cache_full_blocks = cache_full_blocks
