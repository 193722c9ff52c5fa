"""Chapter 05: every measured number in its pages is the committed evidence's, the rest is counted.
What no longer holds is listed together, as it has to be written. (The table of registers is checked
where the kernels are compiled: `test_kernels_compiled.py`.)"""

import json
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

from pagedattn.bench.kernel_rows import ATTENTION_ROWS, BEAMS, MIXED, SHARED
from pagedattn.viz.plans import Split, schedule

CHAPTER = Path(__file__).parents[1] / "chapters" / "05"
RESULT = json.loads((CHAPTER / "evidence" / "kernels.json").read_text(encoding="utf-8"))["result"]
ROWS = {row["name"]: row for row in RESULT["rows"]}
CEILINGS = RESULT["ceilings"]  # bytes and operations a microsecond
READ, COPY = (CEILINGS[name] / 1e6 for name in ("read", "copy"))  # TB/s
MATMUL = CEILINGS["matmul"] / 1e6  # TFLOP/s
SHARE = CEILINGS["read"] / 132  # of one multiprocessor
BATCHES = ("decode 64x2048", "decode 1x8192", "decode mixed")
FLOORS = [ROWS[name]["floor_us"] for name in BATCHES]
ALONE = 8192 * 128 * 2 * 2  # bytes of K and V of 8192 tokens, one KV head
CLIMBED = "in the climb"

# The text's table of what came out, and what plain Triton took: in an earlier run, or in the climb;
# microseconds, or TFLOP/s where the name has a unit.
OUTCOMES = {
    "1 × 512": ("decode 1x512", "8.3"),
    "8 × 512": ("decode 8x512", "13.3"),
    "32 × 512": ("decode 32x512", "28.1"),
    "1 × 8192": ("decode 1x8192", CLIMBED),
    "8 × 8192": ("decode 8x8192", "74.3"),
    "64 × 8192": ("decode 64x8192", "511"),
    "1 × 131,072": ("decode 1x131072", "142"),
    "*mixed*": ("decode mixed", CLIMBED),
    "64 × 8192, head_dim 64": ("decode 64x8192 head_dim 64", "314"),
    "64 × 8192, fp8 cache": ("decode 64x8192 fp8 cache", "632"),
    "prompt of 8192, TFLOP/s": ("prefill 1x8192", "450"),
    "16 prompts of 1024, TFLOP/s": ("prefill 16x1024", "339"),
    "512 tokens behind 16,384, TFLOP/s": ("prefill chunk", "377"),
    "8 chunks and 120 decodes": ("mixed step", "–"),
}

# The text's long decode step and its prompt, counted as the text counts them.
KV_BYTES = 64 * 8192 * 8 * 128 * 2 * 2
DECODE_FLOPS = 2 * 2 * 64 * 8192 * 32 * 128
PROMPT_FLOPS = 4 * 32 * 128 * 8192 * 8193 // 2
PROMPT_READ, PROMPT_WRITTEN = 8192 * (2 * 8 + 32) * 128 * 2, 8192 * 32 * 128 * 2


def us(time: float) -> str:
    return f"{time:.1f}" if time < 100 else f"{time:.0f}"


def climbed(step: str) -> list[float]:
    return [RESULT["climb"][name][step]["us"] for name in BATCHES]


def row(label: str, *times: float, more: str = "") -> str:
    return f"| {label} | {' | '.join(map(us, times))} |{more}"


def outcome(label: str, name: str, plain: str) -> str:
    """A line of the table: plain Triton, now, share of the floor, the best peer of the same run."""
    found = ROWS[name]
    if plain == CLIMBED:
        plain = us(RESULT["climb"][name]["pipelined"]["us"])
    peer = found.get("best_peer", "").removeprefix("SDPA ").removesuffix(" Triton unified")
    times = [found["us"]]
    if peer:
        times.append(found["peers"][found["best_peer"]]["us"])
    if "TFLOP/s" in label:
        words = [f"{found['flops'] / time / 1e6:.0f}" for time in times]
    else:
        words = [us(time) for time in times]
    beside = f" {peer} {words[1]} |" if peer else " |"
    return f"| {label} | {plain} | {words[0]} | {percent(found['share'])} |{beside}"


def percent(part: float) -> str:
    return f"{100 * part:.0f} %"


def more(name: str, than: str) -> str:
    return percent(ROWS[name]["us"] / ROWS[than]["us"] - 1)


