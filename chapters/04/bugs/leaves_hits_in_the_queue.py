"""A hit counts the block, and leaves it in the queue of the free ones.

The block is in use and waits to be handed out at the same time. When it reaches the head, its new
owner writes over what the other still reads. In the field the lock on a hit missed the very node
that was found, so what a running request used could be evicted: sgl-project/mini-sglang#52.
"""

SYMPTOM = "a prompt that was found is overwritten while its owner still reads it"
KILLED_BY = (
    "test_pool_cache.py::test_a_hit_takes_a_free_block_out_of_the_queue",
    "test_pool_cache.py::test_a_free_block_that_two_tables_share_at_once",
)


def apply(stage):
    def touch(self, blocks):
        for block in blocks:
            self._check_usable(block)
            if block.ref_cnt == 0 and block.block_hash is None:
                raise ValueError(f"block {block.block_id} is free")
            block.ref_cnt += 1

    stage.BlockPool.touch = touch
