"""The last twin of a digest is evicted, and the empty list of twins stays.

Nothing is ever found wrongly, so nobody notices. But each digest that two blocks once carried
leaves an entry behind: equal prompts that arrive together are common, and the map of twins grows
for as long as the server runs, as in a710128/nanovllm-voxcpm#62.
"""

SYMPTOM = "2000 pairs of equal prompts through a pool of 8 blocks leave 2000 empty lists"
KILLED_BY = ("test_register_and_find.py::test_twins_leave_nothing_behind",)


def apply(stage):
    def _evict(self, blocks):
        for block in blocks:
            digest, block.block_hash = block.block_hash, None
            twins = self.duplicates.get(digest, {})
            if self.cached_blocks[digest] is not block:
                del twins[block]
            elif twins:
                self.cached_blocks[digest], _ = twins.popitem(last=False)
            else:
                del self.cached_blocks[digest]
        self.num_evictions += len(blocks)

    stage.BlockPool._evict = _evict
