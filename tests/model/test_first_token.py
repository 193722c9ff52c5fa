"""`pagedattn bench first_token` computes a prompt twice. Its times are no test."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedattn.cli import main


@pytest.fixture(autouse=True)
def threads_as_before() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_second_time_finds_all_but_the_last_token(
    tiny_file: Any, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "result.json"
    path = str(tiny_file.write({"llama.context_length": 128}))
    options = ["--prompt-tokens", "96", "--repeats", "2", "--threads", "1", "--json", str(out)]
    assert main(["bench", "first_token", "--model", path, *options]) == 0
    result = json.loads(out.read_text())
    # 96 tokens are 6 blocks of 16. The last token must be computed, and with it its block.
    assert (result["prompt_tokens"], result["hit_tokens"]) == (96, 80)
    assert result["equal_tokens"] is True
    assert [len(times) for times in result["seconds"].values()] == [2, 2]
    assert "16 tokens computed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--prompt-tokens", "0"], "prompt_tokens must be at least 1"),
        (["--repeats", "0"], "repeats must be at least 1"),
        (["--threads", "0"], "threads must be at least 1"),
        (["--prompt-tokens", "128"], "128"),
    ],
)
def test_wrong_numbers_are_refused(
    tiny_file: Any, capsys: Any, option: list[str], message: str
) -> None:
    path = str(tiny_file.write({"llama.context_length": 128}))
    assert main(["bench", "first_token", "--model", path, *option]) == 2
    assert message in capsys.readouterr().err
