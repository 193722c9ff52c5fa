"""Text to tokens and back, from the vocabulary inside a GGUF file.

The vocabularies handled here are byte-level: a token is a run of bytes, not of characters, and a
character of several bytes may be cut between two tokens. So text is decoded from bytes, never
token by token.

Sources: byte-level BPE (Radford et al., "Language Models are Unsupervised Multitask Learners",
2019, section 2.2); the kinds of vocabulary follow llama.cpp's src/llama-vocab.cpp.
"""

import codecs
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE

from pagedattn.model.gguf_file import ModelFile

CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _pre_tokenizer(kind: str) -> pre_tokenizers.PreTokenizer | None:
    """How text is cut before BPE, by ``tokenizer.ggml.pre``; None for a kind not handled here."""
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    match kind:
        case "gpt-2":
            return words
        case "smollm":
            digits = pre_tokenizers.Digits(individual_digits=True)
            return pre_tokenizers.Sequence([digits, words])
        case "llama-bpe":
            split = pre_tokenizers.Split(Regex(LLAMA3_WORDS), behavior="isolated")
            bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            return pre_tokenizers.Sequence([split, bytes_only])
    return None


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary.

    A printable byte of Latin-1 stands for itself; the others, in order, are the characters from
    256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + rank): byte for rank, byte in enumerate(others)
    }


