"""Every refused request costs memory.

The slab is taken before the last check, and the path that refuses does not give it back. Under
load, when requests are refused all the time, the server runs dry. sgl-project/sglang#16067.
"""

from typing import Any

SYMPTOM = "a request that is refused because too many are running keeps its slab for ever"
KILLED_BY = ("test_refusals.py::test_refused_again_and_again",)


def apply(stage: Any) -> None:
    add = stage.ContiguousKVCache.add

    def leaking_add(self, seq_id, token_ids, max_tokens=None):
        try:
            return add(self, seq_id, token_ids, max_tokens)
        except ValueError as refusal:
            if "max_num_seqs" in str(refusal):
                self.arena.take(max_tokens or self.config.max_seq_len)
            raise

    stage.ContiguousKVCache.add = leaking_add
