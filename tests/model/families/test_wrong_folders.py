"""Every wrong folder is refused: file, tensor or key by name, and before any weight is read.

An incomplete folder that loads leaves random memory as weights (GeeeekExplorer/nano-vllm#264).
"""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagedattn.cli import main
from pagedattn.model import ModelFileError, load_model

pytestmark = pytest.mark.usefixtures("nothing_is_read")
CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def change_tensors(file: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def shard_of(sharded: Any, name: str) -> Path:
    file: Path = sharded.path / sharded.read(INDEX)["weight_map"][name]
    return file


def test_the_folders_are_good(folder: Any, sharded: Any, nothing_is_read: Any) -> None:
    """And what else lies in them is no concern of the loader."""
    nothing_is_read()
    for good in (folder, sharded):
        (good.path / "pytorch_model.bin").write_bytes(b"never opened")
        (good.path / "README.md").write_text("words")
        load_model(good.path)


class TestFiles:
    def test_empty_folder(self, tmp_path: Path, refused: Any) -> None:
        (tmp_path / "empty").mkdir()
        refused(tmp_path / "empty", "config.json: no such file")

    @pytest.mark.parametrize("name", [CONFIG, "tokenizer.json"])
    def test_missing_file(self, folder: Any, name: str, refused: Any) -> None:
        (folder.path / name).unlink()
        refused(folder.path, f"{name}: no such file")

    def test_no_weights(self, folder: Any, refused: Any) -> None:
        (folder.path / SINGLE).unlink()
        refused(folder.path, f"neither {SINGLE} nor {INDEX}")

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
    def test_only_pickles(self, folder: Any, name: str, refused: Any) -> None:
        """To unpickle is to run what the file says: here it would make a file."""

        class Program:
            def __reduce__(self) -> Any:
                return (os.mkdir, (str(folder.path / "ran"),))

        (folder.path / SINGLE).unlink()
        torch.save(Program(), folder.path / name)
        refused(folder.path, name, "pickled")
        assert not (folder.path / "ran").exists()

    def test_missing_shard(self, sharded: Any, refused: Any) -> None:
        shard = shard_of(sharded, Q_PROJ)
        shard.unlink()
        refused(sharded.path, f"{shard}: no such file")

    def test_folder_in_place_of_a_shard(self, sharded: Any, refused: Any) -> None:
        shard = shard_of(sharded, Q_PROJ)
        shard.unlink()
        shard.mkdir()
        refused(sharded.path, f"{shard}: not a file")

    def test_cut_off(self, folder: Any, refused: Any) -> None:
        """At every length: within the header, within a tensor, and one byte before the end."""
        file = folder.path / SINGLE
        data = file.read_bytes()
        for length in [*range(0, len(data), 4999), len(data) - 1]:
            file.write_bytes(data[:length])
            refused(folder.path, SINGLE, "cut off")

    def test_one_byte_of_the_header_changed(self, folder: Any, nothing_is_read: Any) -> None:
        """The folder loads or is refused, whichever byte it is: no other error."""
        nothing_is_read()
        file = folder.path / SINGLE
        data = file.read_bytes()
        header = 8 + int.from_bytes(data[:8], "little")
        choose = random.Random(0)
        outcomes = set()
        for _ in range(100):
            changed = bytearray(data)
            changed[choose.randrange(header)] ^= choose.randrange(1, 256)
            file.write_bytes(changed)
            try:
                load_model(folder.path)
                outcomes.add("loaded")
            except ModelFileError as error:
                assert str(folder.path) in str(error)
                outcomes.add("refused")
        assert "refused" in outcomes

    @pytest.mark.parametrize("content", ["", "{", "[]", '"text"', "\udcff", "[" * 100_000])
    @pytest.mark.parametrize("name", [CONFIG, "tokenizer.json", "generation_config.json"])
    def test_no_json_object(self, folder: Any, name: str, content: str, refused: Any) -> None:
        (folder.path / name).write_bytes(content.encode(errors="surrogateescape"))
        refused(folder.path, name)

    def test_names_too_long_for_a_file(self, sharded: Any, refused: Any) -> None:
        refused(Path("x" * 5000), "File name too long")
        index = sharded.read(INDEX)["weight_map"]
        sharded.change(INDEX, weight_map=index | {"first": "A" * 5000})
        refused(sharded.path, "A" * 5000, "File name too long")

    def test_path_out_of_the_folder(self, sharded: Any, refused: Any) -> None:
        shard = shard_of(sharded, Q_PROJ)
        shutil.move(shard, sharded.path.parent / shard.name)
        index = json.loads((sharded.path / INDEX).read_text())["weight_map"]
        moved = {n: f"../{s}" if s == shard.name else s for n, s in index.items()}
        sharded.change(INDEX, weight_map=moved)
        refused(sharded.path, INDEX, f"'../{shard.name}', expected a file name")

    @pytest.mark.parametrize(
        ("weight_map", "words"),
        [
            (None, "weight_map is missing"),
            ({}, "weight_map is empty"),
            ({"a": 7}, "tensor a is in 7"),
            ([], "weight_map is [], expected dict"),
        ],
    )
    def test_wrong_index(self, sharded: Any, weight_map: Any, words: str, refused: Any) -> None:
        sharded.change(INDEX, weight_map=weight_map)
        refused(sharded.path, INDEX, words)

    def test_what_the_command_says(self, folder: Any, capsys: pytest.CaptureFixture[str]) -> None:
        (folder.path / SINGLE).unlink()
        assert main(["generate", "--model", str(folder.path), "--prompt", "Hi"]) == 2
        assert f"{folder.path}: holds neither" in capsys.readouterr().err


class TestTensors:
    def test_missing(self, folder: Any, refused: Any) -> None:
        file = folder.path / SINGLE
        for name in load_file(file):
            data = file.read_bytes()
            change_tensors(file, lambda tensors, name=name: tensors.pop(name))  # type: ignore[misc]
            refused(folder.path, f"tensor {name} is missing")
            file.write_bytes(data)

    def test_wrong_shape(self, folder: Any, sharded: Any, refused: Any) -> None:
        for path, file in (
            (folder.path, folder.path / SINGLE),
            (sharded.path, shard_of(sharded, Q_PROJ)),
        ):
            rows = len(load_file(file)[Q_PROJ])
            change_tensors(file, lambda t: t.update({Q_PROJ: t[Q_PROJ][1:].clone()}))
            refused(
                path, f"{file}: tensor {Q_PROJ} has shape [{rows - 1}, 32], expected [{rows}, 32]"
            )

    def test_index_names_a_tensor_that_its_shard_lacks(self, sharded: Any, refused: Any) -> None:
        shard = shard_of(sharded, Q_PROJ)
        change_tensors(shard, lambda tensors: tensors.pop(Q_PROJ))
        refused(sharded.path, f"{shard}: tensor {Q_PROJ} is missing", INDEX)

    def test_same_tensor_in_two_shards(self, sharded: Any, refused: Any) -> None:
        other = shard_of(sharded, "model.norm.weight")
        change_tensors(other, lambda tensors: tensors.update({Q_PROJ: torch.ones(2)}))
        refused(sharded.path, f"{other}: unexpected tensor {Q_PROJ}", INDEX)

    @pytest.mark.parametrize(
        "name",
        ["model.layers.0.self_attn.q_proj.bias", "model.layers.2.mlp.up_proj.weight", "score"],
    )
    def test_unexpected(self, folder: Any, name: str, refused: Any) -> None:
        change_tensors(folder.path / SINGLE, lambda t: t.update({name: torch.ones(2)}))
        refused(folder.path, f"{SINGLE}: unexpected tensor {name}")

    def test_rotary_frequencies_are_harmless(self, folder: Any, nothing_is_read: Any) -> None:
        """Older folders hold them; they follow from config.json."""
        name = "model.layers.0.self_attn.rotary_emb.inv_freq"
        change_tensors(folder.path / SINGLE, lambda t: t.update({name: torch.ones(4)}))
        nothing_is_read()
        load_model(folder.path)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn])
    def test_type(self, folder: Any, dtype: torch.dtype, refused: Any) -> None:
        change_tensors(folder.path / SINGLE, lambda t: t.update({Q_PROJ: t[Q_PROJ].to(dtype)}))
        refused(folder.path, f"{SINGLE}: tensor {Q_PROJ} is of type")