class Tokenizer:
    """A byte-level BPE vocabulary with its special tokens and its chat template.

    ``eos_token_ids`` are the tokens that end an answer. Raises ModelFileError for a file whose
    vocabulary is damaged or of a kind not handled here.
    """

    def __init__(self, file: ModelFile) -> None:
        model = file.value("tokenizer.ggml.model", str)
        pre = file.value("tokenizer.ggml.pre", str, "none")
        pre_tokenizer = _pre_tokenizer(pre)
        if model != "gpt2" or pre_tokenizer is None:
            raise file.error(f"tokenizer {model!r} with pre-tokenisation {pre!r} is not supported")
        tokens = file.values("tokenizer.ggml.tokens", str)
        types = file.values("tokenizer.ggml.token_type", int, [1] * len(tokens))
        merges: list[Any] = [tuple(m.split(" ")) for m in file.values("tokenizer.ggml.merges", str)]
        if len(types) != len(tokens):
            raise file.error(f"tokenizer: {len(tokens)} tokens, but {len(types)} token types")
        vocab = {token: token_id for token_id, token in enumerate(tokens)}
        if len(vocab) != len(tokens):
            raise file.error(f"tokenizer: {len(tokens)} tokens, only {len(vocab)} different ones")
        for pair in merges:
            if len(pair) != 2 or not {*pair, "".join(pair)} <= vocab.keys():
                raise file.error(f"tokenizer: merge {' '.join(pair)!r} is not of two known tokens")

        bpe = BPE(vocab, merges, ignore_merges=pre == "llama-bpe")
        self._fast = FastTokenizer(bpe)
        self._fast.pre_tokenizer = pre_tokenizer
        special = [t for t, kind in zip(tokens, types, strict=True) if kind == CONTROL]
        added = [t for t, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED]
        self._fast.add_special_tokens([AddedToken(t, normalized=False) for t in special])
        self._fast.add_tokens([AddedToken(t, normalized=False) for t in added])

        self._tokens: list[str] = tokens
        self._special_ids = frozenset(vocab[token] for token in special)
        self._whole_ids = self._special_ids | {vocab[token] for token in added}
        self._byte_of = _byte_alphabet()
        self._bos_id = self._token_id(file, "tokenizer.ggml.bos_token_id")
        self._adds_bos = file.value("tokenizer.ggml.add_bos_token", bool, pre == "llama-bpe")
        if self._adds_bos and self._bos_id is None:
            raise file.error("metadata tokenizer.ggml.bos_token_id is missing")
        self._eos_id = self._token_id(file, "tokenizer.ggml.eos_token_id")
        end_of_turn = self._token_id(file, "tokenizer.ggml.eot_token_id")
        self.eos_token_ids = frozenset(i for i in (self._eos_id, end_of_turn) if i is not None)
        self.chat_template = file.value("tokenizer.chat_template", str, "")

    def _token_id(self, file: ModelFile, key: str) -> int | None:
        if not file.has(key):
            return None
        token_id = file.value(key, int)
        if not 0 <= token_id < len(self._tokens):
            raise file.error(f"{key} is {token_id}, the vocabulary has {len(self._tokens)} tokens")
        return token_id

    def __len__(self) -> int:
        """The size of the vocabulary."""
        return len(self._tokens)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text. Names of special tokens in the text become those tokens.

        A byte that the vocabulary has no token for is left out; the default model's lacks some
        control characters and bytes that begin no assigned character.
        """
        ids = self._fast.encode(text, add_special_tokens=False).ids
        return [self._bos_id, *ids] if self._adds_bos and self._bos_id is not None else ids

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The tokens of a conversation, up to where the assistant's answer begins.

        ``messages`` are mappings with ``role`` and ``content``. Raises ValueError as
        ``render_chat`` does.
        """
        return self._fast.encode(self.render_chat(messages), add_special_tokens=False).ids

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The conversation as one text, by the chat template of the file.

        The template comes with the file and is a program: it runs sandboxed. Raises ValueError
        when the file has no template, or the template refuses the messages.
        """
        if not self.chat_template:
            raise ValueError("the model file has no chat template (tokenizer.chat_template)")
        for message in messages:
            if not {"role", "content"} <= message.keys():
                raise ValueError(f"a message needs role and content, got {dict(message)!r}")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        names = {
            "bos_token": "" if self._bos_id is None else self._tokens[self._bos_id],
            "eos_token": "" if self._eos_id is None else self._tokens[self._eos_id],
            "raise_exception": _refuse,
            "strftime_now": datetime.now().strftime,
        }
        try:
            template = environment.from_string(self.chat_template)
            return template.render(messages=messages, add_generation_prompt=True, **names)
        except TemplateError as reason:
            raise ValueError(f"the chat template fails on these messages: {reason}") from reason

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = True) -> bytes:
        """The bytes that a token stands for; none for a special token that is skipped.

        Raises ValueError for a token outside the vocabulary.
        """
        if not 0 <= token_id < len(self._tokens):
            raise ValueError(f"token {token_id} is outside the vocabulary of {len(self._tokens)}")
        if skip_special_tokens and token_id in self._special_ids:
            return b""
        token = self._tokens[token_id]
        if token_id in self._whole_ids or not all(char in self._byte_of for char in token):
            return token.encode()
        return bytes(self._byte_of[char] for char in token)

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens. Bytes that form no character appear as U+FFFD."""
        parts = (self.token_bytes(i, skip_special_tokens=skip_special_tokens) for i in token_ids)
        return b"".join(parts).decode("utf-8", errors="replace")


def _refuse(message: str) -> Any:
    raise TemplateError(message)


class TextStream:
    """Text piece by piece, as tokens come in: the pieces joined are the decoding of all tokens.

    A piece holds whole characters only; the bytes of an unfinished one wait for the next token.
    ``prompt_ids`` are the tokens before the first one pushed. Their text is never given out, but a
    prompt that ends inside a character is continued: that character comes whole in the piece that
    completes it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token_id in prompt_ids:
            self._decoder.decode(tokenizer.token_bytes(token_id))
        self._began = False

    def push(self, token_id: int) -> str:
        """The text that this token completes; often a word, sometimes nothing."""
        data = self._tokenizer.token_bytes(token_id)
        self._began = self._began or bool(data)
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What was still waiting: U+FFFD if the stream ends inside a character, else nothing."""
        return self._decoder.decode(b"", final=True) if self._began else ""
