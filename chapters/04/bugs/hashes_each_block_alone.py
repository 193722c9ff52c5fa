"""The digest of a block covers its own tokens, and not what stands before them.

K and V of a token depend on all tokens before it. Without the parent, two prompts that agree in
their second block alone exchange it, and even within one prompt equal blocks at different positions
are one. In vLLM blocks with other parents were once told apart by too little, and the second block
of one picture was taken for that of another: vllm-project/vllm#12603.
"""

SYMPTOM = "a block is found behind a beginning that it was not computed for"
KILLED_BY = (
    "test_hashing.py::test_equal_blocks_behind_different_beginnings_differ",
    "test_hashing.py::test_equal_beginnings_and_nothing_else_agree[0]",
    "test_extra_keys.py::test_the_keys_of_the_parent_enter_its_children",
)


def apply(stage):
    chain = stage.hashing.hash_chain

    def hash_chain(parent, contents):
        return [chain(bytes(32), [content])[0] for content in contents]

    stage.hashing.hash_chain = hash_chain
