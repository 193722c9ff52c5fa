"""The adapter does not enter the digest.

An adapter changes the weights, and with them K and V of every token. Two requests with one prompt
and different adapters then share blocks that only one of them could have computed:
vllm-project/vllm#3264.
"""

SYMPTOM = "an adapter goes on with K and V that another adapter made"
KILLED_BY = (
    "test_extra_keys.py::test_every_adapter_has_digests_of_its_own",
    "test_extra_keys.py::test_an_adapter_enters_every_block",
    "test_hashing.py::test_digests_with_every_extra_key_by_hand",
)


def apply(stage):
    library_extra_bytes = stage.BlockHasher._extra_bytes

    def _extra_bytes(self, index, salt, extra_keys):
        keys = extra_keys or stage.ExtraKeys()
        without = stage.ExtraKeys(None, keys.images, keys.prompt_embeds)
        return library_extra_bytes(self, index, salt, without)

    stage.BlockHasher._extra_bytes = _extra_bytes
