"""Prefix hits of recorded requests: by hand, against slow models, and published figures.

`data/traces_prefix.json` holds figures of an independent implementation, rates rounded to 6
decimals. Cheap ones are tested always, all with `pytest --slow tests/test_traces_prefix.py`.
"""

import json
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedattn.traces import Request, load_trace
from pagedattn.traces.prefix import VARIANTS, block_ids, infinite_hits, prefix_hits

TESTS = Path(__file__).parent
PUBLISHED = json.loads((TESTS / "data" / "traces_prefix.json").read_text())["traces"]

# By hand. 1536 tokens are 3 full blocks of 512; of 1100, 2 are full.
FIRST = Request(1536, 1, hash_ids=(0, 1, 2))
OTHER = Request(1100, 436, hash_ids=(0, 3, 4))
BY_HAND = [FIRST, OTHER, FIRST]


def test_a_pool_that_is_one_block_too_small() -> None:
    # The queue, head first: 0 comes back behind 2 and 1. OTHER finds 0 and takes the block of 2;
    # then 1, 3, 0 lie there. FIRST finds 0 and 1 and takes the block of 3.
    hits = prefix_hits(BY_HAND, 512, 3)
    assert (hits.full_blocks, hits.hit_blocks) == (3 + 2 + 3, 0 + 1 + 2)
    assert (hits.evictions, hits.cached_blocks) == (2, 3)
    assert hits.token_hit_rate == pytest.approx(3 * 512 / (1536 + 1100 + 1536))
    assert hits.block_hit_rate == pytest.approx(3 / 8)


def test_a_pool_that_holds_all_prompts() -> None:
    hits = prefix_hits(BY_HAND, 512, 4)
    assert (hits.hit_blocks, hits.evictions, hits.cached_blocks) == (0 + 1 + 3, 0, 4)


def test_answers_and_partial_blocks_take_room() -> None:
    # FIRST holds 4 blocks now, OTHER 3 (1536 tokens). After FIRST: one without an id, 2, 1, 0.
    # OTHER finds 0 and takes the first two, for 3 and for what has no id: 1, none, 3, 0 are left.
    # FIRST finds 0 and 1 and takes the other two.
    hits = prefix_hits(BY_HAND, 512, 4, "whole")
    assert (hits.hit_blocks, hits.evictions, hits.cached_blocks) == (0 + 1 + 2, 2, 3)


def test_a_cache_that_never_evicts() -> None:
    hits = infinite_hits(BY_HAND, 512)
    assert (hits.hit_blocks, hits.evictions, hits.cached_blocks) == (0 + 1 + 3, 0, 4)
    # The second time, FIRST's last token is in its third block: only two can be used.
    assert infinite_hits(BY_HAND, 512, recompute_last=True).hit_blocks == 0 + 1 + 2


def test_ids_of_smaller_blocks() -> None:
    request = Request(700, 1, hash_ids=(5, 9))
    assert list(block_ids(request, 512)) == [5]
    assert list(block_ids(request, 256)) == [10, 11]
    # 188 tokens in the last block: one full block of 128, two of 64.
    assert list(block_ids(request, 128)) == [20, 21, 22, 23, 36]
    assert list(block_ids(request, 64)) == [*range(40, 48), 72, 73]


def test_prompts_shorter_than_a_block() -> None:
    requests = [Request(100, 1, hash_ids=(7,))] * 2
    for hits in (prefix_hits(requests, 512, 1), infinite_hits(requests, 512)):
        assert (hits.full_blocks, hits.hit_blocks, hits.cached_blocks) == (0, 0, 0)
        assert hits.token_hit_rate == hits.block_hit_rate == 0


# Slow models. Equal ids mean equal prompts up to there, so prompts are grown from earlier ones.


