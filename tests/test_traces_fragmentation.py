"""What blocks waste: against counting every block in every step."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedattn.traces import Request, fragmentation

LENGTHS = st.builds(Request, st.integers(1, 70), st.integers(1, 70))


@given(st.lists(LENGTHS, min_size=1, max_size=10), st.integers(1, 40))
def test_fragmentation_equals_counting(requests: list[Request], block_size: int) -> None:
    def empty_share(token_counts: list[int]) -> float:
        slots = [math.ceil(count / block_size) * block_size for count in token_counts]
        return (sum(slots) - sum(token_counts)) / sum(slots)

    totals = [request.total_length for request in requests]
    lives = [range(request.input_length, request.total_length + 1) for request in requests]
    wasted = [math.ceil(total / block_size) * block_size - total for total in totals]
    measured = fragmentation(requests, block_size)
    assert measured.prompt == pytest.approx(empty_share([r.input_length for r in requests]))
    assert measured.life == pytest.approx(empty_share([n for life in lives for n in life]))
    assert measured.final == pytest.approx(empty_share(totals))
    assert measured.mean_waste == pytest.approx(sum(wasted) / len(requests))
    assert measured.mean_blocks == pytest.approx(
        sum(math.ceil(total / block_size) for total in totals) / len(requests)
    )


def test_fragmentation_by_hand() -> None:
    # 3 + 2 tokens in blocks of 4: 3, 4, 5 tokens in 4, 4, 8 slots.
    measured = fragmentation([Request(3, 2)], 4)
    assert (measured.prompt, measured.life, measured.final) == (1 / 4, 1 / 4, 3 / 8)
    assert (measured.mean_waste, measured.mean_blocks) == (3, 2)


def test_fragmentation_rejects() -> None:
    with pytest.raises(ValueError, match="block_size is 0, but must be at least 1"):
        fragmentation([Request(1, 1)], 0)
    with pytest.raises(ValueError, match="the trace is empty"):
        fragmentation([], 16)
