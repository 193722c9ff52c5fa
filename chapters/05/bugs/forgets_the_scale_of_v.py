"""The scale of an fp8 cache is applied to K and not to V.

Scores need the scale of K, so it is missed at once. The scale of V comes last, when all else is
done, and only makes the output too large or too small: flashinfer-ai/flashinfer#1023.
"""

from pagedattn.course.rewrite import rewrite

SYMPTOM = "with an fp8 cache every output is off by the scale of V"
KILLED_BY = (
    "test_attention_numerics.py::test_fp8_cache[splits-V-True]",
    "test_attention_numerics.py::test_fp8_cache[chunk-both-True]",
)


def apply(stage):
    rewrite(
        stage,
        "attend.attend_kernel",
        "    if v_scale is not None:",
        "    if v_scale is not None and SCALE < 0:",
    )
