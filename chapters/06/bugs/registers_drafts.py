"""Drafts stand in the token list when slots are given, so the blocks they fill are registered.

The large model then rejects them. The block holds K and V of other tokens soon, and its digest
still names the drafts. How many tokens may be registered while drafts are under way was corrected
in vllm-project/vllm#18668.
"""

SYMPTOM = "a block with two rejected tokens in it can be found"
KILLED_BY = ("test_allocate_slots.py::test_drafts_are_never_registered",)


def apply(stage):
    manager = stage.KVCacheManager
    library_allocate_slots = manager.allocate_slots

    def allocate_slots(self, request, num_new_tokens, **options):
        num_known, num_digests = request.num_tokens, len(request.block_hashes)
        num_computed = request.num_computed_tokens + sum(
            options.get(name, 0)
            for name in ("num_new_computed_tokens", "num_external_computed_tokens")
        )
        request.append([0] * (num_computed + num_new_tokens - num_known))
        try:
            return library_allocate_slots(self, request, num_new_tokens, **options)
        finally:
            del request.token_ids[num_known:], request.block_hashes[num_digests:]

    manager.allocate_slots = allocate_slots
