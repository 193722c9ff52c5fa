"""The name of a picture is squeezed into a number that fits in the place of a token.

Placeholder tokens stand for a picture, so it seemed handy to put a number made from its digest in
their place. There are more pictures than such numbers, and two that meet are one to the cache. The
number had the range of token ids in sgl-project/sglang#2151, and 16 bits in LMCache/LMCache#4086.
"""

SYMPTOM = "a question about one picture is answered about another"
KILLED_BY = (
    "test_extra_keys.py::test_the_whole_identifier_of_an_image_enters",
    "test_extra_keys.py::test_identifiers_and_offsets_do_not_run_together",
)


def squeezed(identifier):
    raw = identifier if isinstance(identifier, bytes) else identifier.encode()
    return str(int.from_bytes(raw, "big") % 2**16)


def apply(stage):
    library_extra_bytes = stage.BlockHasher._extra_bytes

    def _extra_bytes(self, index, salt, extra_keys):
        keys = extra_keys or stage.ExtraKeys()
        images = [
            stage.Image(squeezed(image.identifier), image.offset, image.length)
            for image in keys.images
        ]
        fewer = stage.ExtraKeys(keys.adapter, tuple(images), keys.prompt_embeds)
        return library_extra_bytes(self, index, salt, fewer)

    stage.BlockHasher._extra_bytes = _extra_bytes
