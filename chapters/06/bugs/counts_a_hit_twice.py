"""A free hit is counted as a block that leaves the queue, and its place as a new block, too.

The other way to get vllm-project/vllm#11562 wrong: whoever makes the check safe by adding hits to
the need must not forget that they also fill the table. The more of a prompt is found, the more
room it seems to need, and a request that fits waits.
"""

SYMPTOM = "12 of 20 tokens are found in free blocks, and the need is 8 blocks instead of 5"
KILLED_BY = (
    "test_single_type.py::test_null_blocks_among_hits_cost_nothing",
    "test_coordinator.py::test_what_is_predicted_is_what_is_taken",
)


def apply(stage):
    group = stage.SingleTypeKVCacheManager
    library_need = group.get_num_blocks_to_allocate

    def get_num_blocks_to_allocate(
        self, request_id, num_tokens, hits, total_computed_tokens, num_main, **options
    ):
        given = request_id, num_tokens, hits, total_computed_tokens, num_main
        num_free_hits = sum(block.ref_cnt == 0 and not block.is_null for block in hits)
        return library_need(self, *given, **options) + num_free_hits

    group.get_num_blocks_to_allocate = get_num_blocks_to_allocate
