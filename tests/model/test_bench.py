"""The benchmark against ``transformers`` compares two equal things. Its times are no test."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedattn.bench import generate as bench
from pagedattn.cli import main
from pagedattn.model import load_model


@pytest.fixture(autouse=True)
def threads_as_before() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_both_sides_answer_alike(
    tiny_file: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "result.json"
    options = ["--num-prompts", "2", "--new-tokens", "6", "--repeats", "2", "--threads", "1"]
    path = str(tiny_file.write({"llama.context_length": 128}))
    arguments = ["bench", "generate", "--model", path, *options, "--json", str(out)]
    monkeypatch.setattr("sys.argv", ["pagedattn", *arguments])
    assert main() == 0
    result = json.loads(out.read_text())
    assert result["command"].startswith(f"pagedattn bench generate --model {path} --num-prompts 2")
    assert result["prompt_tokens"] == [8, 24]
    assert result["equal_answers"] == "2 of 2"
    rates = result["tokens_per_second"]
    seconds = result["seconds"]
    assert {len(times) for times in seconds.values()} == {2}
    # 2 prompts of 6 tokens by the median time; rates are rounded to a tenth.
    for name, times in seconds.items():
        assert rates[name] == pytest.approx(12 / (sum(times) / 2), rel=0.05)
    assert result["ratio"] == pytest.approx(
        rates["pagedattn"] / rates["transformers"], rel=0.01, abs=0.01
    )
    assert "transformers" in capsys.readouterr().out


def test_prompts_differ(tiny_file: Any) -> None:
    _, tokenizer = load_model(tiny_file.write())
    prompts = bench.mixed_prompts(tokenizer, 16)
    assert [len(prompt) for prompt in prompts] == list(range(8, 249, 16))
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 16


def test_number_below_one() -> None:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    with pytest.raises(ValueError, match="new_tokens must be at least 1, got 0"):
        bench.measure(parser.parse_args(["--new-tokens", "0"]))


def test_transformers_missing(tiny_file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = load_model(tiny_file.write())
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ValueError, match="pip install transformers"):
        bench.to_transformers(model)
