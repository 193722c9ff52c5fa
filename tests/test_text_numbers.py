"""Numbers in the texts: what stands under `>>>` is what comes out, and tables are measured."""

import doctest
import json
import re
import tomllib
from pathlib import Path

import pytest

from pagedattn.sharing import Heir, PagedKVCache, build_cache
from pagedattn.traces import (
    fragmentation,
    load_trace,
    policy_named,
    replay,
    select,
)
from pagedattn.viz.scenes import compute, small_config, start

CHAPTERS = Path(__file__).parents[1] / "chapters"
NUM_SLOTS = 160_000
COLUMNS = ("used_of_reserved", "saturated_used_of_pool", "saturated_mean_running")


def text_of(chapter: str) -> str:
    return (CHAPTERS / chapter / "README.md").read_text(encoding="utf-8")


def row_of(text: str, label: str) -> list[str]:
    """The cells of the table row with this label."""
    (row,) = re.findall(rf"^\| {re.escape(label)} \|(.*)\|$", text, flags=re.MULTILINE)
    return [cell.strip() for cell in row.split("|")]


@pytest.mark.parametrize("path", sorted(CHAPTERS.glob("*/README.md")), ids=lambda p: p.parent.name)
def test_examples_in_the_text(path: Path) -> None:
    # A fence would count as output of the example above it.
    text = re.sub(r"^`{3}.*$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    examples = doctest.DocTestParser().get_doctest(text, {}, path.parent.name, str(path), 0)
    report: list[str] = []
    failed, _ = doctest.DocTestRunner().run(examples, out=report.append)
    assert failed == 0, "".join(report)


def test_what_slabs_waste() -> None:
    """Chapter 01: first fit and buddies in the figures of another implementation (see
    `test_traces_published.py`), which `pagedattn bench waste` reproduces."""
    figures = json.loads((Path(__file__).parent / "data" / "traces.json").read_text())
    runs = {
        run["trace"]: run["policies"]
        for run in figures["runs"]
        if (run["view"], run["num_slots"]) == ("le4096", NUM_SLOTS)
    }
    assert len(runs) == 6
    of_reserved, of_pool, running = (figures["columns"]["policies"].index(c) for c in COLUMNS)
    text = " ".join(text_of("01").split())
    for name, words in (
        ("exact_ff", "first fit uses {} % to {} %"),
        ("buddy", "buddies {} % to {} %"),
    ):
        used = [policies[name][of_pool] for policies in runs.values()]
        assert words.format(round(100 * min(used), 1), round(100 * max(used), 1)) in text
    buddy, first_fit = (runs["azure_conv"][name] for name in ("buddy", "exact_ff"))
    factor = first_fit[of_reserved] / buddy[of_reserved]
    assert f"reserve {factor:.2f} times what is asked for" in text
    words = f"{buddy[running]:.0f} requests run at a time, with first fit {first_fit[running]:.1f}"
    assert words in text


def test_what_a_block_size_costs() -> None:
    """Chapter 02: what `pagedattn bench waste --block-sizes 1 8 16 32 64 128` prints."""
    text = text_of("02")
    text = text[text.index("| block size |") :]
    sizes = [int(size) for size in row_of(text, "block size")]
    assert sizes == [1, 8, 16, 32, 64, 128]
    requests, max_seq_len = select(load_trace("azure_conv"), "le4096", NUM_SLOTS)
    blocks = [fragmentation(requests, size) for size in sizes]
    runs = [replay(requests, policy_named(f"paged{n}", NUM_SLOTS, max_seq_len)) for n in sizes]
    for label, values in {
        "empty slots, over a request's life": [f"{100 * b.life:.2f} %" for b in blocks],
        "empty slots of a request at its end": [f"{b.mean_waste:.2f}" for b in blocks],
        "blocks of a request at its end": [f"{b.mean_blocks:.1f}" for b in blocks],
        "running requests, mean while others wait": [
            f"{run.saturated_mean_running:.2f}" for run in runs
        ],
    }.items():
        assert row_of(text, label) == values


@pytest.mark.parametrize(
    ("trace", "words"),
    [
        ("mooncake_synthetic", "have {mean:.0f} tokens on average: with blocks of 128, {share} of"),
        ("arxiv_summ_len", "the {mean:,.0f} tokens of `arxiv_summ_len` it is {share}."),
    ],
)
def test_short_requests_waste_most(trace: str, words: str) -> None:
    requests, _ = select(load_trace(trace), "le4096", NUM_SLOTS)
    mean = sum(request.total_length for request in requests) / len(requests)
    share = f"{100 * fragmentation(requests, 128).life:.2f} %"
    assert words.format(mean=mean, share=share) in " ".join(text_of("02").split())


def forked(block_size: int, prompt: int, seq_ids: str, num_tokens: int = 1) -> PagedKVCache:
    """Sequences of one computed prompt, each with tokens of its own that wait."""
    cache = build_cache(small_config(num_blocks=300, block_size=block_size, max_seq_len=1040))
    start(cache, seq_ids[0], prompt)
    for child in seq_ids[1:]:
        cache.fork(seq_ids[0], child)
    for seq_id in seq_ids:
        cache.append(seq_id, [ord(seq_id)] * num_tokens)
    return cache


def test_predictions_about_sharing() -> None:
    """Chapter 03: what live caches answer to the questions about blocks and copies."""
    questions = tomllib.loads((CHAPTERS / "03" / "predict.toml").read_text())["question"]
    answers = {question["id"]: question["answer"] for question in questions}

    cache = forked(16, 1024, "ABCD")
    compute(cache, dict.fromkeys("ABCD", 1))
    assert cache.usage().reserved // 16 == answers["blocks"]

    cache = forked(16, 1030, "ABCD")
    compute(cache, dict.fromkeys("ABCD", 1))
    assert cache.num_copies == answers["copies"]

    cache = forked(4, 7, "ABC")
    compute(cache, dict.fromkeys("AB", 1))
    assert cache.num_copies == answers["waiting"]

    cache = forked(4, 7, "ABC", num_tokens=2)
    before = cache.pool.num_free_blocks
    cache.reserve(dict.fromkeys("ABC", 2))
    assert before - cache.pool.num_free_blocks == answers["need"]

    cache = forked(4, 9, "ABCD")
    compute(cache, dict.fromkeys("ABCD", 1))
    before = cache.num_copies
    cache.replace("ABCD", [Heir(parent, i, i) for i, parent in enumerate("ABBD")])
    compute(cache, dict.fromkeys(range(4), 1))
    assert cache.num_copies - before == answers["heirs"]


def test_what_sharing_saves() -> None:
    """Chapter 03: what `pagedattn bench sharing` has counted for the figure."""
    text = text_of("03")
    figures = CHAPTERS.parent / "figures" / "sharing_saved.json"
    counted = json.loads(figures.read_text(encoding="utf-8"))
    every, short = counted["views"].values()
    for label, saved, numbers in (
        ("n samples", every["samples"], "246"),
        ("n beams", every["beams"], "246"),
        ("samples: ours, prompts of up to 512 tokens", short["samples"], "26"),
        ("samples: ours, all", every["samples"], "26"),
        ("beams: ours, prompts of up to 512 tokens", short["beams"], "26"),
        ("beams: ours, all", every["beams"], "26"),
    ):
        assert row_of(text, label) == [f"{100 * saved[n]['saved']:.1f} %" for n in numbers]
    words = " ".join(text.split())
    for view, lengths in (
        (every, "{:,.0f} tokens on average, and {:,.0f} of answer"),
        (short, "512 tokens have {:,.0f} and {:,.0f}"),
    ):
        assert lengths.format(*view["mean_lengths"]) in words
    assert f"takes {every['num_requests']} of {every['num_kept']:,} recorded" in words
    for view, where in ((every, "of all"), (short, "where prompts are short")):
        least, most = (f"{100 * view['at most'][n]['saved']:.1f} %" for n in "26")
        assert f"{least} and {most} {where}" in words
    steps = every["num_requests"] * (every["mean_lengths"][1] - 1)
    copies = every["beams"]["4"]["copies"]
    assert f"{copies:,} blocks were copied in {steps:,.0f} steps" in words
    assert round(10 * copies / steps) == 6
    scenarios = {(s["name"], s["num_prompt_tokens"]): s for s in counted["scenarios"]}
    system, beams = scenarios["requests", 1024], scenarios["beams", 2048]
    assert (
        f"hold {system['shared']} blocks instead of {system['own']:,}, "
        f"so sharing saves {100 * system['saved']:.1f} %" in words
    )
    assert f"down to {16 * system['own']:,}" in words
    assert (
        f"hold {beams['shared']} blocks instead of {beams['own']}, "
        f"which is {100 * beams['saved']:.1f} % less" in words
    )
