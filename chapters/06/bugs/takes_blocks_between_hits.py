"""Group by group: the hits are attached, then blocks for external tokens are taken.

Until its turn comes, the hit of the next group is a free block like any other, and the block that
is taken for the first group may be just that one. Then one block stands in two tables:
vllm-project/vllm#43884, vllm-project/vllm#44409.
"""

SYMPTOM = "a block is a hit of the window and holds external tokens of full attention"
KILLED_BY = ("test_coordinator.py::test_no_hit_is_taken_for_tokens_from_outside",)


def apply(stage):
    def allocate_new_computed_blocks(self, request_id, hits, num_local, num_external):
        for group_id, manager in enumerate(self.single_type_managers):
            blocks = hits[group_id] if hits else ()
            num_blocks = manager.allocate_new_computed_blocks(
                request_id, blocks, num_local, num_external
            )
            if num_blocks:
                manager.append_new_blocks(request_id, num_blocks)

    stage.KVCacheCoordinator.allocate_new_computed_blocks = allocate_new_computed_blocks
