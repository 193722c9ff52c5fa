"""Blocks are registered although their K and V are still being loaded from elsewhere.

Another request finds them and computes on what the memory held before. And a transfer can fail;
then the digests stay, and the cache is wrong without a word: vllm-project/vllm#19329.
"""

SYMPTOM = "tokens can be found that have not arrived"
KILLED_BY = ("test_allocate_slots.py::test_delayed_blocks_are_registered_later",)


def apply(stage):
    manager = stage.KVCacheManager
    library_allocate_slots = manager.allocate_slots

    def allocate_slots(self, request, num_new_tokens, *, delay_cache_blocks=False, **options):
        return library_allocate_slots(self, request, num_new_tokens, **options)

    manager.allocate_slots = allocate_slots
