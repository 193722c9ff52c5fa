"""Copy-on-write copies the keys of a shared block, and forgets the values.

The copy then holds the right keys and whatever values its block had before. Attention weighs right
and sums up wrong: the answer of the second beam is fluent nonsense.
"""

SYMPTOM = "after a fork, the one that was copied attends to another sequence's values"
KILLED_BY = (
    "test_copy_blocks.py::test_agrees_with_torch",
    "test_cache.py::test_a_copy_in_every_layer_of_k_and_v",
)


def apply(stage):
    library_copy_blocks = stage.copy_blocks

    def copy_blocks(k_cache, v_cache, sources, destinations):
        library_copy_blocks(k_cache, v_cache.clone(), sources, destinations)

    stage.copy_blocks = stage.cache.copy_blocks = copy_blocks
