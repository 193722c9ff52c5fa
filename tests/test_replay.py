"""`pagedattn replay`: every recording of vLLM's manager, and what is said of one that differs."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from pagedattn import manager
from pagedattn.cli import main
from pagedattn.replay import GROUP_TYPES, RecordingError, read_recording, replay

_FOLDER = Path(__file__).parent / "data" / "recorded_answers"
_FILES = sorted(path.name for path in _FOLDER.glob("*.json.gz"))

Json = dict[str, Any]


def test_there_are_all_recordings() -> None:
    assert len(_FILES) == 28


@pytest.mark.parametrize("name", _FILES)
def test_every_answer_is_the_recorded_one(name: str, capsys: Any) -> None:
    path = _FOLDER / name
    operations = sum(
        len(script["ops"]) for script in json.loads(gzip.decompress(path.read_bytes()))
    )
    status = main(["replay", str(path)])
    out = capsys.readouterr().out
    assert (status, out) == (0, f"{path}: 12 scripts, {operations} operations, all as recorded\n")


def _alloc(found: Any, table: Any, free: int, **options: Any) -> tuple[Json, Json]:
    return (
        {"op": "alloc", "id": "r", "new": 5, **options},
        {"op": "alloc", "id": "r", "new_blocks": found, "table": table, "free": free},
    )


def _script(*pairs: tuple[Json, Json], **config: Any) -> Json:
    """A script of one request of 9 tokens, and these operations, on full attention."""
    first = (
        {"op": "request", "id": "r", "tokens": list(range(9))},
        {"op": "request", "id": "r", "hashes": 2, "table": [[]], "free": 9},
    )
    steps = [first, *pairs]
    return {
        "config": {"num_blocks": 10, "block_size": 4, "groups": [{"type": "full"}], **config},
        "ops": [operation for operation, _ in steps],
        "expect": [answer for _, answer in steps],
    }


@pytest.fixture
def recording(tmp_path: Path) -> Any:
    """``recording(scripts)``: the path of a file that holds them."""

    def write(content: Any) -> Path:
        path = tmp_path / "recording.json"
        path.write_text(json.dumps(content))
        return path

    return write


def test_the_first_answer_that_differs_is_shown(recording: Any, capsys: Any) -> None:
    right = _script(_alloc([[1, 2]], [[1, 2]], 7))
    wrong = _script(_alloc([[1, 2]], [[1, 2]], 7), _alloc([[3]], [[1, 2, 4]], 5))
    path = recording([right, wrong])
    assert main(["replay", str(path)]) == 1
    out = capsys.readouterr().out
    assert out == (
        f'{path}: script 1, operation 2, {{"op": "alloc", "id": "r", "new": 5}}: free\n'
        "    found:    6\n    recorded: 5\n"
    )


def test_one_file_after_another(recording: Any, capsys: Any) -> None:
    path = recording([_script(_alloc(None, [[]], 9))])
    good = _FOLDER / "mla.json.gz"
    assert main(["replay", str(path), str(good)]) == 1
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{path}: script 0, operation 1")
    assert last.startswith(f"{good}: 12 scripts")


def test_a_missing_answer_and_one_too_many() -> None:
    operation, answer = _alloc([[1, 2]], [[1, 2]], 7)
    less = {key: value for key, value in answer.items() if key != "new_blocks"}
    difference = replay([_script((operation, less))], manager)
    assert difference is not None
    assert (difference.key, difference.found) == ("new_blocks", [[1, 2]])
    assert "recorded: nothing" in str(difference)
    difference = replay([_script((operation, answer | {"more": 1}))], manager)
    assert difference is not None and "found:    nothing" in str(difference)


def test_the_order_of_keys_does_not_matter() -> None:
    operation, answer = _alloc([[1, 2]], [[1, 2]], 7)
    assert replay([_script((operation, dict(reversed(answer.items()))))], manager) is None


def test_an_error_is_an_answer() -> None:
    """Which one it is does not matter, but that it is one."""
    refused = {"op": "alloc", "id": "r", "error": "AssertionError", "table": [[]], "free": 9}
    operation, given = _alloc([[1, 2]], [[1, 2]], 7)
    assert replay([_script((operation | {"new": 0}, refused))], manager) is None
    difference = replay([_script((operation, refused))], manager)
    assert difference is not None and difference.key == "error"
    difference = replay([_script((operation | {"new": 0}, given))], manager)
    assert difference is not None and difference.key == "error"
    assert "nothing to give slots for" in str(difference)


@pytest.mark.parametrize(
    ("options", "computed"), [({}, 5), ({"advance": 2}, 2), ({"advance": False}, 0)]
)
def test_how_far_a_request_comes(options: Json, computed: int) -> None:
    """4 more tokens behind the computed ones need 3, 2 or 1 blocks of 4 in all."""
    num_blocks = -(-(computed + 4) // 4)
    new = [3] if num_blocks == 3 else []
    second = _alloc([new], [[1, 2, *new]], 7 - len(new), new=4)
    assert replay([_script(_alloc([[1, 2]], [[1, 2]], 7, **options), second)], manager) is None


@pytest.mark.parametrize("kind", GROUP_TYPES)
def test_every_kind_of_group(kind: str) -> None:
    group = {"type": kind, "block_size": 4, "window": 8, "chunk": 8, "mode": "align"}
    config = {
        "num_blocks": 20,
        "max_model_len": 64,
        "enable_caching": kind != "cross",
        "groups": [group | {"spec_blocks": 1, "eagle": False}],
    }
    operation, answer = _alloc([[1, 2]], [[1, 2]], 17, encoder=5)
    request: Json = {"op": "request", "id": "r", "tokens": list(range(8))}
    hashes = 0 if kind == "cross" else 2
    if kind == "mamba":  # a state, none for the first block, and one for the draft
        answer |= {"new_blocks": [[0, 1, 2]], "table": [[0, 1, 2]]}
    first = {"op": "request", "id": "r", "hashes": hashes, "table": [[]], "free": 19}
    script = {"config": config, "ops": [request, operation], "expect": [first, answer]}
    assert replay([script], manager) is None


# What is no recording.


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is no JSON, gzipped or not"),
        (b"\x1f\x8bxx", "is no JSON, gzipped or not"),
        (b"\xff\xfe\x00", "is no JSON, gzipped or not"),
        (b"{}", "holds no list of scripts"),
        (b"[3]", "script 0: it is 3, no object"),
        (b'[{"config": {}}]', "script 0: it lacks expect, ops"),
    ],
)
def test_files_that_hold_something_else(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(RecordingError, match=message):
        read_recording(path)


_NEW: Json = {"op": "new_step"}
_NEW_PAIR: tuple[Json, Json] = (_NEW, {})


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (_script(({"op": "fork", "id": "r"}, {})), "operation 1 is 'fork'; known: request, hit"),
        (_script(({"op": "free"}, {})), "operation 1, free, lacks id"),
        (_script(({"op": "free", "id": "s"}, {})), "operation 1, free: there is no request 's'"),
        (_script(({"op": "free", "id": 3}, {})), "operation 1, free,: id is 3, no string"),
        (_script(({"op": "hit", "id": "r", "n": 3}, {})), "has the unknown key n; known: id, op"),
        (_script(_alloc(0, 0, 0, new="5")), "new is '5', no integer"),
        (_script(_alloc(0, 0, 0, lookahead=True)), "lookahead is True, no integer"),
        (_script(({"op": "evict", "ids": [1, "2"]}, {})), "no list of integers"),
        (_script(("free", {})), "operation 1 is 'free'"),  # type: ignore[arg-type]
        (_script((_NEW, [])), "the answer to operation 1 is"),  # type: ignore[arg-type]
        (
            _script(_NEW_PAIR, groups=[]) | {"expect": []},
            "2 operations and 0 answers",
        ),
        (_script(_NEW_PAIR, groups=3), "groups is 3, no list"),
        (_script(_NEW_PAIR, groups=[{"type": "linear"}]), "group 0 has type 'linear'; known: full"),
        (_script(_NEW_PAIR, groups=[{"type": "sliding"}]), "group 0, sliding, lacks window"),
        (_script(_NEW_PAIR, groups=[{"type": "full", "size": 1}]), "the unknown key size"),
        (_script(_NEW_PAIR, blocks=7), "config has the unknown key blocks"),
        (_script(_NEW_PAIR, num_blocks="7"), "num_blocks is '7', no integer"),
    ],
)
def test_scripts_with_unknown_words(recording: Any, script: Json, message: str) -> None:
    with pytest.raises(RecordingError) as error:
        read_recording(recording([_script(), script]))
    assert "script 1: " in str(error.value) and message in str(error.value)


def test_what_is_wrong_is_said_in_one_line(recording: Any, capsys: Any, tmp_path: Path) -> None:
    assert main(["replay", str(recording([{}]))]) == 2
    assert main(["replay", str(tmp_path / "missing.json")]) == 2
    assert main(["replay", str(recording([_script(num_blocks=0)]))]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3 and all(line.startswith("pagedattn: error: ") for line in errors)
    assert "num_blocks must be at least 1, got 0" in errors[2]


def test_whose_manager_it_is(recording: Any, capsys: Any, tmp_path: Path) -> None:
    path = recording([_script(_alloc([[1, 2]], [[1, 2]], 7))])
    assert main(["replay", "--stage", "06", str(path)]) == 0
    assert main(["replay", "--stage", "04", str(path)]) == 2
    assert "04 has no KVCacheManager" in capsys.readouterr().err
    theirs = tmp_path / "theirs.py"
    theirs.write_text(
        "from pagedattn.manager import *\n"
        "from pagedattn import manager\n"
        "class KVCacheManager(manager.KVCacheManager):\n"
        "    def allocate_slots(self, request, num_new_tokens, **options):\n"
        "        return super().allocate_slots(request, num_new_tokens + 4, **options)\n"
    )
    assert main(["replay", "--impl", str(theirs), str(path)]) == 1
    assert "found:    6" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ("return 1 + '1'", 1, "TypeError: unsupported operand"),
        ("raise NotImplementedError('task 6.1: slots')", 2, "to do: task 6.1: slots"),
    ],
)
def test_code_that_breaks(
    recording: Any, capsys: Any, tmp_path: Path, body: str, status: int, message: str
) -> None:
    path = recording([_script(_alloc([[1, 2]], [[1, 2]], 7))])
    theirs = tmp_path / "theirs.py"
    theirs.write_text(
        "from pagedattn.manager import *\n"
        "from pagedattn import manager\n"
        "class KVCacheManager(manager.KVCacheManager):\n"
        f"    def allocate_slots(self, request, num_new_tokens, **options):\n        {body}\n"
    )
    assert main(["replay", "--impl", str(theirs), str(path)]) == status
    output = capsys.readouterr()
    assert message in output.out + output.err
