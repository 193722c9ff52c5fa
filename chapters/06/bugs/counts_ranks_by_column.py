"""The ranks of decode and of prefill change places in a rank's number.

Writer and reader of a slot must agree who has a token. With one rank of either kind both orders are
the same, and so they are on the first rank and on the last.
"""

SYMPTOM = "with 2 prefill ranks of 2 decode ranks each, the two in the middle swap their tokens"
KILLED_BY = (
    "test_slots.py::test_the_number_of_a_rank",
    "test_slots.py::test_prefill_ranks_deal_as_decode_ranks_do",
)


def apply(stage):
    ranks = stage.ContextParallel
    ranks.rank = property(lambda self: self.dcp_rank * self.pcp_world_size + self.pcp_rank)
