"""Reading recorded traces, and the views of them."""

import gzip
import hashlib
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from pagedattn.traces import Request, load_trace, select, shipped_traces


@pytest.mark.parametrize(
    ("view", "num_kept", "limit"), [("le4096", 8640, 4096), ("full", 9739, 14089)]
)
def test_views_of_azure_conv(view: str, num_kept: int, limit: int) -> None:
    requests, max_seq_len = select(load_trace("azure_conv"), view, num_slots=160_000)
    assert (len(requests), max_seq_len) == (num_kept, limit)


def test_full_view_ends_at_the_greatest_power_of_two_in_the_pool() -> None:
    requests = [Request(62, 2), Request(60, 3), Request(63, 2), Request(100, 28)]
    assert select(requests, "full", num_slots=64) == (requests[:2], 64)
    assert select(requests, "full", num_slots=128) == (requests, 128)
    with pytest.raises(ValueError, match="its limit is 32 tokens, the shortest has 63"):
        select(requests, "full", num_slots=63)


TRACES = {
    "arxiv_summ_len": ("csv", "MIT License"),
    "azure_code": ("csv", "Attribution 4.0 International"),
    "azure_conv": ("csv", "Attribution 4.0 International"),
    "mooncake_conversation": ("jsonl", "Apache License"),
    "mooncake_synthetic": ("jsonl", "Apache License"),
    "sharegpt_len": ("csv", "Apache License"),
}


def test_shipped_names() -> None:
    assert shipped_traces() == list(TRACES)


@pytest.mark.parametrize("name", TRACES)
def test_shipped_trace_is_what_its_note_says(name: str) -> None:
    suffix, title = TRACES[name]
    folder = resources.files("pagedattn.data") / "traces"
    digest = hashlib.sha256((folder / f"{name}.{suffix}.gz").read_bytes()).hexdigest()
    note = (folder / f"{name}.NOTE.md").read_text()
    assert f"sha256 of this file: {digest}" in note
    assert re.search(rf"the (first )?{len(load_trace(name))} (of|that)", note)
    beside = re.search(r"beside this note: `(.*\.txt)`", note)
    assert beside
    assert title in (folder / beside[1]).read_text()


def test_azure_conv_is_loaded_whole_and_in_order() -> None:
    requests = load_trace("azure_conv")
    assert len(requests) == 9739
    assert requests[:2] == [Request(374, 44, 0), Request(396, 109, 4314)]
    assert max(request.total_length for request in requests) == 14089
    assert max(request.output_length for request in requests) == 1000


def test_mooncake_is_loaded_with_its_hash_ids() -> None:
    requests = load_trace("mooncake_conversation")
    first = Request(6758, 500, 0, tuple(range(14)))
    assert requests[:2] == [first, Request(7322, 490, 0, (0, *range(14, 28)))]
    assert "hash_ids" not in repr(first)  # there can be hundreds
    # Ids of whole blocks, as published with the trace.
    whole = {i for r in requests for i in (r.hash_ids or ())[: r.input_length // 512]}
    assert len(whole) == 89637
    assert sum(request.input_length for request in requests) == 72511056


# Bad input.


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((0, 1), "input_length is 0, but must be at least 1"),
        ((1, 0), "output_length is 0, but must be at least 1"),
        ((1, 1, -1), "arrival_ms is -1, but must be at least 0"),
        ((513, 1, 0, (4, -1)), "the least of hash_ids is -1, but must be at least 0"),
        ((512, 1, 0, (4, 5)), "2 hash_ids, but a prompt of 512 tokens has 1 blocks of 512"),
        ((513, 1, 0, (4,)), "1 hash_ids, but a prompt of 513 tokens has 2 blocks of 512"),
        ((1, 1, 0, ()), "0 hash_ids, but a prompt of 1 tokens has 1 blocks of 512"),
    ],
)
def test_request_rejects(lengths: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Request(*lengths)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "line 1: the header is '', not"),
        ("input,output\n1,2\n", "line 1: the header is 'input,output', not"),
        ("input_length,output_length\n", "the trace is empty"),
        ("input_length,output_length\n1,2\n3\n", "line 3: '3' has 1 values, not 2"),
        ("input_length,output_length\n1,2,3\n", "line 2: '1,2,3' has 3 values, not 2"),
        ("input_length,output_length\n1,2\n\n", "line 3: '' has 1 values, not 2"),
        ("input_length,output_length\n1,2.5\n", "line 2: output_length is '2.5', not a whole"),
        ("input_length,output_length\n1_0,2\n", "line 2: input_length is '1_0', not a whole"),
        ("input_length,output_length\n\u0663,2\n", "line 2: input_length is '\u0663', not a whole"),
        ("input_length,output_length\n,2\n", "line 2: input_length is '', not a whole"),
        ("input_length,output_length\n1,2\n0,2\n", "line 3: input_length is 0, but must be"),
        ("input_length,output_length\n1,-2\n", "line 2: output_length is -2, but must be"),
        (
            "arrival_ms,input_length,output_length\n5,1,1\n5,1,1\n4,1,1\n",
            "line 4: an arrival at 4 ms after one at 5 ms",
        ),
    ],
)
def test_load_trace_names_file_line_and_value(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError) as raised:
        load_trace(path)
    assert str(path) in str(raised.value)
    assert message in str(raised.value)


