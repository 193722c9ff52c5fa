"""The parent of a block is what its tokens say; extra keys enter one block's own digest alone.

Two prompts with the same tokens and the same second picture, behind different first ones: the chain
carries on the tokens only, so the second blocks are taken for each other:
vllm-project/vllm#12603.
"""

SYMPTOM = "the second block matches although the first one came from another picture"
KILLED_BY = (
    "test_extra_keys.py::test_the_keys_of_the_parent_enter_its_children",
    "test_extra_keys.py::test_the_salt_enters_the_first_block_and_the_chain_carries_it",
    "test_extra_keys.py::test_digests_agree_only_where_all_is_equal",
)


def apply(stage):
    library_hash_blocks = stage.BlockHasher.hash_blocks

    def hash_blocks(self, token_ids, block_hashes=(), *, salt=None, extra_keys=None):
        by_tokens = library_hash_blocks(self, token_ids)
        digests = []
        for index in range(len(block_hashes), len(by_tokens)):
            parents = by_tokens[:index]
            digests += library_hash_blocks(
                self,
                token_ids[: (index + 1) * self.block_size],
                parents,
                salt=salt,
                extra_keys=extra_keys,
            )
        return digests

    stage.BlockHasher.hash_blocks = hash_blocks
