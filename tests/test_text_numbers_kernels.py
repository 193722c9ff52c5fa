"""Chapter 05: every measured number in its text is the committed evidence's, the rest is counted.
What no longer holds is listed together, as it has to be written. (The table of registers is checked
where the kernels are compiled: `test_kernels_compiled.py`.)"""

import json
import tomllib
from pathlib import Path

import pytest

from pagedattn.bench.kernel_rows import ATTENTION_ROWS, MIXED

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
    ]


def text() -> str:
    return " ".join((CHAPTER / "README.md").read_text(encoding="utf-8").split())


def test_measured_numbers() -> None:
    said = text()
    missing = [words for words in measured() if words not in said]
    assert not missing, "chapters/05/README.md has to say:\n" + "\n".join(missing)


def test_claims_of_the_climb() -> None:
    """What is said about the numbers without a number."""
    packed, split, pipelined = map(climbed, ("packed", "split", "pipelined"))
    assert packed[0] < 2 * FLOORS[0], "packed, 64 x 2048: not far from the floor"
    assert split[1] > 2 * FLOORS[1], "split, 1 x 8192: where so little is to be read"
    assert 0.9 < pipelined[1] / split[1] < 1.1, "pipelined, 1 x 8192: gains nothing"


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
