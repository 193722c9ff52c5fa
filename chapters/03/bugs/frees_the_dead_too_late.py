"""Slots are made ready for a beam's heir while the dead still hold their blocks.

The dead are freed one step later. Until then the heir is not the only owner of the block that it
writes, and it copies what it could have kept. A request whose beams had all ended stayed in the
running set in the same way: vllm-project/vllm#644.
"""

SYMPTOM = "every step of a beam search copies one block too many, and holds blocks of dead beams"
KILLED_BY = (
    "test_beam_step.py::test_a_sole_heir_writes_in_place",
    "test_beam_step.py::test_what_only_the_dead_held_is_free",
)


def apply(stage):
    def replace(self, seq_ids, heirs):
        self._check_no_open_batch("replace")
        self._check_replace(seq_ids, heirs)
        for heir in heirs:
            self.fork(heir.parent, heir.seq_id)
        for heir in heirs:
            self.append(heir.seq_id, [heir.token_id])
        blocks_of_the_dead = [b for s in seq_ids for b in self.sequences[s].blocks]
        self.pool.touch(blocks_of_the_dead)
        for seq_id in seq_ids:
            self.free(seq_id)

    stage.PagedKVCache.replace = replace
