"""A beam gets its own next token, and only then its brothers are forked from it.

They inherit the token. The parent of a beam search is not a parent any more once it goes on as one
of its own children: vllm-project/vllm#1101.
"""

SYMPTOM = "three heirs of one beam: the second and third begin with the token of the first"
KILLED_BY = (
    "test_beam_step.py::test_heirs_continue_their_parents",
    "test_beam_step.py::test_no_child_has_the_token_of_another",
)


def apply(stage):
    def replace(self, seq_ids, heirs):
        self._check_no_open_batch("replace")
        self._check_replace(seq_ids, heirs)
        first = {}
        for heir in heirs:
            if heir.parent not in first:
                first[heir.parent] = heir
                if len(self.sequences[heir.parent].token_ids) < self.config.max_seq_len:
                    self.append(heir.parent, [heir.token_id])
            self.fork(heir.parent, heir.seq_id)
        for seq_id in seq_ids:
            self.free(seq_id)

    stage.PagedKVCache.replace = replace
