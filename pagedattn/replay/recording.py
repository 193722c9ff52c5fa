"""Recordings of a KV cache manager: a configuration, operations, and what was answered to each.

A file is a JSON list of scripts, gzipped or not; a script is ``{"config", "ops", "expect"}``, and
``expect[i]`` is the answer to ``ops[i]``. What the words mean stands in ``player``.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

Json = dict[str, Any]

GROUP_TYPES = ("full", "mla", "sliding", "chunked", "mamba", "cross")

_SCRIPT = {"config", "ops", "expect"}
_CONFIG = (
    {"num_blocks", "groups"},
    {"block_size", "hash_block_size", "max_model_len", "max_num_batched_tokens"}
    | {"enable_caching", "use_eagle", "events", "dcp", "pcp"},
)
_GROUP = ({"type"}, {"block_size", "window", "chunk", "mode", "spec_blocks", "eagle"})
_NEEDED_BY_TYPE = {"sliding": "window", "chunked": "chunk"}

# The keys of each operation that must be there, and those that may.
_OPERATIONS: dict[str, tuple[set[str], set[str]]] = {
    "request": ({"id", "tokens"}, {"salt", "lora", "mm", "skip_read"}),
    "hit": ({"id"}, set()),
    "alloc": (
        {"id", "new"},
        {"use_hit", "lookahead", "external", "delay", "encoder", "must_fit", "advance"},
    ),
    "append": ({"id", "tokens"}, set()),
    "set_computed": ({"id", "n"}, set()),
    "free": ({"id"}, set()),
    "cache": ({"id", "n"}, set()),
    "skip": ({"id", "n"}, set()),
    "common": ({"id"}, set()),
    "evict": ({"ids"}, set()),
    "reset": (set(), set()),
    "new_step": (set(), set()),
    "new_ids": (set(), set()),
    "stats": (set(), set()),
    "events": (set(), set()),
    "state": (set(), set()),
}

_INTEGERS = (
    {"num_blocks", "block_size", "hash_block_size", "max_model_len", "max_num_batched_tokens"}
    | {"dcp", "pcp", "window", "chunk", "spec_blocks"}
    | {"new", "lookahead", "external", "encoder", "n"}
)
_LISTS_OF_INTEGERS = {"tokens", "ids"}


class RecordingError(ValueError):
    """A file that is no recording; the message says where and why."""


def read_recording(path: Path) -> list[Json]:
    """The scripts of a file. Raises RecordingError for what is no recording, OSError for a file
    that cannot be read."""
    content = path.read_bytes()
    try:
        if content.startswith(b"\x1f\x8b"):
            content = gzip.decompress(content)
        scripts = json.loads(content)
    except (ValueError, EOFError, OSError) as error:
        raise RecordingError(f"{path} is no JSON, gzipped or not: {error}") from error
    if not isinstance(scripts, list):
        raise RecordingError(f"{path} holds no list of scripts")
    for index, script in enumerate(scripts):
        try:
            _check_script(script)
        except RecordingError as error:
            raise RecordingError(f"{path}, script {index}: {error}") from error
    return scripts


def _check_script(script: Any) -> None:
    _check_keys("it", script, _SCRIPT, set())
    config, operations, answers = script["config"], script["ops"], script["expect"]
    _check_keys("config", config, *_CONFIG)
    for what, value in (("groups", config["groups"]), ("ops", operations), ("expect", answers)):
        if not isinstance(value, list):
            raise RecordingError(f"{what} is {value!r}, no list")
    for number, group in enumerate(config["groups"]):
        _check_group(f"group {number}", group)
    if len(operations) != len(answers):
        raise RecordingError(f"{len(operations)} operations and {len(answers)} answers")
    requests: set[str] = set()
    for number, (operation, answer) in enumerate(zip(operations, answers, strict=True)):
        _check_operation(f"operation {number}", operation, requests)
        if not isinstance(answer, dict):
            raise RecordingError(f"the answer to operation {number} is {answer!r}, no object")


def _check_group(what: str, group: Any) -> None:
    _check_keys(what, group, *_GROUP)
    if group["type"] not in GROUP_TYPES:
        raise RecordingError(f"{what} has type {group['type']!r}; known: {', '.join(GROUP_TYPES)}")
    needed = _NEEDED_BY_TYPE.get(group["type"])
    if needed and needed not in group:
        raise RecordingError(f"{what}, {group['type']}, lacks {needed}")


def _check_operation(what: str, operation: Any, requests: set[str]) -> None:
    """Adds the request that it brings, if it brings one."""
    if not isinstance(operation, dict) or operation.get("op") not in _OPERATIONS:
        name = operation.get("op") if isinstance(operation, dict) else operation
        raise RecordingError(f"{what} is {name!r}; known: {', '.join(_OPERATIONS)}")
    name = operation["op"]
    needed, possible = _OPERATIONS[name]
    _check_keys(f"{what}, {name},", operation, needed | {"op"}, possible)
    if name == "request":
        requests.add(operation["id"])
    elif "id" in operation and operation["id"] not in requests:
        raise RecordingError(f"{what}, {name}: there is no request {operation['id']!r}")


def _check_keys(what: str, value: Any, needed: set[str], possible: set[str]) -> None:
    if not isinstance(value, dict):
        raise RecordingError(f"{what} is {value!r}, no object")
    if missing := sorted(needed - value.keys()):
        raise RecordingError(f"{what} lacks {', '.join(missing)}")
    if unknown := sorted(value.keys() - needed - possible):
        known = ", ".join(sorted(needed | possible))
        raise RecordingError(f"{what} has the unknown key {', '.join(unknown)}; known: {known}")
    for key in value.keys() & _INTEGERS:
        if type(value[key]) is not int and not (
            key == "max_num_batched_tokens" and value[key] is None
        ):
            raise RecordingError(f"{what}: {key} is {value[key]!r}, no integer")
    for key in value.keys() & _LISTS_OF_INTEGERS:
        if not isinstance(value[key], list) or not {type(item) for item in value[key]} <= {int}:
            raise RecordingError(f"{what}: {key} is {value[key]!r}, no list of integers")
    if "id" in value and not isinstance(value["id"], str):
        raise RecordingError(f"{what}: id is {value['id']!r}, no string")
