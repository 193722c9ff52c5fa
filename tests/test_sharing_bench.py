"""The command `pagedattn bench sharing`: blocks of samples and beams, counted on the real cache."""

import json
from collections.abc import Iterable
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedattn import paged
from pagedattn.bench import sharing
from pagedattn.bench.recorded_beams import endless_parents, recorded_searches
from pagedattn.bench.scenarios import scenarios
from pagedattn.bench.shared_blocks import Blocks, beam_blocks, most_shared, sample_blocks
from pagedattn.cache import Config
from pagedattn.cli import main
from pagedattn.traces import Request, load_trace

FIGURES = Path(__file__).parents[1] / "figures"
# Prompts that end in the middle of a block, at its end, and within the first; answers of one token.
REQUESTS = [(10, 7), (8, 9), (3, 12), (9, 1), (1, 2), (37, 30)]


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def lengths(request: Request) -> range:
    """Tokens computed of each sequence after each step: the answer's last one never is."""
    return range(request.input_length, request.total_length)


def blocks_up_to(length: int) -> int:
    """The sum of ceil(n / 16) for n = 1 .. length."""
    full, rest = divmod(length, 16)
    return 16 * full * (full + 1) // 2 + rest * (full + 1)


def sampled(requests: Iterable[Request], n: int) -> tuple[int, int]:
    """Blocks of 16 in all steps, without and with sharing, of n samples of each prompt."""
    own = shared = 0
    for request in requests:
        prompt, steps = request.input_length, request.output_length
        blocks = blocks_up_to(request.total_length - 1) - blocks_up_to(prompt - 1)
        later = blocks - ceil_div(prompt, 16)
        full = prompt // 16 * (steps - 1)
        own += n * blocks
        shared += ceil_div(prompt, 16) + full + n * (later - full)
    return own, shared


@pytest.mark.parametrize("prompt,answer", REQUESTS)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_samples_share_the_prompts_full_blocks(prompt: int, answer: int, n: int) -> None:
    request, size = Request(prompt, answer), 4
    own = sum(n * ceil_div(length, size) for length in lengths(request))
    full = prompt // size
    tails = sum(n * (ceil_div(length, size) - full) for length in lengths(request)[1:])
    shared = ceil_div(prompt, size) + full * (answer - 1) + tails
    # The partly filled block of the prompt is copied by all samples but the last that writes.
    copies = n - 1 if prompt % size and answer > 1 else 0
    assert sample_blocks([request], n, size) == Blocks(own, shared, copies)


