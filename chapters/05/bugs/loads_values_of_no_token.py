"""Values are loaded without a mask; the weights of slots without a token are 0 anyway.

But 0 times NaN is NaN, and a slot without a token holds whatever was there before:
vllm-project/vllm#641, Dao-AILab/flash-attention#1745. Poisoned keys alone do not show it: their
scores are hidden before they count.
"""

from pagedattn.course.rewrite import rewrite

SYMPTOM = "one NaN in a slot of no token turns a whole answer into NaN"
KILLED_BY = (
    "test_paged_attention.py::test_unused_slots_never_matter[nan-decode-V]",
    "test_paged_attention.py::test_unused_slots_never_matter[nan-prefill-V]",
)


def apply(stage):
    rewrite(
        stage,
        "attend._walk",
        "            v = tl.load(v_at, mask=live[:, None], other=0.0)",
        "            v = tl.load(v_at)",
    )
