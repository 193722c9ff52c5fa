"""A block is registered under its digest alone.

The digest names tokens. The blocks of two groups hold K and V of the same tokens in different
layers, so a group of windows finds the block of full attention. In vLLM the key has a type of its
own for this, BlockHashWithGroupId.
"""

SYMPTOM = "a group finds what another one has registered: the right tokens, of the wrong layers"
KILLED_BY = (
    "test_group_pool.py::test_each_group_has_its_own_key",
    "test_random_manager.py::test_everybody_sees_their_own_tokens[full, sliding]",
)


def apply(stage):
    stage.pool.group_suffix = lambda group_id: bytes(4)
