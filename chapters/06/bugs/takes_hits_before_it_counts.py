"""The hits are touched first, and then the request is refused.

They are off the free queue and in nobody's table, so nobody gives them back. In the field this went
on until nothing could be scheduled any more: vllm-project/vllm#11562.
"""

SYMPTOM = "every refused request costs the pool the blocks of its hit"
KILLED_BY = (
    "test_allocate_slots.py::test_a_refusal_changes_nothing",
    "test_allocate_slots.py::test_a_hit_in_the_free_queue_counts",
)


def apply(stage):
    manager = stage.KVCacheManager
    library_allocate_slots = manager.allocate_slots

    def allocate_slots(self, request, num_new_tokens, *, new_computed_blocks=None, **options):
        hits = new_computed_blocks.blocks if new_computed_blocks else ()
        for blocks in hits:
            self.pool.touch(blocks)
        new_blocks = library_allocate_slots(
            self, request, num_new_tokens, new_computed_blocks=new_computed_blocks, **options
        )
        if new_blocks is not None:
            for blocks in hits:
                self.pool.free_blocks(blocks)
        return new_blocks

    manager.allocate_slots = allocate_slots
