"""What the splits found is merged as if each had found the same.

Each split has divided by its own sum of exponentials, so its output is a mean over its own keys.
The mean of means is right only where the sums are equal. A split weighs what its sum weighs.
"""

from pagedattn.course.rewrite import rewrite

SYMPTOM = "a split full of keys that hardly count pulls the answer towards them"
KILLED_BY = (
    "test_paged_attention.py::test_every_kind_of_batch[decode of several splits-torch.float32]",
    "test_attention_numerics.py::test_a_sink_counts_once[300]",
)


def apply(stage):
    rewrite(
        stage,
        "parts._add_parts",
        "weights = tl.exp2(part - base[None, :])",
        'weights = tl.where(part > float("-inf"), 1.0, 0.0)',
    )
