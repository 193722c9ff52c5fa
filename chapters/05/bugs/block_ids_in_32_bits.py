"""A block id times the stride of a block is computed in 32 bits.

Ids come out of the table as 32-bit numbers, and so does the product. A pool of more than 2^31
numbers a layer, 4 GiB in float16, is read at negative offsets: vllm-project/vllm#1486, and
again in another kernel, vllm-project/vllm#47671.
"""

from pagedattn.course.rewrite import rewrite

SYMPTOM = "blocks that begin 2^31 numbers behind the first are read from before the cache"
KILLED_BY = (
    "test_paged_attention.py::test_further_apart_than_32_bits[decode-blocks]",
    "test_paged_attention.py::test_further_apart_than_32_bits[prefill-blocks]",
)


def apply(stage):
    rewrite(
        stage,
        "attend._walk",
        "blocks = blocks.to(tl.int64)",
        "blocks = blocks.to(tl.int32)",
    )
