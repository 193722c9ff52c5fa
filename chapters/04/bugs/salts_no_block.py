"""The salt is taken, and enters no block.

Then prompts of different tenants share blocks, and how fast an answer begins tells one of them what
another has asked: vllm-project/vllm#16016. That a tenant hits its own prompts shows nothing: it
would without any salt.
"""

SYMPTOM = "a prompt with another salt is found, and its first token comes at once"
KILLED_BY = (
    "test_extra_keys.py::test_the_salt_enters_the_first_block_and_the_chain_carries_it",
    "test_hashing.py::test_digests_with_every_extra_key_by_hand",
    "test_extra_keys.py::test_digests_agree_only_where_all_is_equal",
)


def apply(stage):
    library_extra_bytes = stage.BlockHasher._extra_bytes

    def _extra_bytes(self, index, salt, extra_keys):
        return library_extra_bytes(self, index, None, extra_keys)

    stage.BlockHasher._extra_bytes = _extra_bytes
