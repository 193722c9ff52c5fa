"""A chunk of a prompt looks at slots that are not written yet.

The number of keys was the length of the whole prompt, not the end of the chunk. What lies behind
the chunk is whatever a former sequence left there: the answer is wrong in a way that depends on who
was served before. GeeeekExplorer/nano-vllm#212.
"""

from typing import Any

import torch

SYMPTOM = "the first chunk of 4 of a prompt of 10 tokens looks at 10 keys"
KILLED_BY = (
    "test_verbs.py::test_a_chunk_sees_no_slot_behind_it",
    "test_verbs.py::test_chunks_give_the_same_outputs[3]",
)


def apply(stage: Any) -> None:
    attend = stage.ContiguousKVCache._attend

    def _attend(self, batch, layer, q, k, v):
        seq_lens = batch.seq_lens
        batch.seq_lens = torch.tensor([self.num_tokens(seq_id) for seq_id in batch.seq_ids])
        out = attend(self, batch, layer, q, k, v)
        batch.seq_lens = seq_lens
        return out

    stage.ContiguousKVCache._attend = _attend