def second_half() -> list[str]:
    """What the climb to the end has to say."""
    apart, together = (ROWS[name] for name in (f"{SHARED.name}, plain plan", SHARED.name))
    beams = [us(ROWS[name]["us"]) for name in (f"{BEAMS.name}, plain plan", BEAMS.name)]
    plain, found = ROWS["decode 64x2048"]["us"], ROWS["decode 64x2048 searched"]["us"]
    fp8, bf16 = ROWS["decode 64x8192 fp8 cache"], ROWS["decode 64x8192"]
    return [
        *(outcome(label, *row) for label, row in OUTCOMES.items()),
        f"{us(fp8['us'])} µs, where a bfloat16 cache of twice the bytes takes {us(bf16['us'])}",
        f"The 64 sequences above take {us(apart['us'])} µs without the search.",
        f"With the search they take {us(together['us'])} µs; the floor is "
        f"{us(together['floor_us'])}.",
        f"Those beams now take {beams[1]} µs with the search and {beams[0]} without",
        f"64 × 2048 takes {us(found)} µs, and without the search {us(plain)}.",
        f"The plan with its search takes {ROWS['plan 64x2048 searched']['us']:.1f} µs, once a step",
        f"costs {more('decode 64x2048 batch-invariant', 'decode 64x2048')} at 64 × 2048 and "
        f"{more('decode mixed batch-invariant', 'decode mixed')} for *mixed*",
        *on_the_cpu(),
    ]


def on_the_cpu() -> list[str]:
    """What calls take that no graph launches."""
    call, plan = RESULT["host"]["decode 1x512"], RESULT["host"]["plan mixed"]
    cudnn, flash = (call["peers"][f"SDPA {name}"]["us"] for name in ("cuDNN", "flash"))
    return [
        f"A call at 1 × 512 takes {call['us']:.0f} µs of the CPU's time, a plan for *mixed* "
        f"{plan['us']:.0f}.",
        f"torch's attention takes {cudnn:.0f} with cuDNN and {flash:.0f} with its flash kernel.",
    ]


