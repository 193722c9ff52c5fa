"""A block is common if as many tables name it as there are requests that run.

A request that waits for its K and V from elsewhere has a table, too. With the one that runs beside
it, its reference makes two, and two run, so the block counts as common, although the second of
these never had it. The kernel then reads it for both. References of requests that do not run
confused this count in vllm-project/vllm#23485 and in vllm-project/vllm#55227.
"""

SYMPTOM = "a shares 8 tokens with c, which waits; b, which shares none, is given them, too"
KILLED_BY = ("test_common_prefix.py::test_who_waits_counts",)


def apply(stage):
    manager = stage.KVCacheManager
    library_allocate_slots = manager.allocate_slots

    def allocate_slots(self, request, num_new_tokens, *, delay_cache_blocks=False, **options):
        for group in self.coordinator.single_type_managers:
            group.waiting = getattr(group, "waiting", set())
            (group.waiting.add if delay_cache_blocks else group.waiting.discard)(request.request_id)
        return library_allocate_slots(
            self, request, num_new_tokens, delay_cache_blocks=delay_cache_blocks, **options
        )

    def get_num_common_prefix_blocks(self, request_id):
        num_running = len(self.req_to_blocks.keys() - self.waiting)
        table = self.req_to_blocks[request_id]
        return next((i for i, b in enumerate(table) if b.ref_cnt != num_running), len(table))

    manager.allocate_slots = allocate_slots
    stage.FullAttentionManager.get_num_common_prefix_blocks = get_num_common_prefix_blocks
