"""Every chain begins with the same 32 bytes.

Then the digests of a server can be computed at home, and whoever finds two texts with one digest
can have one answered from the other's blocks. In vLLM the beginning was Python's hash of a
constant, which is the same in every process from Python 3.12 on: vllm-project/vllm#12621.
"""

SYMPTOM = "two servers that share no secret give one prompt the same digests"
KILLED_BY = (
    "test_hashing.py::test_the_seed_enters",
    "test_hashing.py::test_digests_by_hand",
)


def apply(stage):
    library_init = stage.BlockHasher.__init__

    def __init__(self, block_size, seed=None):
        library_init(self, block_size, seed)
        self.root = bytes(32)

    stage.BlockHasher.__init__ = __init__
