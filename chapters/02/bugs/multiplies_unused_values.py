"""The weight of an unused slot is 0, and 0 times NaN is NaN.

The last block of a sequence is rarely full. Hiding the scores of its empty slots gives them weight
0, which looks like enough. But the weights still multiply the values, and whatever the memory held
before counts when it is not finite: vllm-project/vllm#641, and Dao-AILab/flash-attention#1745.
"""

import math

import torch

SYMPTOM = "one NaN left in an unused slot of V turns a whole answer into NaN"
KILLED_BY = (
    "test_paged_attention.py::test_unused_slots_never_matter[nan-decode-V]",
    "test_paged_attention.py::test_unused_slots_never_matter[nan-prefill-both]",
    "test_paged_attention.py::test_the_padding_of_short_rows_never_matters",
)


def apply(stage):
    def paged_attention(q, k_cache, v_cache, block_table, seq_lens, query_start_loc, spec):
        out, starts = torch.zeros_like(q), query_start_loc.tolist()
        group, scale = q.shape[1] // k_cache.shape[2], spec.scale or q.shape[2] ** -0.5
        for row, seq_len in enumerate(seq_lens.tolist()):
            queries = slice(starts[row], starts[row + 1])
            keys = k_cache[block_table[row]].flatten(0, 1).repeat_interleave(group, 1)
            values = v_cache[block_table[row]].flatten(0, 1).repeat_interleave(group, 1)
            slots = torch.arange(len(keys), device=q.device)
            hidden = slots > slots[seq_len - len(q[queries]) : seq_len, None]
            scores = torch.einsum("qhd,khd->hqk", q[queries], keys) * scale
            weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
            out[queries] = torch.einsum("hqk,khd->qhd", weights, values)
        return out

    stage.paged_attention = paged_attention
