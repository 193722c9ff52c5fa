"""The tokenizer of a folder, against ``transformers`` reading the same folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders
from tokenizers.models import Unigram

from pagedattn.cli import main
from pagedattn.model import ModelFileError, TextStream, Tokenizer
from pagedattn.model.folder_tokenizer import read_tokenizer
from pagedattn.model.gguf_tokenizer import pre_tokenizer

VOCAB_SIZE = 264  # of the model; the tokenizer has 262
CHAT = [{"role": "user", "content": "the thing"}, {"role": "assistant", "content": "é"}]
TEXTS = ["", "the other thé", "é 🙂\n\n 12", "<|turn|>the<|end|>", " the"]


@pytest.fixture
def folder(tmp_path: Path, reference_tokenizer: Any) -> Path:
    """A folder with a tokenizer and little else."""
    reference_tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    return tmp_path


@pytest.fixture
def change(folder: Path) -> Callable[..., None]:
    """``change(name, **changes)``: keys of a JSON file; it is made if it is not there."""

    def change(name: str, **changes: Any) -> None:
        file = folder / name
        found = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(found | changes))

    return change


def read(folder: Path) -> Tokenizer:
    return read_tokenizer(folder, VOCAB_SIZE)


@pytest.mark.parametrize("text", TEXTS)
def test_text(folder: Path, reference_tokenizer: Any, text: str) -> None:
    tokenizer = read(folder)
    ids = tokenizer.encode(text)
    assert ids == reference_tokenizer(text)["input_ids"]
    assert ids[0] == 1  # <|begin|>, from tokenizer.json's post-processor
    for skip in (False, True):
        decoded = reference_tokenizer.decode(ids, skip_special_tokens=skip)
        assert tokenizer.decode(ids, skip_special_tokens=skip) == decoded
    stream = TextStream(tokenizer)
    assert "".join([*map(stream.push, ids), stream.finish()]) == tokenizer.decode(ids)


def test_settings_for_training_are_not_followed(folder: Path, reference_tokenizer: Any) -> None:
    """Padding and truncation may be stored in tokenizer.json, too."""
    fast = FastTokenizer.from_file(str(folder / "tokenizer.json"))
    fast.enable_truncation(2)
    fast.enable_padding(length=100)
    fast.save(str(folder / "tokenizer.json"))
    text = "the other thing"
    assert read(folder).encode(text) == reference_tokenizer(text)["input_ids"]


def test_chat(folder: Path, reference_tokenizer: Any) -> None:
    """The template writes <|begin|> itself: it must not come twice."""
    tokenizer = read(folder)
    theirs = reference_tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)
    ids = tokenizer.encode_chat(CHAT)
    assert ids == theirs["input_ids"]
    assert tokenizer.render_chat(CHAT) == reference_tokenizer.decode(ids)
    assert ids.count(1) == 1


def test_places_of_the_chat_template(folder: Path, change: Any) -> None:
    """A file of its own before tokenizer_config.json; there it may be one of several."""
    assert (folder / "chat_template.jinja").exists()
    change("tokenizer_config.json", chat_template="from the config")
    assert read(folder).chat_template.startswith("{{ bos_token }}")
    (folder / "chat_template.jinja").unlink()
    assert read(folder).chat_template == "from the config"
    several = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    change("tokenizer_config.json", chat_template=several)
    assert read(folder).chat_template == "b"
    change("tokenizer_config.json", chat_template=several[:1])
    assert read(folder).chat_template == ""
    (folder / "tokenizer_config.json").unlink()
    assert read(folder).chat_template == ""


def test_what_ends_an_answer(folder: Path, change: Any) -> None:
    """The tokenizer's token 0, and those of generation_config.json or else of config.json."""
    assert read(folder).eos_token_ids == {0, 5}
    change("generation_config.json", temperature=0.7)
    assert read(folder).eos_token_ids == {0, 5}
    change("generation_config.json", eos_token_id=[7, 8])
    assert read(folder).eos_token_ids == {0, 7, 8}
    change("tokenizer_config.json", eos_token={"content": "<|turn|>", "special": True})
    assert read(folder).eos_token_ids == {2, 7, 8}
    change("tokenizer_config.json", eos_token=None)
    assert read(folder).eos_token_ids == {7, 8}


def test_tokens_that_the_model_has_and_the_tokenizer_lacks(folder: Path) -> None:
    """A model's vocabulary is often rounded up; no text belongs to what was added."""
    tokenizer = read(folder)
    assert len(tokenizer) == 262
    the = tokenizer.encode("the")[1]
    assert tokenizer.decode([262, the, 263]) == "the"
    with pytest.raises(ValueError, match="token 264"):
        tokenizer.decode([264])


@pytest.mark.parametrize("eos", [-1, 262, VOCAB_SIZE, "0", 1.0, True, [0, None]])
def test_wrong_end(folder: Path, change: Any, eos: Any) -> None:
    change("generation_config.json", eos_token_id=eos)
    with pytest.raises(ModelFileError, match=r"generation_config.json: eos_token_id is .* 262"):
        read(folder)


def test_end_outside_the_vocabulary(folder: Path, change: Any) -> None:
    change("tokenizer_config.json", eos_token="</s>")
    with pytest.raises(ModelFileError, match=r"tokenizer_config.json: eos_token '</s>'"):
        read(folder)


@pytest.mark.parametrize("eos", ["\ud800", {"content": "<|\udcff|>"}])
def test_end_that_is_no_text(folder: Path, change: Any, eos: Any) -> None:
    change("tokenizer_config.json", eos_token=eos)
    with pytest.raises(ModelFileError, match=r"tokenizer_config.json: eos_token.* no valid text"):
        read(folder)


def test_vocabulary_larger_than_the_model(folder: Path) -> None:
    with pytest.raises(ModelFileError, match=r"tokenizer.json: holds token 261, .* 261"):
        read_tokenizer(folder, 261)


def test_other_kinds(folder: Path, change: Any) -> None:
    path = folder / "tokenizer.json"
    good = path.read_text()
    change("tokenizer.json", decoder={"type": "WordPiece", "prefix": "##", "cleanup": True})
    with pytest.raises(ModelFileError, match=r"'BPE' with decoder 'WordPiece' is not supported"):
        read(folder)
    unigram = FastTokenizer(Unigram([("a", -1.0)]))
    unigram.decoder = decoders.ByteLevel()
    unigram.save(str(path))
    with pytest.raises(ModelFileError, match="'Unigram' with decoder 'ByteLevel'"):
        read(folder)
    path.write_text(good)
    change("tokenizer.json", model={"type": "BPE", "vocab": 7, "merges": []})
    with pytest.raises(ModelFileError, match="no valid tokenizer"):
        read(folder)


def test_words_of_qwen2() -> None:
    """As Llama 3's, but digits stand alone."""
    pre = pre_tokenizer("qwen2")
    assert pre is not None
    words = [word for word, _ in pre.pre_tokenize_str("It's 123\n\n(now)")]
    assert words == ["It", "'s", "Ġ", "1", "2", "3", "ĊĊ", "(now", ")"]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_generate_command(
    family: str, make_reference: Any, save: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """``pagedattn generate`` answers with a folder's model."""
    folder = save(make_reference(family))
    command = ["generate", "--model", str(folder.path), "--max-new-tokens", "5"]
    assert main([*command, "--prompt", "the thing", "--prompt", "other"]) == 0
    shown = capsys.readouterr().out
    assert f"{folder.path.name}: loaded in" in shown
    assert "5 tokens" in shown
