"""A block is used again, and the map goes on leading to it.

The block itself forgets its digest, so it looks like new. But the entry stays, and whoever asks for
the old prompt gets the block that holds another one by now: GeeeekExplorer/nano-vllm#163.
"""

SYMPTOM = "a prompt that was seen before is answered from blocks that hold other tokens"
KILLED_BY = (
    "test_pool_cache.py::test_a_block_that_is_used_again_is_forgotten",
    "test_register_and_find.py::test_x_is_not_found_in_blocks_of_y",
    "test_register_and_find.py::test_the_map_never_outgrows_the_pool[2000]",
)


def apply(stage):
    def _evict(self, blocks):
        for block in blocks:
            block.block_hash = None
        self.num_evictions += len(blocks)

    stage.BlockPool._evict = _evict
