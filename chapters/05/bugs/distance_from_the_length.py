"""ALiBi's distance is measured from the length of the sequence, one behind the newest key.

Every score of a row is lower by one slope. A softmax does not notice what all scores have in
common, so the output of one call is right and the mistake lived long: vllm-project/vllm#945. The
log-sum-exp is off by a slope, and with it every merge and every sink.
"""

from pagedattn.course.rewrite import rewrite

SYMPTOM = "with a sink the output is wrong; without one only the log-sum-exp is"
KILLED_BY = (
    "test_attention_numerics.py::test_alibi_by_hand[1]",
    "test_attention_numerics.py::test_alibi_by_hand[3]",
)


def apply(stage):
    rewrite(
        stage,
        "attend._walk",
        "(keys[None, :] - positions[:, None])",
        "(keys[None, :] - positions[:, None] - 1)",
    )