@st.composite
def traces(draw: st.DrawFn) -> list[Request]:
    requests = [Request(1, 1, hash_ids=(0,))]
    fresh = 1
    for _ in range(draw(st.integers(1, 12))):
        parent = requests[draw(st.integers(0, len(requests) - 1))]
        output = draw(st.integers(1, 600))
        if draw(st.booleans()):
            requests.append(Request(parent.input_length, output, hash_ids=parent.hash_ids))
            continue
        kept = list(block_ids(parent, 512))[: draw(st.integers(0, 6))]
        num_tokens = 512 * len(kept) + draw(st.integers(0, 1500) | st.just(512) | st.just(128))
        num_tokens = max(num_tokens, 1)
        num_new = -(-num_tokens // 512) - len(kept)
        ids = (*kept, *range(fresh, fresh + num_new))
        requests.append(Request(num_tokens, output, hash_ids=ids))
        fresh += num_new
    return requests


def split(request: Request, size: int) -> list[tuple[int, int]]:
    """The full blocks of a prompt: the id of the 512 tokens and the place within them."""
    assert request.hash_ids is not None
    places = range(size, request.input_length + 1, size)
    return [(request.hash_ids[(end - 1) // 512], end % 512) for end in places]


def lru(requests: list[Request], size: int, num_blocks: int, whole: bool) -> tuple[int, ...]:
    """Hits, evictions, and names at the end; no queue: each name has the time of its last use, and
    within a request its end counts as older than its beginning."""
    free: dict[object, tuple[int, int]] = {("empty", i): (-1, i) for i in range(num_blocks)}
    num_hits = evictions = 0
    for time, request in enumerate(requests):
        names: list[Any] = list(split(request, size))
        hits = len(list(takewhile(free.__contains__, names)))
        tokens = request.total_length if whole else len(names) * size
        names += [("empty", time, i) for i in range(-(-tokens // size) - len(names))]
        for name in names[:hits]:
            del free[name]
        for name in sorted(free, key=lambda name: free[name])[: len(names) - hits]:
            evictions += name[0] != "empty"  # type: ignore[index]
            del free[name]
        free |= {name: (time, -place) for place, name in enumerate(names)}
        num_hits += hits
    return num_hits, evictions, sum(name[0] != "empty" for name in free)  # type: ignore[index]


@pytest.mark.parametrize("variant", VARIANTS)
@settings(deadline=None, max_examples=100)
@given(requests=traces(), size=st.sampled_from([512, 128, 64]), spare=st.integers(0, 30))
def test_equal_to_a_model_with_times(
    variant: str, requests: list[Request], size: int, spare: int
) -> None:
    whole = variant == "whole"
    needed = [-(-r.total_length // size) if whole else r.input_length // size for r in requests]
    num_blocks = max(1, *needed) + spare
    hits = prefix_hits(requests, size, num_blocks, variant)
    found = (hits.hit_blocks, hits.evictions, hits.cached_blocks)
    assert found == lru(requests, size, num_blocks, whole)
    assert hits.full_blocks == sum(len(split(request, size)) for request in requests)


@settings(deadline=None, max_examples=100)
@given(requests=traces(), size=st.sampled_from([512, 128, 64]))
def test_what_never_leaves_is_what_an_earlier_prompt_began_with(
    requests: list[Request], size: int
) -> None:
    prompts = [split(request, size) for request in requests]
    found = capped = 0
    for number, prompt in enumerate(prompts):
        longest = max(
            n
            for n in range(len(prompt) + 1)
            if n == 0 or any(prompt[:n] == earlier[:n] for earlier in prompts[:number])
        )
        found += longest
        all_but_one = longest * size < requests[number].input_length
        capped += longest if all_but_one else longest - 1
    distinct = len({name for prompt in prompts for name in prompt})
    hits = infinite_hits(requests, size)
    assert (hits.hit_blocks, hits.cached_blocks) == (found, distinct)
    assert infinite_hits(requests, size, recompute_last=True).hit_blocks == capped
    large = prefix_hits(requests, size, max(1, distinct))
    assert (large.hit_blocks, large.evictions) == (found, 0)


# Published figures.


@lru_cache(maxsize=2)
def trace(name: str) -> list[Request]:
    return load_trace(name)


def cheap(setting: dict[str, Any]) -> bool:
    return bool(setting["block_size"] == 512 and setting["trace"] == "mooncake_synthetic")


def cells() -> list[Any]:
    return [
        pytest.param(
            setting,
            int(num_blocks),
            variant,
            id=f"{setting['trace']}-{setting['block_size']}-{num_blocks}-{variant}",
            marks=[]
            if cheap(setting) or (setting["block_size"] == 512 and num_blocks == "8192")
            else [pytest.mark.slow],
        )
        for setting in PUBLISHED
        for num_blocks, by_variant in setting["runs"].items()
        for variant in by_variant
    ]


@pytest.mark.parametrize(("setting", "num_blocks", "variant"), cells())
def test_published_hits(setting: dict[str, Any], num_blocks: int, variant: str) -> None:
    hits = prefix_hits(trace(setting["trace"]), setting["block_size"], num_blocks, variant)
    assert hits.prompt_tokens == setting["prompt_tokens"]
    assert hits.full_blocks == setting["full_blocks"]
    assert [
        hits.hit_blocks,
        round(hits.token_hit_rate, 6),
        hits.evictions,
    ] == setting["runs"][str(num_blocks)][variant]


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(
            setting,
            id=f"{setting['trace']}-{setting['block_size']}",
            marks=[] if setting["full_blocks"] < 500_000 else [pytest.mark.slow],
        )
        for setting in PUBLISHED
    ],
)
def test_published_hits_of_an_infinite_cache(setting: dict[str, Any]) -> None:
    requests, size = trace(setting["trace"]), setting["block_size"]
    hits = infinite_hits(requests, size)
    assert hits.cached_blocks == setting["distinct"]
    assert [
        hits.hit_blocks,
        round(hits.token_hit_rate, 6),
        round(hits.block_hit_rate, 6),
    ] == setting["infinite"]
    capped = infinite_hits(requests, size, recompute_last=True)
    assert [capped.hit_blocks, round(capped.token_hit_rate, 6)] == setting["infinite_cap"]


# Wrong input.


@pytest.mark.parametrize("size", [0, -16, 3, 96, 1024])
def test_a_block_size_that_does_not_divide_an_ids_tokens(size: int) -> None:
    for count in (lambda: prefix_hits(BY_HAND, size, 9), lambda: infinite_hits(BY_HAND, size)):
        with pytest.raises(ValueError, match=f"block_size is {size}, but must divide 512"):
            count()


def test_a_pool_smaller_than_a_request() -> None:
    with pytest.raises(ValueError, match=r"2 blocks of 512 .*input_length=1536.* needs 3"):
        prefix_hits(BY_HAND, 512, 2)
    with pytest.raises(ValueError, match=r"3 blocks of 512 .*input_length=1536.* needs 4"):
        prefix_hits(BY_HAND, 512, 3, "whole")
    with pytest.raises(ValueError, match="num_blocks is 0"):
        prefix_hits([Request(9, 9, hash_ids=(0,))], 512, 0)


def test_requests_without_ids() -> None:
    for count in (
        lambda: prefix_hits([FIRST, Request(9, 9)], 512, 9),
        lambda: infinite_hits([FIRST, Request(9, 9)], 512),
    ):
        with pytest.raises(ValueError, match="request 2 has no hash_ids"):
            count()


def test_no_requests_and_no_such_variant() -> None:
    for count in (lambda: prefix_hits([], 512, 9), lambda: infinite_hits([], 512)):
        with pytest.raises(ValueError, match="the trace is empty"):
            count()
    with pytest.raises(ValueError, match="variant is 'half', but must be one of prompt, whole"):
        prefix_hits(BY_HAND, 512, 9, "half")
