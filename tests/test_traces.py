"""Reading recorded traces, and the views of them."""

import gzip
import hashlib
from importlib import resources
from pathlib import Path

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


def test_shipped_trace_is_what_its_note_says() -> None:
    folder = resources.files("pagedattn.data") / "traces"
    assert shipped_traces() == ["azure_conv"]
    digest = hashlib.sha256((folder / "azure_conv.csv.gz").read_bytes()).hexdigest()
    assert f"sha256 of this file: {digest}" in (folder / "azure_conv.NOTE.md").read_text()
    licence = (folder / "AzurePublicDataset-CC-BY-4.0.txt").read_text()
    assert "Attribution 4.0 International" in licence


def test_azure_conv_is_loaded_whole_and_in_order() -> None:
    requests = load_trace("azure_conv")
    assert len(requests) == 9739
    assert requests[:2] == [Request(374, 44, 0), Request(396, 109, 4314)]
    assert max(request.total_length for request in requests) == 14089
    assert max(request.output_length for request in requests) == 1000


# Bad input.


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((0, 1), "input_length is 0, but must be at least 1"),
        ((1, 0), "output_length is 0, but must be at least 1"),
        ((1, 1, -1), "arrival_ms is -1, but must be at least 0"),
    ],
)
def test_request_rejects(lengths: tuple[int, ...], message: str) -> None:
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
            "line 4: arrival_ms is 4, after 5",
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
    with pytest.raises(ValueError, match=r"no trace 'azure': neither shipped \(azure_conv\) nor"):
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
