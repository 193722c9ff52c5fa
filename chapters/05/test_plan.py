"""The plan of a step: every query meets every key that it sees once, and nothing is too long."""

import copy
import pickle
from collections import Counter

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagedattn.attention import AttentionSpec, visible_keys
from pagedattn.course.witness import DEVICE

on_a_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


def int32(numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def starts(query_lens):
    return int32([sum(query_lens[:i]) for i in range(len(query_lens) + 1)])


def plan_of(stage, seq_lens, query_lens, *, group=1, num_kv_heads=1, window=None, **sizes):
    """A plan of just these sizes, or of larger ones."""
    rows, tokens = sizes.get("max_rows", len(seq_lens)), sizes.get("max_tokens", sum(query_lens))
    plan = stage.new_plan(
        rows, tokens, group * num_kv_heads, num_kv_heads, 8,
        dtype=torch.float32, window=window, device=DEVICE,
    )  # fmt: skip
    stage.plan_attention(plan, int32(seq_lens), starts(query_lens))
    return plan


def items_of(plan):
    """The decode items and the prefill items, those that are there: lists of 8 numbers."""
    num_decode, num_prefill = plan.num_items.tolist()
    assert num_decode <= len(plan.decode_items), "more splits than the buffer has room for"
    assert num_prefill <= len(plan.prefill_items), "more tiles than the buffer has room for"
    return plan.decode_items[:num_decode].tolist(), plan.prefill_items[:num_prefill].tolist()


def check_pairs(plan, seq_lens, query_lens, window):
    """Every (row, query, key) of the batch that is to be seen, exactly once; no key outside."""
    spec = AttentionSpec(window=window)
    met, tokens = Counter(), Counter()
    first_tokens = starts(query_lens).tolist()
    decode, prefill = items_of(plan)
    for row, token, queries, position, begin, end, *_ in decode + prefill:
        assert 0 <= begin <= end <= seq_lens[row], f"keys {begin} to {end} of {seq_lens[row]}"
        assert queries > 0, "an item without work"
        query = token - first_tokens[row]
        assert 0 <= query <= query_lens[row] - queries, "a token of another row"
        assert position == seq_lens[row] - query_lens[row] + query, "its position"
        tokens.update((row, query + i) for i in range(queries))
        met.update((row, query + i, key) for i in range(queries) for key in range(begin, end))
    for row, (seq_len, query_len) in enumerate(zip(seq_lens, query_lens, strict=True)):
        for query, keys in enumerate(visible_keys(query_len, seq_len, spec).tolist()):
            assert tokens[row, query], f"row {row}: nobody writes the output of query {query}"
            for key, seen in enumerate(keys):
                times = met[row, query, key]
                assert times == 1 or (times == 0 and not seen), (
                    f"row {row} of {seq_len} tokens, query {query} of {query_len}, key {key}: "
                    f"{times} items, the key is {'' if seen else 'not '}to be seen; window {window}"
                )


def check_splits(plan, split_keys):
    """Splits of a row stand together, and none is longer than its share of all keys."""
    decode, prefill = items_of(plan)
    all_keys = sum(end - begin for *_, begin, end, _, _ in decode)
    share = -(-all_keys // plan.target_splits)
    longest = max(1, -(-share // split_keys)) * split_keys
    for number, (*_, begin, end, num_splits, first) in enumerate(decode):
        assert end - begin <= longest, (
            f"a split of {end - begin} keys; all {all_keys} in {plan.target_splits} parts, rounded "
            f"up to {split_keys}, are {longest}"
        )
        assert first <= number < first + num_splits
        assert decode[first][0] == decode[first + num_splits - 1][0] == decode[number][0]
    assert all(item[6:] == [1, 0] for item in prefill)
    assert not plan.arrivals.any()


@settings(max_examples=20)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 300), st.sampled_from([0, 1, 1, 2, 7, 16, 17, 40])),
        min_size=1,
        max_size=6,
    ),
    window=st.none() | st.integers(1, 200),
    group=st.sampled_from([1, 2, 3, 7, 20]),
    programs=st.sampled_from([1, 4, 16]),
)
@example(rows=[(0, 1)], window=None, group=1, programs=4)  # no cached token
@example(rows=[(299, 1)] * 6, window=None, group=1, programs=16)  # alike
@example(rows=[(300, 1), (0, 1), (0, 1), (5, 0)], window=None, group=1, programs=16)  # unlike
def test_every_pair_once(stage, rows, window, group, programs):
    seq_lens, query_lens = [old + new for old, new in rows], [new for _, new in rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage.plan, "PROGRAMS", programs)
        plan = plan_of(stage, seq_lens, query_lens, window=window, group=group)
    check_pairs(plan, seq_lens, query_lens, window)
    check_splits(plan, stage.plan.SPLIT_KEYS)


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("query_lens", [[4, 1], [40, 40]], ids=["decode", "prefill"])
def test_more_queries_than_keys(stage, query_lens, window):
    seq_lens = [2, 0]
    plan = plan_of(stage, seq_lens, query_lens, window=window)
    decode, prefill = items_of(plan)
    for row, _, _, _, begin, end, *_ in decode + prefill:
        assert 0 <= begin <= end <= seq_lens[row]
    tokens = [token + i for _, token, queries, *_ in decode + prefill for i in range(queries)]
    assert sorted(tokens) == list(range(sum(query_lens))), "queries that see nothing give 0"


