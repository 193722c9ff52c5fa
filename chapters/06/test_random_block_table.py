"""Any operations on a block table in any order, against plain lists of the manager's ids."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from pagedattn.course.witness import DEVICE

BLOCK_SIZE, KERNEL_BLOCK_SIZE, BLOCKS, SEQS = 6, 2, 4, 4
row_numbers = st.integers(0, SEQS - 1)
ids = st.lists(st.integers(1, 99), max_size=BLOCKS + 1)


class Tables(RuleBasedStateMachine):
    """A table beside the rows that it should have, here and on the device."""

    def __init__(self, stage):
        super().__init__()
        self.table = stage.BlockTable(
            SEQS, BLOCKS, BLOCK_SIZE, 30, kernel_block_size=KERNEL_BLOCK_SIZE, device=DEVICE
        )
        self.rows = [[] for _ in range(SEQS)]
        self.committed = [[] for _ in range(SEQS)]

    @rule(block_ids=ids, row=row_numbers)
    def append(self, block_ids, row):
        self.put(self.table.append_row, block_ids, row, self.rows[row] + block_ids)

    @rule(block_ids=ids, row=row_numbers)
    def add(self, block_ids, row):
        self.put(self.table.add_row, block_ids, row, block_ids)

    def put(self, verb, block_ids, row, expected):
        if len(expected) > BLOCKS:
            with pytest.raises(ValueError):
                verb(block_ids, row)
        else:
            verb(block_ids, row)
            self.rows[row] = expected

    @rule(row=row_numbers)
    def clear_row(self, row):
        self.table.clear_row(row)
        self.rows[row] = []

    @rule(source=row_numbers, destination=row_numbers)
    def move(self, source, destination):
        self.table.move_row(source, destination)
        self.rows[destination] = self.rows[source]

    @rule(row=row_numbers, other=row_numbers)
    def swap(self, row, other):
        self.table.swap_row(row, other)
        self.rows[row], self.rows[other] = self.rows[other], self.rows[row]

    @rule(num_seqs=st.integers(0, SEQS))
    def commit(self, num_seqs):
        self.table.commit_block_table(num_seqs)
        self.committed[:num_seqs] = self.rows[:num_seqs]

    @rule()
    def clear(self):
        self.table.clear()
        self.rows, self.committed = [[] for _ in range(SEQS)], [[] for _ in range(SEQS)]

    @rule(data=st.data())
    def slots(self, data):
        """Random tokens of the committed rows; those without a block are not asked for."""
        starts, positions, expected = [0], [], []
        for block_ids in self.committed:
            end = len(block_ids) * BLOCK_SIZE
            tokens = st.lists(st.integers(0, end - 1), max_size=4)
            chosen = data.draw(tokens) if end else []
            positions += chosen
            expected += [block_ids[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in chosen]
            starts.append(len(positions))
        found = self.table.compute_slot_mapping(
            SEQS,
            torch.tensor(starts, dtype=torch.int32, device=DEVICE),
            torch.tensor(positions, dtype=torch.int64, device=DEVICE),
        )
        assert found.tolist() == expected + [-1] * (30 - len(expected))

    @invariant()
    def tables_agree(self):
        ratio = BLOCK_SIZE // KERNEL_BLOCK_SIZE
        for found, rows in (
            (self.table.table, self.rows),
            (self.table.device_table, self.committed),
        ):
            expected = [[b * ratio + i for b in row for i in range(ratio)] for row in rows]
            padded = [row + [0] * (BLOCKS * ratio - len(row)) for row in expected]
            assert found.tolist() == padded
        assert list(self.table.num_blocks) == [len(row) * ratio for row in self.rows]


def test_any_operations(stage):
    run_state_machine_as_test(
        lambda: Tables(stage), settings=settings(max_examples=40, stateful_step_count=25)
    )
