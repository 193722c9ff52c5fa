"""Any order of the verbs, with hits, evictions, salts, resets and refusals among them.

Prompts are drawn from a few common beginnings, and tokens that follow from an alphabet of two, so
that sequences meet again. After each step the invariants are checked, every sequence must find what
was stored for it, bit by bit, and outputs equal attention without a cache in float64.

How much is found is compared with a list of all beginnings that were ever computed: never more than
is in it; at least what sequences in the cache hold; and exactly as much, as long as nothing was
evicted.
"""

from functools import partial
from types import ModuleType
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from pagedattn.cache import OutOfBlocks
from pagedattn.course.schedule import ForkingSchedule, run_schedules

BLOCK_SIZE = 2
BEGINNINGS = ([7] * 9, [7, 7, 7, 7, 8, 8, 8, 8, 8], [9, 8, 7, 6, 5, 4, 3, 2, 1])
tails = st.lists(st.integers(7, 8), min_size=1, max_size=3)
prompts = st.builds(
    lambda beginning, length, tail: beginning[:length] + tail,
    st.sampled_from(BEGINNINGS),
    st.integers(0, 9),
    tails,
)
salts = st.sampled_from([None, "us"])


class PrefixSchedule(ForkingSchedule):
    """The schedule of chapter 03 with what this chapter adds."""

    options: ClassVar = {
        "block_size": BLOCK_SIZE,
        "num_blocks": 16,
        "max_seq_len": 12,
        "max_num_seqs": 5,
    }

    def __init__(self, stage: ModuleType) -> None:
        super().__init__(stage)
        self.cache = self.witness.cache
        self.computed: set[tuple[str | None, tuple[int, ...]]] = set()  # beginnings, by salt
        self.num_evictions = 0  # until the last reset

    # How much must be found, and how much may be.

    def beginnings(self, seq_id: int) -> set[tuple[str | None, tuple[int, ...]]]:
        """Those of whole blocks that a sequence has computed."""
        history = self.witness.histories[seq_id]
        ends = range(BLOCK_SIZE, history.num_computed + 1, BLOCK_SIZE)
        return {(history.salt, tuple(history.token_ids[:end])) for end in ends}

    def check_hit(self, prompt: list[int], salt: str | None, hit: int) -> None:
        ends = range(BLOCK_SIZE, len(prompt), BLOCK_SIZE)
        names = [(end, (salt, tuple(prompt[:end]))) for end in ends]
        held = {name for seq_id in self.seq_ids for name in self.beginnings(seq_id)}
        least = max((end for end, name in names if name in held), default=0)
        most = max((end for end, name in names if name in self.computed), default=0)
        if self.cache.pool.num_evictions == self.num_evictions:
            least = most
        assert least <= hit <= most and hit % BLOCK_SIZE == 0, (
            f"{prompt} with salt {salt}: {hit} tokens are found, expected {least} to {most}; "
            f"{self.witness!r}"
        )

    # The verbs, with tokens that others may have, too.

    def begin(self, prompt: list[int], salt: str | None) -> int:
        before = self.witness.snapshot()
        expected = self.cache.need(prompt, 0, salt=salt)
        self.witness.assert_unchanged(before, "need")
        free, seq_id = self.cache.pool.num_free_blocks, len(self.limits)
        hit = self.witness.add(seq_id, prompt, salt=salt)
        taken = free - self.cache.pool.num_free_blocks
        self.limits.append(12)
        assert (hit, taken) == expected, f"need said {expected}, add {hit, taken}"
        self.check_hit(prompt, salt, hit)
        return seq_id

    @precondition(ForkingSchedule.has_room)
    @rule(prompt=prompts, salt=salts)
    def add(self, prompt: list[int], salt: str | None) -> None:
        self.begin(prompt, salt)

    @precondition(ForkingSchedule.has_room)
    @rule(prompt=prompts, salt=salts, data=st.data())
    def add_and_reserve(self, prompt: list[int], salt: str | None, data: st.DataObject) -> None:
        hit, _ = self.cache.need(prompt, 1, salt=salt)
        n = data.draw(st.integers(1, len(prompt) - hit))
        _, needed = self.cache.need(prompt, n, salt=salt)
        free = self.cache.pool.num_free_blocks
        seq_id = self.begin(prompt, salt)
        try:
            self.batch = self.witness.reserve({seq_id: n})
        except OutOfBlocks:
            assert needed > free, f"need said {needed}, {free} were free: {self.witness!r}"
        else:
            taken = free - self.cache.pool.num_free_blocks
            assert taken == needed, f"need said {needed}, {taken} were taken: {self.witness!r}"
        self.attended.clear()

    @precondition(ForkingSchedule.has_sequences)
    @rule(data=st.data(), tokens=tails)
    def append(self, data: st.DataObject, tokens: list[int]) -> None:
        seq_id = data.draw(st.sampled_from(self.seq_ids))
        self.witness.append(seq_id, tokens[: self.limits[seq_id] - self.known(seq_id)])

    @precondition(ForkingSchedule.has_waiting)
    @rule()
    def compute_all(self) -> None:
        """A whole step of all that wait, as far as the pool goes."""
        counts = {s: self.witness.waiting(s) for s in self.waiting}
        self.attended.clear()
        while counts:
            try:
                self.batch = self.witness.reserve(counts)
            except OutOfBlocks:
                counts.popitem()
            else:
                self.commit()
                return

    @precondition(ForkingSchedule.has_sequences)
    @rule(prompt=prompts, data=st.data())
    def refused(self, prompt: list[int], data: st.DataObject) -> None:
        taken = data.draw(st.sampled_from(self.seq_ids))
        wrong: dict[str, Any] = data.draw(st.sampled_from([{"salt": 7}, {"extra_keys": "us"}]))
        before = self.witness.snapshot()
        for verb, *arguments in (
            (self.cache.add, taken, prompt),
            (partial(self.cache.add, **wrong), "new", prompt),
            (partial(self.cache.need, **wrong), prompt, 1),
        ):
            with pytest.raises(ValueError):
                verb(*arguments)
        self.witness.assert_unchanged(before, "what was refused")

    def much_can_be_found(self) -> bool:
        return self.cache.pool.num_cached_blocks > 6

    @precondition(much_can_be_found)
    @rule()
    def reset(self) -> None:
        before = self.witness.snapshot()
        if self.batch is not None or any(map(self.cache.block_ids, self.seq_ids)):
            with pytest.raises(ValueError):
                self.cache.reset_prefix_cache()
            self.witness.assert_unchanged(before, "a refused reset")
        else:
            self.cache.reset_prefix_cache()
            self.computed.clear()
            self.num_evictions = self.cache.pool.num_evictions

    @invariant()
    def what_is_computed_can_be_found(self) -> None:
        """Every full block carries the digest of its own tokens and of all before them."""
        for seq_id, history in self.witness.histories.items():
            self.computed |= self.beginnings(seq_id)
            computed = history.token_ids[: history.num_computed]
            expected = self.cache.hasher.hash_blocks(computed, salt=history.salt)
            blocks = [self.cache.pool.blocks[i] for i in self.cache.block_ids(seq_id)]
            found = [block.block_hash for block in blocks[: len(expected)]]
            assert found == expected, f"a digest of sequence {seq_id!r} is wrong: {self.witness!r}"


def test_any_schedule_with_hits(stage: ModuleType, request: pytest.FixtureRequest) -> None:
    """200 runs of 40 steps."""
    run_schedules(PrefixSchedule, request, 200, 40)


@pytest.mark.slow
def test_very_many_schedules_with_hits(stage: ModuleType, request: pytest.FixtureRequest) -> None:
    """2000 runs of 40 steps."""
    run_schedules(PrefixSchedule, request, 2000, 40)
