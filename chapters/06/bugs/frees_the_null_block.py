"""A table is given back as it is, and the null blocks in it with the others.

The null block stands in many tables and is counted in none, so its count is always that of a free
block. It gets into the queue, and the next request writes its tokens where all windows have their
holes. An entry 0 must never mean both "nothing" and a block: tenstorrent/tt-metal#45184.
"""

SYMPTOM = "a request gets block 0"
KILLED_BY = (
    "test_single_type.py::test_more_out_of_reach_than_the_table_has",
    "test_random_manager.py::test_everybody_sees_their_own_tokens[sliding]",
)


def apply(stage):
    group = stage.SingleTypeKVCacheManager
    library_free, library_remove = group.free, group.remove_skipped_blocks

    def queue_null_block(pool):
        if pool.null_block not in list(pool.free_queue):
            pool.free_queue.append(pool.null_block)

    def free(self, request_id):
        has_null = self.pool.null_block in self.req_to_blocks.get(request_id, [])
        library_free(self, request_id)
        if has_null:
            queue_null_block(self.pool)

    def remove_skipped_blocks(self, request_id, total_computed_tokens):
        library_remove(self, request_id, total_computed_tokens)
        if self.pool.null_block in self.req_to_blocks.get(request_id, []):
            queue_null_block(self.pool)

    group.free, group.remove_skipped_blocks = free, remove_skipped_blocks
