"""What is found needs no new block, so it is left out of the need.

A hit that nobody uses waits in the free queue, and leaves it when it is touched. "2 new blocks, 3
are free" is a yes to a request that then finds 1 block free: the check that was first proposed in
vllm-project/vllm#11562.
"""

SYMPTOM = "the need is 2, and 4 blocks leave the free queue"
KILLED_BY = (
    "test_single_type.py::test_free_hits_are_counted_and_hits_in_use_are_not",
    "test_single_type.py::test_null_blocks_among_hits_cost_nothing",
)


def apply(stage):
    group = stage.SingleTypeKVCacheManager
    library_need = group.get_num_blocks_to_allocate

    def get_num_blocks_to_allocate(
        self, request_id, num_tokens, hits, total_computed_tokens, num_main, **options
    ):
        need = library_need(
            self, request_id, num_tokens, hits, total_computed_tokens, num_main, **options
        )
        num_skipped_blocks = self.get_num_skipped_tokens(total_computed_tokens) // self.block_size
        in_reach = hits[max(num_skipped_blocks, 0) :]
        return need - sum(block.ref_cnt == 0 and not block.is_null for block in in_reach)

    group.get_num_blocks_to_allocate = get_num_blocks_to_allocate
