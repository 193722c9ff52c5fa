"""Every split adds the sink to its own sum, and the merge adds it once more.

A sink is a score without a value. It belongs to the row, not to its parts: with more splits it
takes more weight, so the answer depends on how the work was cut: ROCm/rocm-libraries#12227.
"""

from pagedattn.course.rewrite import rewrite

SYMPTOM = "a sink and a key of equal score share 1/3 to 2/3, not half and half"
KILLED_BY = (
    "test_attention_numerics.py::test_a_sink_counts_once[300]",
    "test_attention_numerics.py::test_sinks[splits-torch.float32]",
)


def apply(stage):
    rewrite(
        stage,
        "attend.attend_kernel",
        "        divisor = tl.where(row_sum > 0",
        "        if sinks is not None:\n"
        "            sink = tl.load(sinks + heads, mask=real, other=0.0) * LOG2E\n"
        "            row_sum += tl.where(row_sum > 0, tl.exp2(sink - row_max), 0.0)\n"
        "        divisor = tl.where(row_sum > 0",
    )