def measured() -> list[str]:
    """What the text has to say, in its order."""
    floor = KV_BYTES / CEILINGS["read"]
    compute = DECODE_FLOPS / CEILINGS["matmul"]
    alone_read = PROMPT_READ - PROMPT_WRITTEN
    prompt_bytes = 2 * PROMPT_WRITTEN / CEILINGS["copy"] + alone_read / CEILINGS["read"]
    long, prompt = ROWS["decode 64x8192"], ROWS["prefill 1x8192"]
    write, copy = ROWS["write 8192 tokens"], ROWS["copy 1024 blocks"]
    naive, packed, split, pipelined = map(climbed, ("naive", "packed", "split", "pipelined"))
    tile, packed_tile = naive[1] / 512, packed[1] / 128
    saved = [
        f"{1 - late / early:.0%}".replace("%", " %")
        for early, late in zip(split, pipelined, strict=True)
    ]
    through = CEILINGS["read_through_table"]
    cudnn = [ROWS[name]["peers"]["SDPA cuDNN"].get("us", 0) for name in BATCHES]
    prompt_rates = [
        prompt["flops"] / time / 1e6 for time in (prompt["peers"]["SDPA cuDNN"]["us"], prompt["us"])
    ]
    return [
        f"| reading memory | {READ:.2f} TB/s |",
        f"| the same through a table of 16-token blocks | {through / 1e6:.2f} TB/s |",
        f"| copying, bytes read and written together | {COPY:.2f} TB/s |",
        f"| matrix product, bf16 | {MATMUL:.0f} TFLOP/s |",
        f"| an empty launch in a CUDA graph | {CEILINGS['node']:.1f} µs |",
        rf"$$2.147 \cdot 10^9 / ({READ:.2f} \cdot 10^{{12}}) = {us(floor)} \text{{ µs}}$$",
        f"{2 * KV_BYTES / CEILINGS['copy'] / 1000:.2f} ms for this copy alone",
        f"and then come the {us(floor)} µs.",
        f"At {MATMUL:.0f} TFLOP/s they are done in {compute:.0f} µs.",
        f"it waits for memory {floor / compute:.0f} times as long",
        f"{MATMUL:.0f} / {READ:.2f} = {MATMUL / READ:.0f} a byte",
        f"That is {PROMPT_FLOPS / (PROMPT_READ + PROMPT_WRITTEN):.0f} operations a byte",
        f"{MATMUL:.0f} TFLOP/s would do it in {us(PROMPT_FLOPS / CEILINGS['matmul'])} µs; "
        f"the bytes are read and written in {prompt_bytes:.0f}.",
        f"ours takes {us(long['us'])} µs, and the floor is {100 * long['share']:.0f} % of that",
        f"On a prompt of 8192 tokens it reaches {prompt_rates[1]:.0f} TFLOP/s.",
        f"141 GB, read at {READ:.2f} TB/s by all together",
        f"even share is {SHARE / 1000:.0f} GB/s",
        f"8192 tokens take {write['us']:.0f} µs; the floor is {write['floor_us']:.0f}.",
        f"1024 blocks of one layer take {copy['us']:.0f} µs, and the floor at the rate of a copy "
        f"is {copy['floor_us']:.0f}.",
        f"Torch's indexing takes {us(copy['peers']['torch index']['us'])}:",
        f"memory gives {100 * through / CEILINGS['read']:.0f} % of what it gives to a plain walk",
        row("floor", *FLOORS),
        row("1 naive: expected", 4 * FLOORS[0], ALONE / SHARE, 4 * FLOORS[2]),
        row("1 naive: measured", *naive),
        row("2 packed: expected", FLOORS[0], ALONE / SHARE, FLOORS[2]),
        row("2 packed: measured", *packed),
        row("3 split, balanced: expected", *FLOORS),
        row("3 split, balanced: measured", *split),
        row("4 pipelined: expected", *FLOORS),
        row("4 pipelined: measured", *pipelined),
        row("the end, on Hopper: measured", *climbed("Hopper")),
        row("cuDNN, contiguous K and V", *cudnn[:2], more=" |"),
        f"four times the floor, {us(4 * FLOORS[0])} µs",
        f"A program reads {ALONE / 1e6:.1f} MB; at a multiprocessor's even share, "
        f"{SHARE / 1000:.0f} GB/s, that takes {us(ALONE / SHARE)} µs",
        f"{us(naive[1])} µs for its 512 tiles, which come one after another: {tile:.1f} µs each",
        f"8 KB in {tile:.1f} µs are {8192 / tile / 1000:.1f} GB/s, not {SHARE / 1000:.0f}",
        f"only 8 programs are left, so {us(ALONE / SHARE)} µs as before",
        f"{us(packed[0])} µs is not far from the floor",
        f"one after another: {packed_tile:.1f} µs each",
        f"*Expected:* {us(FLOORS[1])} µs, and somewhat more for the merge. "
        f"*Measured:* {us(split[1])}.",
        f"*Measured:* {saved[0]} less for 64 × 2048, {saved[2]} less for *mixed*.",
        f"the plan takes {ROWS['plan mixed']['us']:.1f} µs, and the attention of 32 layers "
        f"{32 * ROWS['decode mixed']['us'] / 1000:.0f} ms",
        f"cuDNN reaches {prompt_rates[0]:.0f} TFLOP/s, the kernel of this chapter "
        f"{prompt_rates[1]:.0f}.",
        *second_half(),
    ]


def text() -> str:
    pages = (CHAPTER / name for name in ("README.md", "hopper.md"))
    return " ".join(" ".join(page.read_text(encoding="utf-8").split()) for page in pages)


def test_measured_numbers() -> None:
    said = text()
    missing = [words for words in measured() if words not in said]
    assert not missing, "chapters/05/README.md or hopper.md has to say:\n" + "\n".join(missing)


def test_claims_of_the_climb() -> None:
    """What is said about the numbers without a number."""
    packed, split, pipelined = map(climbed, ("packed", "split", "pipelined"))
    assert packed[0] < 2 * FLOORS[0], "packed, 64 x 2048: not far from the floor"
    assert split[1] > 2 * FLOORS[1], "split, 1 x 8192: where so little is to be read"
    assert 0.9 < pipelined[1] / split[1] < 1.1, "pipelined, 1 x 8192: gains nothing"


