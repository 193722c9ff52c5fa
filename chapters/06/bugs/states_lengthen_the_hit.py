"""A state has no block to drop for EAGLE, so it answers with the block behind the candidate.

Full attention drops a block and says 8. Mamba may look one block further, since it will drop one;
it drops none and says 12. The last answer is taken. The hit is 12 tokens, the list of full
attention has 8 of them, and nobody ever computes the other four: vllm-project/vllm#43559.
"""

SYMPTOM = "a hit of 12 tokens with 8 in the list of full attention"
KILLED_BY = ("test_hybrid_hits.py::test_states_never_lengthen_a_hit",)


def apply(stage):
    coordinator = stage.HybridCoordinator
    library_find_longest_cache_hit = coordinator.find_longest_cache_hit
    stage.MambaManager.drops_eagle_block = True

    def find_longest_cache_hit(self, block_hashes, max_length):
        if not self._one_pass_is_enough:
            return library_find_longest_cache_hit(self, block_hashes, max_length)
        found, length = {}, max_length
        for kind in self.kinds:
            drop = kind.drops_eagle_block
            limit = min(length + drop * kind.spec.block_size, max_length)
            found[kind] = self._find(kind, block_hashes, limit, drop_eagle_block=drop)
            length = len(found[kind][0]) * kind.spec.block_size
        return self._cut(found, length), length

    coordinator.find_longest_cache_hit = find_longest_cache_hit