def test_a_long_row_is_cut_and_short_ones_are_not(stage, monkeypatch):
    """1000 + 20 + 1 keys in 8 parts are 128 each: a long row of 8 splits, two of one."""
    monkeypatch.setattr(stage.plan, "PROGRAMS", 8 if DEVICE == "cpu" else 1)
    plan = plan_of(stage, [1000, 20, 1], [1, 1, 1])
    splits = Counter(item[0] for item in items_of(plan)[0])
    if DEVICE == "cpu":  # a GPU has more than 8 multiprocessors
        assert splits == {0: 8, 1: 1, 2: 1}
    assert splits[0] >= 8 and splits[1] == splits[2] == 1


def test_the_longest_tile_comes_first(stage):
    """A program that begins last should have little to do."""
    _, prefill = items_of(plan_of(stage, [100], [100]))
    lengths = [end - begin for _, _, _, _, begin, end, *_ in prefill]
    assert len(lengths) > 1 and lengths == sorted(lengths, reverse=True)


def test_a_step_without_rows(stage):
    plan = plan_of(stage, [], [])
    assert items_of(plan) == ([], [])
    plan = plan_of(stage, [30, 9], [1, 9])
    stage.plan_attention(plan, int32([]), int32([0]))
    assert items_of(plan) == ([], [])


@on_a_gpu  # the interpreter takes minutes for so many programs
def test_more_rows_than_a_program_looks_at_together(stage):
    """1030 rows: each must find its place among those of the last few, too."""
    seq_lens, query_lens = [3] * 1030, [1] * 1030
    seq_lens[1027:], query_lens[1026:] = [200, 5, 40], [0, 1, 1, 40]
    plan = plan_of(stage, seq_lens, query_lens)
    decode, prefill = items_of(plan)
    assert sorted({item[0] for item in decode}) == [*range(1026), 1027, 1028]
    assert {item[0] for item in prefill} == {1029}
    check_splits(plan, stage.plan.SPLIT_KEYS)


@pytest.mark.parametrize("query_lens", [[1] * 12, [20] * 12], ids=["decode", "prefill"])
def test_a_smaller_batch_in_the_same_buffers(stage, query_lens):
    """What an earlier, larger step left behind the last item is no item of this one."""
    plan = plan_of(stage, [150] * 12, query_lens, max_rows=16, max_tokens=300)
    assert sum(plan.num_items.tolist()) >= 12
    for buffer in (plan.decode_items, plan.prefill_items, plan.num_items, plan.arrivals):
        buffer.fill_(2**30)
    stage.plan_attention(plan, int32([7, 90, 30]), starts([1, 0, 20]))
    decode, prefill = items_of(plan)
    assert [item[:6] for item in decode] == [[0, 0, 1, 6, 0, 7]]
    assert {item[0] for item in prefill} == {2}
    assert not plan.arrivals.any(), "of all rows that there could be"
    check_pairs(plan, [7, 90, 30], [1, 0, 20], None)