@pytest.mark.parametrize("prompt,answer", REQUESTS)
@pytest.mark.parametrize("width", [2, 5])
def test_heirs_of_one_beam_share_all_but_the_last_block(
    prompt: int, answer: int, width: int
) -> None:
    request, size = Request(prompt, answer), 4
    counted = beam_blocks([request], width, size, [repeat((width - 1,) * width)])
    later = lengths(request)[1:]
    own = sum(width * ceil_div(length, size) for length in lengths(request))
    shared = ceil_div(prompt, size) + sum((length - 1) // size + width for length in later)
    copies = sum(width - 1 for length in later if (length - 1) % size)
    assert counted == Blocks(own, shared, copies)
    assert most_shared([request], width, size) == counted


def test_beams_that_all_live_on_are_samples() -> None:
    request = Request(10, 15)
    assert beam_blocks([request], 3, 4, [repeat((0, 1, 2))]) == sample_blocks([request], 3, 4)


def test_requests_in_one_pool_share_nothing_with_each_other() -> None:
    requests = [Request(prompt, answer) for prompt, answer in REQUESTS]
    one_by_one, total = [sample_blocks([request], 3, 4) for request in requests], Blocks()
    for blocks in one_by_one:
        total += blocks
    assert sample_blocks(requests, 3, 4) == total
    assert beam_blocks(requests, 3, 4, [repeat((0, 1, 2)) for _ in requests]) == total


def test_two_beams_by_hand() -> None:
    # Blocks of 2, a prompt of 2 tokens in block 1. Two beams, own last blocks 2 and 3 (after 3 and
    # 4 tokens); then both continue the first beam, whose two blocks are full: two new ones (5, 6).
    counted = beam_blocks([Request(2, 5)], 2, 2, [[(0, 1), (0, 0), (0, 1)]])
    assert counted == Blocks(own=2 + 4 + 4 + 6 + 6, shared=1 + 3 + 3 + 4 + 4, copies=0)
    # Both continue the second beam in the middle of its block: one copy, and the first is freed.
    counted = beam_blocks([Request(2, 5)], 2, 2, [[(1, 1), (0, 1), (0, 1)]])
    assert counted == Blocks(own=2 + 4 + 4 + 6 + 6, shared=1 + 3 + 3 + 5 + 5, copies=1)


def test_own_is_what_chapter_02_holds_with_full_copies() -> None:
    request, n, size = Request(7, 9), 3, 4
    config = Config(1, 1, 2, num_blocks=30, max_seq_len=20, block_size=size, device="cpu")
    cache = paged.build_cache(config)
    held = 0
    for seq_id in range(n):
        cache.add(seq_id, range(7))
    for step in range(request.output_length):
        batch = cache.reserve(dict.fromkeys(range(n), 1 if step else 7))
        batch.attend(0, *(torch.randn(len(batch.token_ids), 1, 2) for _ in "qkv"))
        batch.commit()
        held += len(cache.pool.blocks) - 1 - cache.pool.num_free_blocks
        for seq_id in range(n):
            cache.append(seq_id, [0])
    assert sample_blocks([request], n, size).own == held
    assert beam_blocks([request], n, size, [repeat((0, 0, 2))]).own == held


def test_too_few_parents() -> None:
    with pytest.raises(ValueError, match="parents of 3 steps are known"):
        beam_blocks([Request(4, 9)], 2, 4, [[(0, 1), (1, 0)]])


@pytest.mark.parametrize("width", sharing.NUMBERS)
def test_recorded_searches(width: int) -> None:
    searches = recorded_searches()[width]
    assert len(searches) >= 12 and min(map(len, searches)) > 8
    for search in searches:
        for step in search:
            assert len(step) == width and set(step) <= set(range(width))
    # Real beams die: there is a step in which two continue the same one.
    assert all(any(len(set(step)) < width for step in search) for search in searches)


def test_a_long_answer_takes_whole_searches_one_after_another() -> None:
    searches = recorded_searches()[4]
    taken = list(islice(endless_parents(4, seed=7), 1000))
    assert taken == list(islice(endless_parents(4, seed=7), 1000))
    assert taken != list(islice(endless_parents(4, seed=8), 1000))
    place = 0
    while place < len(taken):
        fits = [s for s in searches if taken[place : place + len(s)] == s[: len(taken) - place]]
        assert fits, place
        place += max(map(len, fits))


def test_a_width_without_recorded_searches() -> None:
    with pytest.raises(ValueError, match="no searches of width 3 were recorded; known: 2, 4, 6"):
        next(endless_parents(3, 0))


@pytest.mark.parametrize("width", sharing.NUMBERS)
def test_recorded_beams_lie_between_the_bounds(width: int) -> None:
    request = Request(150, 120)
    least, beams, most = (
        count([request], width, 16, lambda: None)
        for count in (sharing.count_samples, sharing.count_beams, sharing.count_most)
    )
    assert least.own == beams.own == most.own
    assert least.saved < beams.saved < most.saved


def test_scenarios_by_hand() -> None:
    rows = {
        (row.name, row.num_seqs, row.num_prompt_tokens, row.num_new_tokens): row
        for row in scenarios()
    }
    assert {key: (row.own, row.shared) for key, row in rows.items()} == {
        ("beams", 4, 1024, 0): (4 * 64, 64),
        ("beams", 4, 1024, 1): (4 * 65, 64 + 4),
        ("beams", 4, 2048, 256): (4 * 144, 128 + 4 * 16),
        ("samples", 5, 512, 0): (5 * 32, 32),
        ("samples", 5, 512, 1): (5 * 33, 32 + 5),
        ("requests", 100, 1024, 768): (100 * 112, 64 + 100 * 48),
    }
    assert rows["beams", 4, 2048, 256].saved == pytest.approx(2 / 3)
    assert rows["requests", 100, 1024, 768].slab_slots == 409_600


def test_views_of_the_recorded_lengths() -> None:
    trace = load_trace("sharegpt_len")
    everything, short = sharing.views(trace, 10**9)
    assert sorted(everything.requests, key=repr) == sorted(trace, key=repr)
    assert max(request.input_length for request in short.requests) <= 512
    assert short.num_kept == len(short.requests) == sum(r.input_length <= 512 for r in trace)
    # Why this limit: the paper's ShareGPT prompts have 161 tokens on average.
    assert short.mean_lengths[0] == pytest.approx(161, abs=2)


def test_some_requests_stand_for_all() -> None:
    lengths = [5, 50, 10, 40, 20, 30]
    view = sharing.views([Request(1, length) for length in lengths], 3)[0]
    # Sorted, in groups of two, the second of each.
    assert [request.output_length for request in view.requests] == [10, 30, 50]
    trace = load_trace("sharegpt_len")
    whole, some = sharing.views(trace, 10**9), sharing.views(trace, sharing.NUM_REQUESTS)
    for n in sharing.NUMBERS:
        for all_of_them, few in zip(whole, some, strict=True):
            own, shared = sampled(all_of_them.requests, n)
            few_own, few_shared = sampled(few.requests, n)
            assert few_shared / few_own == pytest.approx(shared / own, abs=0.01)


HEADER = "input_length,output_length\n"


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, out, figure = (tmp_path / name for name in ("own.csv", "out.json", "saved.svg"))
    trace.write_text(HEADER + "10,7\n600,3\n")
    arguments = ["bench", "sharing", str(trace), "--block-size", "4"]
    arguments += ["--json", str(out), "--figure", str(figure)]
    monkeypatch.setattr("sys.argv", ["pagedattn", *arguments])
    assert main() == 0
    content = json.loads(out.read_text())
    assert content["command"] == f"pagedattn {' '.join(arguments)}"
    everything, short = content["views"].values()
    assert everything["mean_lengths"] == [305, 5] and short["mean_lengths"] == [10, 7]
    # 10 tokens in 3 blocks of 4, then 11, 12 in 3 and 13 to 16 in 4: 3 3 3 4 4 4 4 blocks each.
    # Two samples share 3, then the prompt's 2 full blocks: 3 4 4 6 6 6 6. 50 without, 35 with.
    assert short["samples"]["2"] == {
        "own": 50,
        "shared": 35,
        "copies": 1,
        "saved": pytest.approx(0.3),
    }
    # The other request: 600, 601, 602 tokens in 150, 151, 151 blocks; shared 150, 152, 152.
    assert everything["samples"]["2"]["own"] == 50 + 2 * (150 + 151 + 151)
    assert everything["samples"]["2"]["shared"] == 35 + 150 + 152 + 152
    printed = capsys.readouterr().out
    assert "own.csv, all: 2 of 2 requests; mean prompt 305, answer 5 tokens" in printed
    copies = everything["beams"]["4"]["copies"]
    assert f"all: four beams, {copies} blocks copied in 8 steps" in printed
    assert "30.0%" in printed and "4,864" in printed and "66.3%" in printed
    assert figure.read_text().startswith("<?xml")


def recorded_views() -> dict[str, Any]:
    """What the figure is drawn from."""
    views: dict[str, Any] = json.loads((FIGURES / "sharing_saved.json").read_text())["views"]
    return views


@pytest.mark.parametrize("place", [0, 1], ids=["all", "short"])
def test_the_recorded_figures_follow_from_the_lengths(place: int) -> None:
    view = sharing.views(load_trace("sharegpt_len"), sharing.NUM_REQUESTS)[place]
    recorded = recorded_views()[view.name]
    assert recorded["num_requests"] == len(view.requests)
    assert recorded["mean_lengths"] == pytest.approx(view.mean_lengths)
    for n in sharing.NUMBERS:
        own = shared = most = 0
        for request in view.requests:
            full = request.input_length // 16
            for length in lengths(request):
                blocks = ceil_div(length, 16)
                first = length == request.input_length
                own += n * blocks
                shared += blocks if first else full + n * (blocks - full)
                most += blocks if first else blocks - 1 + n
        samples, beams = recorded["samples"][str(n)], recorded["beams"][str(n)]
        assert (samples["own"], samples["shared"]) == (own, shared)
        assert recorded["at most"][str(n)]["shared"] == most
        assert beams["own"] == own and most < beams["shared"] < shared
        assert beams["saved"] == pytest.approx(1 - beams["shared"] / own)


@pytest.mark.slow
def test_the_recorded_beams_again() -> None:
    view = sharing.views(load_trace("sharegpt_len"), sharing.NUM_REQUESTS)[1]
    for n in sharing.NUMBERS:
        blocks = sharing.count_beams(view.requests, n, 16, lambda: None)
        recorded = recorded_views()[view.name]["beams"][str(n)]
        assert (blocks.own, blocks.shared, blocks.copies) == (
            recorded["own"],
            recorded["shared"],
            recorded["copies"],
        )


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["nowhere.csv"], "nowhere.csv"),
        (["--requests", "0"], "requests is 0"),
        (["--block-size", "0"], "block_size is 0"),
        (["{}/long.csv"], "no request with a prompt of up to 512 tokens"),
        (["--json", "{}/none/out.json"], "none/out.json"),
        (["--figure", "{}/none/out.svg"], "none/out.svg"),
    ],
)
def test_wrong_input_is_one_line_before_the_first_request(
    arguments: list[str],
    why: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "long.csv").write_text(HEADER + "513,2\n")
    monkeypatch.setattr(sharing, "measure", lambda *_: pytest.fail("a request has begun"))
    assert main(["bench", "sharing", *(a.format(tmp_path) for a in arguments)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("pagedattn: error: ")
    assert why in said
    assert said.count("\n") == 1
