"""What is hidden gets the score -50000, "low enough".

A row whose own scores lie lower gives all its weight to what it must not see, and comes out as the
mean of that: flashinfer-ai/flashinfer#4267. Only minus infinity lies below every number.
"""

from pagedattn.course.rewrite import rewrite

SYMPTOM = "a row whose scores are all below -50000 attends to the keys that are hidden"
KILLED_BY = (
    "test_attention_numerics.py::test_scores_far_below_zero[decode-torch.float32]",
    "test_attention_numerics.py::test_scores_far_below_zero[prefill-torch.float32]",
)


def apply(stage):
    rewrite(
        stage,
        "attend._walk",
        'scores = tl.where(seen, scores, float("-inf"))',
        "scores = tl.where(seen, scores, -50000.0)",
    )