def test_fewer_rows_in_buffers_of_16(stage, make_batch):
    """12 rows, then 3 in the same fixed buffers, the others without tokens: rows 3 to 15 do
    nothing, though their lengths and tables are still there (flashinfer-ai/flashinfer#4002,
    GeeeekExplorer/nano-vllm#106)."""
    batch = make_batch([70, 9, 200, *[30] * 9, 0, 0, 0, 0], [1] * 12 + [0] * 4)
    plan = stage.new_plan(16, 12, 4, 2, 16, dtype=batch.q.dtype, device=DEVICE)
    stage.plan_attention(plan, batch.seq_lens, batch.query_start_loc)
    batch.check(stage, plan=plan)
    narrow(batch, [5, 9, 130])
    plan.partial_out.fill_(float("nan"))
    plan.partial_lse.fill_(float("nan"))
    stage.plan_attention(plan, batch.seq_lens, batch.query_start_loc)
    out, lse = batch.run(stage, plan=plan)
    assert (out[3:] == 7).all() and (lse[3:] == 7).all(), "only the rows of this step are written"
    batch.check(stage, plan=plan)


def narrow(batch, seq_lens):
    """The batch's first rows, shorter, in the same tensors; the others have no tokens now. What
    they held is somebody else's: NaN. Tables and lengths stay."""
    num_rows = len(seq_lens)
    for row, length in enumerate(batch.seq_lens.tolist()):
        kept = seq_lens[row] if row < num_rows else 0
        for position in range(kept, length):
            block = batch.block_table[row, position // 4].long()
            batch.k_cache[block, position % 4] = batch.v_cache[block, position % 4] = float("nan")
        batch.keys[row], batch.values[row] = batch.keys[row][:kept], batch.values[row][:kept]
    batch.seq_lens[:num_rows] = int32(seq_lens)
    batch.query_start_loc.clamp_(max=num_rows)


def test_the_plan_is_made_once_and_read_by_many_layers(stage, make_batch):
    """A split that was counted is not counted in the next layer."""
    batch = make_batch([300, 7], [1, 1], num_heads=2, num_kv_heads=1)
    plan = stage.new_plan(2, 2, 2, 1, 16, dtype=batch.q.dtype, device=DEVICE)
    stage.plan_attention(plan, batch.seq_lens, batch.query_start_loc)
    for _ in range(3):
        batch.check(stage, plan=plan)


@on_a_gpu
def test_a_captured_graph_stays_right(stage, make_batch):
    """Lengths, tables and numbers change under the graph; rows become padding."""
    batch = make_batch([900, 9, 5000, *[30] * 9, 0, 0, 0, 0], [1] * 12 + [0] * 4)
    plan = stage.new_plan(16, 12, 4, 2, 16, dtype=batch.q.dtype, has_prefill=False, device=DEVICE)
    out, lse = torch.full_like(batch.q, 7.0), torch.full((12, 4), 7.0, device=DEVICE)

    def step():
        stage.plan_attention(plan, batch.seq_lens, batch.query_start_loc)
        stage.paged_attention(
            batch.q, batch.k_cache, batch.v_cache, batch.block_table, batch.seq_lens,
            batch.query_start_loc, AttentionSpec(), plan, out=out, lse=lse,
        )  # fmt: skip

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # a call that waited for the device could not be captured
        step()
    for seq_lens in ([900, 9, 4999], [64, 8, 2500], [5, 1, 1]):
        narrow(batch, seq_lens)
        batch.q.normal_()
        out.fill_(7.0)
        graph.replay()
        expected, expected_lse = batch.dense()
        torch.testing.assert_close(out[:3].double(), expected, rtol=0, atol=4e-6)
        torch.testing.assert_close(lse[:3].double(), expected_lse, rtol=0, atol=1e-5)
        assert (out[3:] == 7).all()


def test_a_copy_of_a_plan_works_on_buffers_of_its_own(stage):
    """Also where the first one was used before: what it decided is about its own buffers."""
    plan = plan_of(stage, [5, 40], [1, 1], group=2)
    pool = torch.randn(2, 5, 16, 1, 8, device=DEVICE)
    batch = (
        torch.randn(2, 2, 8, device=DEVICE), *pool, int32([[1, 0, 0], [2, 3, 4]]), int32([5, 40]),
        starts([1, 1]),
    )  # fmt: skip
    expected = stage.paged_attention(*batch, plan=plan)
    for other in (copy.copy(plan), copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert torch.equal(stage.paged_attention(*batch, plan=other), expected)
    plan.num_items.zero_()
    plan.decode_items.zero_()
    assert torch.equal(stage.paged_attention(*batch, plan=other), expected)
