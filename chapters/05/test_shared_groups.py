"""Which rows begin with the same blocks, as the plan finds it in their block tables, and the items
that read those blocks. Groups are worked by hand."""

from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st


@pytest.fixture(autouse=True)
def short_segments(stage, monkeypatch):
    """Segments are multiples of 32 keys, not of 128, and to spare the reading of 32 is enough."""
    monkeypatch.setattr(stage.groups, "SHARED_KEYS", 32)
    monkeypatch.setattr(stage.groups, "SAVED_KEYS", 32)
    monkeypatch.setattr(stage.plan, "SPARED_BYTES", 0)


def shared_items(plan):
    """Each shared item: the row whose table is read, keys, and its members' entries."""
    shared = plan.shared
    num_items = int(shared.num_items)
    assert num_items <= len(shared.items), "more items than the buffer has room for"
    members = shared.members.tolist()
    for row, begin, end, first, count, part in shared.items[:num_items].tolist():
        yield row, begin, end, members[first : first + count], part


def groups_of(plan, batch):
    """The groups: {rows: (leader, first key, end)}, of whatever items read the keys."""
    rows = [row for row, queries in enumerate(batch.query_lens) for _ in range(queries)]
    segments = {}
    for leader, begin, end, _, _ in shared_items(plan):
        found = {
            rows[token]
            for other, first, stop, members, _ in shared_items(plan)
            if (other, first, stop) == (leader, begin, end)
            for token, _, _ in members
        }
        segments.setdefault(tuple(sorted(found)), []).append((leader, begin, end))
    return {
        group: (items[0][0], min(begin for _, begin, _ in items), max(end for *_, end in items))
        for group, items in segments.items()
    }


def check_cover(plan, batch):
    """Each token meets each key of its row in one item, read through a table that has this very
    block there; each part of a token is written once, and all of them are merged."""
    starts, table = batch.query_start_loc.tolist(), batch.block_table.tolist()
    owner = {t: row for row in range(len(table)) for t in range(starts[row], starts[row + 1])}
    block_size = batch.k_cache.shape[1]
    met, written = Counter(), Counter()
    for reader, begin, end, members, part in shared_items(plan):
        for token, position, first_part in members:
            row = owner[token]
            assert position == batch.seq_lens[row] - starts[row + 1] + token
            assert end <= batch.seq_lens[row] - (starts[row + 1] - starts[row]), "not seen by all"
            for key in range(begin, end):
                column = key // block_size
                assert table[reader][column] == table[row][column], f"key {key} of row {row}"
            met.update((token, key) for key in range(begin, end))
            first, num_parts = plan.shared.parts[row].tolist()
            assert first_part == first + (token - starts[row]) * num_parts
            assert part < num_parts
            written[first_part + part] += 1
    assert set(written.values()) <= {1}, "two programs write one part"
    assert max(written, default=0) < len(plan.shared.partial_lse), "a part behind the buffer"
    for row, (_, num_parts) in enumerate(plan.shared.parts.tolist()[: len(table)]):
        for token in range(starts[row], starts[row + 1]) if num_parts else ():
            first = plan.shared.parts[row, 0] + (token - starts[row]) * num_parts
            assert all(written[int(first) + part] for part in range(num_parts)), "never written"
    num_decode, num_prefill = plan.num_items.tolist()
    own = plan.decode_items[:num_decode].tolist() + plan.prefill_items[:num_prefill].tolist()
    for _, token, queries, _, begin, end, *_ in own:
        met.update((token + i, key) for i in range(queries) for key in range(begin, end))
    for token, row in owner.items():
        position = int(batch.seq_lens[row]) - starts[row + 1] + token
        times = [met[token, key] for key in range(position + 1)]
        assert set(times) <= {1}, f"token {token} of row {row} meets its keys {times} times"


def test_two_rows_of_three(stage, make_batch):
    """Rows 0 and 2 have 10 blocks of 4 in common: 32 of those 40 keys are whole multiples of 32."""
    batch = make_batch([50, 60, 45], [1, 1, 1])
    batch.share([0, 2], 10)
    plan = batch.plan(stage)
    assert groups_of(plan, batch) == {(0, 2): (0, 0, 32)}
    check_cover(plan, batch)
    begins = {row: begin for row, _, _, _, begin, *_ in plan.decode_items[:3].tolist()}
    assert begins == {0: 32, 1: 0, 2: 32}
    batch.check(stage, plan=plan)


def test_groups_within_groups(stage, make_batch):
    """Five rows with one system prompt of 64 keys, rows 1 and 3 with a question, too, rows 2 and 4
    with another one."""
    batch = make_batch([200, 170, 130, 180, 110], [1] * 5)
    batch.share([0, 1, 2, 3, 4], 16)
    batch.share([1, 3], 40)
    batch.share([2, 4], 24)
    plan = batch.plan(stage)
    assert groups_of(plan, batch) == {
        (0, 1, 2, 3, 4): (0, 0, 64),
        (1, 3): (1, 64, 160),
        (2, 4): (2, 64, 96),
    }
    check_cover(plan, batch)
    batch.check(stage, plan=plan)


