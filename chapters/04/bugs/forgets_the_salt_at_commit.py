"""Salt and adapter are looked at when a sequence begins, and not when its blocks fill.

Blocks of the answer are registered as if anybody had written them. If the prompt was shorter than a
block, that holds for the first one, and the salt protects nothing: a stranger who guesses the words
sees by the time it takes that somebody said them. What salts are for: vllm-project/vllm#16016.
"""

SYMPTOM = "a salted answer is found without its salt, and not found with it"
KILLED_BY = (
    "test_prefix_keys.py::test_generated_tokens_have_the_keys_of_their_prompt[salt]",
    "test_prefix_keys.py::test_generated_tokens_have_the_keys_of_their_prompt[adapter]",
)


def apply(stage):
    library_commit = stage.PagedKVCache._commit

    def _commit(self, batch):
        sequences = [self.sequences[seq_id] for seq_id in batch.num_new_tokens]
        keys = [(sequence.salt, sequence.extra_keys) for sequence in sequences]
        for sequence in sequences:
            sequence.salt = sequence.extra_keys = None
        library_commit(self, batch)
        for sequence, (salt, extra_keys) in zip(sequences, keys, strict=True):
            sequence.salt, sequence.extra_keys = salt, extra_keys

    stage.PagedKVCache._commit = _commit
