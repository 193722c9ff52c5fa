"""The tokenizer of a model folder: tokenizer.json, and what other files say about its tokens.

Source: transformers' tokenization_utils_base.py (which file says what, and which one wins).
"""

from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer

from pagedattn.model.json_file import JsonFile
from pagedattn.model.metadata import ModelFileError
from pagedattn.model.tokenizer import Tokenizer


def read_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of the folder, for a model of ``vocab_size`` tokens.

    Raises ModelFileError, naming file and key, for a tokenizer.json that is missing, damaged, of a
    kind not handled here, or larger than the model's vocabulary.
    """
    file = JsonFile(folder / "tokenizer.json")
    kind, decoder = file.value("model.type", str), file.value("decoder.type", str, "none")
    if (kind, decoder) != ("BPE", "ByteLevel"):
        raise file.error(
            f"tokenizer {kind!r} with decoder {decoder!r} is not supported, only byte-level BPE"
        )
    try:
        fast = FastTokenizer.from_file(str(file.path))
    except Exception as reason:  # the package has no class of its own for this
        raise file.error(f"no valid tokenizer: {reason}") from reason
    fast.no_truncation()
    fast.no_padding()
    largest = max(fast.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= vocab_size:
        raise file.error(f"holds token {largest}, but the model's vocab_size is {vocab_size}")

    config = JsonFile(folder / "tokenizer_config.json", optional=True)
    eos_token = _token(config, "eos_token")
    eos_token_ids = _eos_token_ids(folder, largest + 1)
    eos = fast.token_to_id(eos_token)
    if eos_token and eos is None:
        raise config.error(f"eos_token {eos_token!r} is not in the vocabulary")
    return Tokenizer(
        fast,
        vocab_size,
        eos_token_ids=eos_token_ids if eos is None else {*eos_token_ids, eos},
        bos_token=_token(config, "bos_token"),
        eos_token=eos_token,
        chat_template=_chat_template(folder, config),
    )


def _token(file: JsonFile, key: str) -> str:
    """A token's text: written as such, or as an object that holds it."""
    return file.value(f"{key}.content", str, "") or file.value(key, str, "")


def _eos_token_ids(folder: Path, vocab_size: int) -> list[int]:
    """What ends an answer, by generation_config.json or, where it does not say, config.json."""
    file = JsonFile(folder / "generation_config.json", optional=True)
    if not file.has("eos_token_id"):
        file = JsonFile(folder / "config.json")
    found = file.get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise file.error(
                f"eos_token_id is {token_id!r:.80}, the tokenizer has {vocab_size} tokens"
            )
    return ids


def _chat_template(folder: Path, config: JsonFile) -> str:
    """The template in a file of its own, or else in tokenizer_config.json, there perhaps one of
    several by name; "" if there is none."""
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as reason:
            raise ModelFileError(f"{path}: {reason}") from reason
    if not isinstance(config.get("chat_template"), list):
        return config.value("chat_template", str, "")
    templates = config.values("chat_template", dict)
    return next((str(t.get("template", "")) for t in templates if t.get("name") == "default"), "")