def test_what_all_queries_see(stage, make_batch):
    """Ten blocks are equal, but the three queries of row 1 stand at positions 35 to 37, so only the
    keys before 35 are seen by all: 32. Of row 2 no more than 31 are, and that is no whole tile."""
    batch = make_batch([100, 38, 33], [1, 3, 2])
    batch.share([0, 1], 9)
    batch.share([0, 2], 8)
    plan = batch.plan(stage)
    assert groups_of(plan, batch) == {(0, 1): (0, 0, 32)}
    check_cover(plan, batch)
    batch.check(stage, plan=plan)


def test_twins(stage, make_batch):
    """Two beams that have not parted: every block is the same. The last key stays their own."""
    batch = make_batch([65, 65], [1, 1])
    batch.share([0, 1], 16)
    batch.block_table[1] = batch.block_table[0]
    for contents in (batch.keys, batch.values):
        contents[1] = contents[0]
    plan = batch.plan(stage)
    assert groups_of(plan, batch) == {(0, 1): (0, 0, 64)}
    batch.check(stage, plan=plan)


def test_twins_with_two_queries(stage, make_batch):
    """Both rows are the same 64 tokens. The first queries see 63 keys, so 32 are shared, not 64."""
    batch = make_batch([64, 64], [2, 2])
    batch.share([0, 1], 16)
    assert groups_of(batch.plan(stage), batch) == {(0, 1): (0, 0, 32)}


def test_a_prefix_of_many_blocks(stage, make_batch):
    """130 blocks of one token: more than are compared at a time."""
    batch = make_batch([140, 150], [1, 1], block_size=1)
    batch.share([0, 1], 130)
    plan = batch.plan(stage)
    assert groups_of(plan, batch) == {(0, 1): (0, 0, 128)}
    batch.check(stage, plan=plan)


def test_a_group_that_is_not_worth_it(stage, make_batch, monkeypatch):
    """Three rows share 32 keys and two of them 128. To read 32 keys once, not three times, spares
    64; it takes 100. The two then read all their 128 together, and the third row reads its own."""
    monkeypatch.setattr(stage.groups, "SAVED_KEYS", 100)
    batch = make_batch([140, 150, 160], [1, 1, 1])
    batch.share([0, 1, 2], 8)
    batch.share([0, 2], 32)
    plan = batch.plan(stage)
    assert groups_of(plan, batch) == {(0, 2): (0, 0, 128)}
    check_cover(plan, batch)
    monkeypatch.setattr(stage.groups, "SAVED_KEYS", 129)
    assert groups_of(batch.plan(stage), batch) == {}


def test_more_levels_than_are_kept(stage, make_batch):
    """Row r has 32 (r + 1) keys in common with every row after it: six groups, one in the other.
    The four largest are made, and what the others share each row reads itself."""
    batch = make_batch([230] * 7, [1] * 7)
    for first in range(6):
        batch.share(range(first, 7), 8 * (first + 1))
    plan = batch.plan(stage)
    assert groups_of(plan, batch) == {
        tuple(range(first, 7)): (first, 32 * first, 32 * first + 32) for first in range(4)
    }
    check_cover(plan, batch)
    batch.check(stage, plan=plan)


def test_rows_without_queries_are_in_no_group(stage, make_batch):
    """Padding rows all have tables full of block 0, some with the lengths of an earlier step; and
    one of them has the blocks of row 0."""
    batch = make_batch([70, 70, 70, 70, 80], [1, 0, 0, 0, 1])
    batch.share([0, 3, 4], 16)
    batch.block_table[1:3] = 0
    plan = batch.plan(stage)
    assert groups_of(plan, batch) == {(0, 4): (0, 0, 64)}
    batch.check(stage, plan=plan)


def test_a_row_without_queries_makes_no_group(stage, make_batch):
    batch = make_batch([70, 70], [1, 0])
    batch.share([0, 1], 16)
    assert groups_of(batch.plan(stage), batch) == {}


def test_prefill_rows_are_in_no_group(stage, make_batch):
    batch = make_batch([90, 90, 90, 90], [1, 20, 30, 1])
    batch.share([0, 1, 2, 3], 12)
    plan = batch.plan(stage)
    assert groups_of(plan, batch) == {(0, 3): (0, 0, 32)}
    check_cover(plan, batch)
    batch.check(stage, plan=plan)


