"""The tokenizer that a GGUF file has in its metadata.

The file holds the vocabulary, the merges and the kinds of the tokens, and names the rule by which
text is cut into words before that. Source: llama.cpp's src/llama-vocab.cpp.
"""

from typing import Any

from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from pagedattn.model.gguf_file import GGUFFile
from pagedattn.model.tokenizer import Tokenizer

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # values of tokenizer.ggml.token_type

# Words of text: an ending such as 's, letters, digits, signs, ends of lines, spaces.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|"
    r" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_WORDS = WORDS.format(digits=r"\p{N}{1,3}")
QWEN2_WORDS = WORDS.format(digits=r"\p{N}")


def pre_tokenizer(kind: str) -> pre_tokenizers.PreTokenizer | None:
    """How text is cut before BPE, by ``tokenizer.ggml.pre``; None for a kind not handled here."""
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    match kind:
        case "gpt-2":
            return words
        case "smollm":
            digits = pre_tokenizers.Digits(individual_digits=True)
            return pre_tokenizers.Sequence([digits, words])
        case "llama-bpe" | "qwen2":
            regex = Regex(LLAMA3_WORDS if kind == "llama-bpe" else QWEN2_WORDS)
            split = pre_tokenizers.Split(regex, behavior="isolated")
            return pre_tokenizers.Sequence([split, bytes_only])
    return None


def read_tokenizer(file: GGUFFile) -> Tokenizer:
    """The tokenizer of the file.

    Raises ModelFileError for a vocabulary that is damaged or of a kind not handled here.
    """
    model = file.value("tokenizer.ggml.model", str)
    pre = file.value("tokenizer.ggml.pre", str, "none")
    cut = pre_tokenizer(pre)
    if model != "gpt2" or cut is None:
        raise file.error(f"tokenizer {model!r} with pre-tokenisation {pre!r} is not supported")
    tokens, types, merges = _read_vocabulary(file)
    # Rows of the model that no token has: the file gives them names, but text has none.
    vocab = {token: i for i, token in enumerate(tokens) if types[i] != UNUSED}
    num_known = 1 + max(vocab.values(), default=-1)
    fast = FastTokenizer(BPE(vocab, merges, ignore_merges=pre == "llama-bpe"))
    fast.pre_tokenizer = cut
    if pre == "qwen2":
        fast.normalizer = normalizers.NFC()
    special = [t for t, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    added = [t for t, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED]
    fast.add_special_tokens([AddedToken(t, normalized=False) for t in special])
    fast.add_tokens([AddedToken(t, normalized=False) for t in added])

    bos = _token_id(file, "tokenizer.ggml.bos_token_id", len(tokens))
    eos = _token_id(file, "tokenizer.ggml.eos_token_id", num_known)
    end_of_turn = _token_id(file, "tokenizer.ggml.eot_token_id", num_known)
    if file.value("tokenizer.ggml.add_bos_token", bool, pre == "llama-bpe"):
        if bos is None:
            raise file.error("tokenizer.ggml.bos_token_id is missing")
        fast.post_processor = TemplateProcessing(
            single=["bos", "$A"],
            special_tokens=[{"id": "bos", "ids": [bos], "tokens": [tokens[bos]]}],
        )
    return Tokenizer(
        fast,
        len(tokens),
        eos_token_ids=[i for i in (eos, end_of_turn) if i is not None],
        bos_token="" if bos is None else tokens[bos],
        eos_token="" if eos is None else tokens[eos],
        chat_template=file.value("tokenizer.chat_template", str, ""),
    )


def _read_vocabulary(file: GGUFFile) -> tuple[list[str], list[int], list[Any]]:
    """Tokens, the kind of each, and merges, once they fit together."""
    tokens = file.values("tokenizer.ggml.tokens", str)
    types = file.values("tokenizer.ggml.token_type", int, [1] * len(tokens))
    merges: list[Any] = [tuple(m.split(" ")) for m in file.values("tokenizer.ggml.merges", str)]
    if len(types) != len(tokens):
        raise file.error(f"tokenizer: {len(tokens)} tokens, but {len(types)} token types")
    different = len(set(tokens))
    if different != len(tokens):
        raise file.error(f"tokenizer: {len(tokens)} tokens, only {different} different ones")
    known = {token for token, kind in zip(tokens, types, strict=True) if kind != UNUSED}
    for pair in merges:
        if len(pair) != 2 or not {*pair, "".join(pair)} <= known:
            raise file.error(f"tokenizer: merge {' '.join(pair)!r} is not of two known tokens")
    return tokens, types, merges


def _token_id(file: GGUFFile, key: str, vocab_size: int) -> int | None:
    if not file.has(key):
        return None
    token_id = file.value(key, int)
    if not 0 <= token_id < vocab_size:
        raise file.error(f"{key} is {token_id}, the vocabulary has {vocab_size} tokens")
    return token_id