def mooncake_line(**changes: object) -> str:
    values = {"timestamp": 5, "input_length": 600, "output_length": 2, "hash_ids": [7, 8]}
    return json.dumps(values | changes)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "line 2: '' is not JSON: Expecting value at character 1"),
        ("{", "line 2: '{' is not JSON"),
        ("[" * 100_000, "line 2: "),
        ("[]", "line 2: '[]' is not an object"),
        ("7", "line 2: '7' is not an object"),
        ("{}", "line 2: the keys are [], not ['timestamp', 'input_length', "),
        (mooncake_line(more=1), "'hash_ids', 'more'], not"),
        (mooncake_line()[:-1] + ', "timestamp": 6}', "'hash_ids', 'timestamp'], not"),
        (mooncake_line(timestamp=None), "line 2: timestamp is None, not a whole number"),
        (mooncake_line(timestamp=4), "line 2: an arrival at 4 ms after one at 5 ms"),
        (mooncake_line(input_length=600.0), "line 2: input_length is 600.0, not a whole"),
        (mooncake_line(output_length=True), "line 2: output_length is True, not a whole"),
        (mooncake_line(output_length="2"), "line 2: output_length is '2', not a whole"),
        (mooncake_line(output_length=0), "line 2: output_length is 0, but must be"),
        (mooncake_line(hash_ids=3), "line 2: hash_ids is 3, not a list"),
        (mooncake_line(hash_ids=[1, "2"]), "line 2: one of hash_ids is '2', not a whole"),
        (mooncake_line(hash_ids=[1]), "line 2: 1 hash_ids, but a prompt of 600 tokens has 2"),
        (mooncake_line(hash_ids={}), "line 2: 0 hash_ids, but a prompt of 600 tokens has 2"),
    ],
    ids=lambda value: value[:40],
)
def test_load_trace_names_line_and_value_of_jsonl(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{mooncake_line()}\n{line}\n")
    with pytest.raises(ValueError) as raised:
        load_trace(path)
    assert f"{path}, line 2: " in str(raised.value)
    assert message in str(raised.value)


def test_load_trace_reads_jsonl(tmp_path: Path) -> None:
    text = f"{mooncake_line()}\n{mooncake_line(hash_ids=[7, 9], timestamp=6)}\n"
    (tmp_path / "own.jsonl").write_text(text)
    (tmp_path / "own.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    expected = [Request(600, 2, 5, (7, 8)), Request(600, 2, 6, (7, 9))]
    assert load_trace(tmp_path / "own.jsonl") == expected
    assert load_trace(tmp_path / "own.jsonl.gz") == expected


@pytest.mark.parametrize(("suffix", "end"), [("csv", "line 1"), ("jsonl", "the trace is empty")])
def test_load_trace_rejects_an_empty_file(tmp_path: Path, suffix: str, end: str) -> None:
    path = tmp_path / f"empty.{suffix}"
    path.touch()
    with pytest.raises(ValueError, match=rf"empty\.{suffix}.*{end}"):
        load_trace(path)


def test_load_trace_names_the_suffixes(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(mooncake_line())
    with pytest.raises(ValueError, match=r"trace\.json: the name must end with one of \.csv, "):
        load_trace(path)


def test_load_trace_reads_csv_and_gzip_alike(tmp_path: Path) -> None:
    text = "input_length,output_length\n12,3\n7,1\n"
    (tmp_path / "own.csv").write_text(text)
    (tmp_path / "own.csv.gz").write_bytes(gzip.compress(text.encode()))
    expected = [Request(12, 3), Request(7, 1)]
    assert load_trace(tmp_path / "own.csv") == expected
    assert load_trace(str(tmp_path / "own.csv.gz")) == expected


@pytest.mark.parametrize("damage", ["not gzip", "truncated", "corrupt", "not text"])
def test_load_trace_names_an_unreadable_file(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "bad.csv.gz"
    # Lines that differ, so that there is compressed content to damage.
    lines = "".join(f"{number},{number * number}\n" for number in range(1, 500))
    packed = gzip.compress(f"input_length,output_length\n{lines}".encode())
    path.write_bytes(
        {
            "not gzip": lines.encode(),
            "truncated": packed[: len(packed) // 2],
            "corrupt": packed[:10] + b"\xff" * 40 + packed[50:],
            "not text": gzip.compress(b"\xff\xfe\x00"),
        }[damage]
    )
    with pytest.raises(ValueError, match=r"bad\.csv\.gz: cannot be read"):
        load_trace(path)


def test_load_trace_lists_the_shipped_names(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no trace 'azure': .*azure_conv, mooncake_.*\) nor"):
        load_trace("azure")
    with pytest.raises(ValueError, match="nor a file"):
        load_trace(tmp_path)


def test_select_rejects() -> None:
    request = Request(4000, 97)
    with pytest.raises(ValueError, match="view is 'half', but must be one of le4096, full"):
        select([request], "half", 160_000)
    with pytest.raises(ValueError, match="num_slots is 0, but must be at least 1"):
        select([request], "full", 0)
    with pytest.raises(ValueError, match="the trace is empty"):
        select([], "full", 160_000)
    with pytest.raises(ValueError, match="its limit is 4096 tokens, the shortest has 4097"):
        select([request], "le4096", 160_000)
