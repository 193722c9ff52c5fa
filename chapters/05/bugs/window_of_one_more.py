"""A window of W covers W + 1 keys.

Some libraries count the keys to the left of the query, others count the query, too; a W that is
handed on unchanged covers one key more: vllm-project/vllm#3385. In decode the plan begins at the
right key and hides the mistake; prefill shows it.
"""

from pagedattn.course.rewrite import rewrite

SYMPTOM = "in prefill a window of 4 lets a query see 5 keys"
KILLED_BY = (
    "test_attention_numerics.py::test_which_keys_a_window_covers[4-36-prefill]",
    "test_attention_numerics.py::test_windows[1-prefill-torch.float32]",
)


def apply(stage):
    rewrite(
        stage,
        "attend._walk",
        "keys[None, :] > positions[:, None] - window",
        "keys[None, :] >= positions[:, None] - window",
    )