def test_blocks_behind_the_length_are_not_compared(stage, make_batch):
    """Row 1 has 34 tokens; behind its nine blocks its table goes on like that of row 0."""
    batch = make_batch([100, 34], [1, 1])
    batch.share([0, 1], 8)
    batch.block_table[1, 9:] = batch.block_table[0, 9:]
    plan = batch.plan(stage)
    assert groups_of(plan, batch) == {(0, 1): (0, 0, 32)}
    batch.check(stage, plan=plan)


def test_equal_blocks_in_other_columns_are_not_shared(stage, make_batch):
    """A block holds keys of given positions: the same blocks one column later are others."""
    batch = make_batch([68, 68], [1, 1])
    batch.block_table[1, 1:17] = batch.block_table[0, :16]
    assert groups_of(batch.plan(stage), batch) == {}


@pytest.mark.parametrize("num_rows", [16, 17])
def test_a_group_of_many_tiles(stage, make_batch, num_rows):
    """Two query heads a KV head: a tile of 32 rows has 16 tokens."""
    batch = make_batch([70] * num_rows, [1] * num_rows, num_heads=2, num_kv_heads=1)
    batch.share(range(num_rows), 16)
    plan = batch.plan(stage)
    assert groups_of(plan, batch) == {tuple(range(num_rows)): (0, 0, 64)}
    tiles = [len(members) for _, _, _, members, _ in shared_items(plan)]
    assert max(tiles) <= plan.shared.tile_tokens and len(tiles) >= num_rows / 16
    batch.check(stage, plan=plan)


@pytest.mark.parametrize("programs", [1, 3, 8])
def test_segments_are_cut_into_splits(stage, make_batch, monkeypatch, programs):
    """Each program of a KV head has about as much to read. 192 keys for 3 rows and 64 for 2."""
    batch = make_batch([200, 270, 210], [1, 1, 1], num_kv_heads=1)
    batch.share([0, 1, 2], 48)
    monkeypatch.setattr(stage.plan, "num_multiprocessors", lambda device: programs)
    plan = batch.plan(stage)
    lengths = sorted(end - begin for _, begin, end, _, _ in shared_items(plan))
    assert lengths == {1: [192], 3: [64] * 3, 8: [32] * 6}[programs]
    check_cover(plan, batch)
    batch.check(stage, plan=plan)


@pytest.mark.parametrize("block_size", [1, 3, 20])
@pytest.mark.parametrize("head_dim", [5, 80])
def test_sizes_that_are_no_powers_of_two(stage, make_batch, block_size, head_dim):
    batch = make_batch([70, 90], [1, 1], block_size=block_size, head_dim=head_dim, gaps=3)
    batch.share([0, 1], 60 // block_size)
    plan = batch.plan(stage)
    assert groups_of(plan, batch) == {(0, 1): (0, 0, 32)}
    batch.check(stage, plan=plan)


@st.composite
def trees(draw):
    """Rows as leaves of a tree of prefixes: for each the lengths, in blocks, that it has in common
    with an earlier row; own tokens; queries; whether it is padding."""
    rows = []
    for number in range(draw(st.integers(2, 7))):
        parent = draw(st.integers(0, number - 1)) if number and draw(st.booleans()) else None
        rows.append(
            (
                parent,
                draw(st.integers(0, 40)),  # blocks in common with the parent, if it has so many
                draw(st.integers(1, 90)),  # tokens of its own
                draw(st.sampled_from([1, 1, 1, 2, 3, 9, 0])),
            )
        )
    return rows, draw(st.permutations(range(len(rows)))), draw(st.integers(0, 2))


@settings(max_examples=10)
@given(tree=trees(), programs=st.sampled_from([1, 3, 8]))
@example(
    tree=([(None, 0, 90, 1), (0, 20, 9, 1), (1, 20, 50, 2), (0, 9, 30, 1)], [2, 0, 3, 1], 2),
    programs=3,
)
def test_any_tree_of_prefixes(stage, make_batch, tree, programs):
    """Rows in any order, padded, with any number of queries."""
    rows, order, num_padding = tree
    own = []
    for parent, blocks, tokens, _ in rows:
        common = 0 if parent is None else min(4 * blocks, own[parent] // 4 * 4)
        own.append(common + tokens)
    place = {row: order.index(row) for row in range(len(rows))}
    seq_lens = [own[row] + rows[row][3] for row in order] + [0] * num_padding
    query_lens = [rows[row][3] for row in order] + [0] * num_padding
    batch = make_batch(seq_lens, query_lens, num_heads=2, num_kv_heads=1, num_padding=num_padding)
    for row, (parent, blocks, *_) in enumerate(rows):
        if parent is not None:
            batch.share([place[parent], place[row]], min(blocks, own[parent] // 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage.plan, "num_multiprocessors", lambda device: programs)
        plan = batch.plan(stage)
    check_cover(plan, batch)
    batch.check(stage, plan=plan)
