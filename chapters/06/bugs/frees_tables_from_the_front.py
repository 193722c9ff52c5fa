"""A table is given back from its beginning to its end.

The block that is freed first is taken first. So one new block takes the first block of a finished
prompt, and the rest of it, still there, can't be found any more. In the field the blocks of a
request had one age, and chance decided: llm-d/llm-d-inference-sim#704.
"""

SYMPTOM = "one block of a finished prompt is evicted, and none of it is found again"
KILLED_BY = (
    "test_single_type.py::test_the_last_block_is_freed_first",
    "test_manager.py::test_the_end_of_the_chain_goes_first",
)


def apply(stage):
    group = stage.SingleTypeKVCacheManager
    library_free = group.free

    def free(self, request_id):
        self.req_to_blocks.get(request_id, []).reverse()  # and the library turns it back
        library_free(self, request_id)

    group.free = free