def test_claims_of_the_climb_to_the_end() -> None:
    shares = {name: ROWS[name]["share"] for name, _ in OUTCOMES.values()}
    fp8, neighbour = (shares[f"decode 64x8192{cache}"] for cache in (" fp8 cache", ""))
    assert fp8 < neighbour, "fp8 lies further below the line"
    apart, together = (ROWS[name]["us"] for name in (f"{SHARED.name}, plain plan", SHARED.name))
    assert apart < ROWS["decode 64x8192"]["us"], "the cache of the GPU helps"
    assert apart > 2 * together, "sharing is worth it"
    assert ROWS[SHARED.name]["share"] < fp8, "the shared row most"
    assert together > 1.5 * ROWS[SHARED.name]["floor_us"], "far from its floor"
    assert ROWS["decode 1x512"]["read"] / CEILINGS["read"] == pytest.approx(0.5, abs=0.1)
    call = RESULT["host"]["decode 1x512"]["us"]
    assert call > 2 * ROWS["decode 1x512"]["us"], "the GPU waits for the CPU"


def test_sizes() -> None:
    """What the text says about the batches, which are the benchmark's."""
    lengths = MIXED.seq_lens
    short, long = sum(n < 128 for n in lengths), sum(n >= 8192 for n in lengths)
    assert min(lengths) >= 64 and max(lengths) < 16384 and 0.5 < long / short < 2
    said = text()
    assert f"*mixed* is {len(lengths)} sequences of 64 to 16,384 tokens" in said
    assert f"between 8,192 and 16,384: {sum(lengths):,} tokens" in said
    assert f"one row has {max(lengths):,} keys, another {min(lengths)}" in said
    (prompt,) = (row.work for row in ATTENTION_ROWS if row.name == "prefill 1x8192")
    assert prompt.flops == PROMPT_FLOPS and prompt.written == PROMPT_WRITTEN


def test_loads_of_the_figure() -> None:
    """What the text says of figure 5.4, from the lengths alone."""
    lengths, places, programs = MIXED.seq_lens, 4 * 132 // 8, 132 // 8

    def busiest(splits: list[Split]) -> float:
        return max(run.stop for run in schedule(splits, places)) / (sum(lengths) / places)

    whole = [Split(row, 0, keys) for row, keys in enumerate(lengths)]
    longest = -(-sum(lengths) // places // 64) * 64
    cut = []
    for row, keys in enumerate(lengths):
        length = -(-keys // -(-keys // longest) // 64) * 64
        cut += [Split(row, at, min(at + length, keys)) for at in range(0, keys, length)]
    tiles = [min(128, keys - at) for keys in lengths for at in range(0, keys, 128)]
    edges = [share * len(tiles) // programs for share in range(programs + 1)]
    most = max(sum(tiles[a:b]) for a, b in pairwise(edges)) / (sum(lengths) / programs)
    cut.sort(key=lambda split: -split.keys)
    said = text()
    assert f"{busiest(whole):.1f} times an even share" in said
    assert f"the busiest place still has {percent(busiest(cut) - 1)} more" in said
    assert f"With even shares it has {percent(most - 1)} more" in said


def test_what_sharing_saves() -> None:
    keys, own, rows = 8192, 256, 64
    assert SHARED.seq_lens == (keys + own,) * rows and SHARED.shared == keys
    alone, once = rows * (keys + own), keys + rows * own
    said = text()
    assert f"{alone:,} keys are read where {once:,} would do" in said
    work = SHARED.work
    assert f"{work.flops / (work.read + work.written):.0f} operations a byte" in said
    token = 2 * 8 * 128 * 2
    assert f"the prefix, {keys * token / 1e6:.1f} MB, fits" in said
    assert f"four beams over 2048 tokens would spare {3 * 2048 * token / 1e6:.0f} MB" in said
    assert f"64 MiB, {2**26 / CEILINGS['read']:.0f} µs of reading" in said


def test_predictions_about_kernels() -> None:
    """The questions that are arithmetic, done again."""
    questions = tomllib.loads((CHAPTER / "predict.toml").read_text())["question"]
    answers = {question["id"]: question["answer"] for question in questions}
    assert answers["bytes"] == pytest.approx(KV_BYTES / 1e9, abs=5e-4)
    assert answers["floor"] == round(2.147e9 / 4.6e12 * 1e6)
    assert answers["intensity"] == 2 * (32 // 8) / 2
    keys = 100_000 + 31 * 50
    part = -(-keys // 64 // 64) * 64
    assert answers["splits"] == 8 * (-(-100_000 // part) + 31)
    assert answers["sink"] == (1 * 8 + 3 * 4) / (1 + 3 + 1)
    tiles = [-(-n // 128) for n in (300, 128, 1000)]
    assert answers["shares"] == (2 * sum(tiles) // 4 - tiles[0] - tiles[1]) * 128
    assert answers["shared"] == 8192 + 64 * 256
