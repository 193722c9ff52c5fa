"""Text to tokens and back.

The vocabularies handled here are byte-level: a token is a run of bytes, not of characters, and a
character of several bytes may be cut between two tokens. So text is decoded from bytes, never
token by token.

Source: byte-level BPE (Radford et al., "Language Models are Unsupervised Multitask Learners",
2019, section 2.2).
"""

import codecs
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer

from pagedattn.model.valid_text import check_text


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

    ``fast`` encodes; its post-processor adds what stands before a text. ``vocab_size`` is the
    model's, often rounded up: the tokens from ``len(tokenizer)`` on are only padding, and no text
    belongs to them. ``eos_token_ids`` are the tokens that end an answer; ``bos_token`` and
    ``eos_token`` are names for the chat template.
    """

    def __init__(
        self,
        fast: FastTokenizer,
        vocab_size: int,
        *,
        eos_token_ids: Collection[int],
        bos_token: str = "",
        eos_token: str = "",
        chat_template: str = "",
    ) -> None:
        self._fast = fast
        self._tokens = [""] * vocab_size
        known = fast.get_vocab(with_added_tokens=True)
        for token, token_id in known.items():
            self._tokens[token_id] = token
        self._num_known = 1 + max(known.values(), default=-1)
        added = fast.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._whole_ids = frozenset(added)
        self._byte_of = _byte_alphabet()
        self.eos_token_ids = frozenset(eos_token_ids)
        self._names = {"bos_token": bos_token, "eos_token": eos_token}
        self.chat_template = chat_template

    def __len__(self) -> int:
        """The size of the vocabulary, up to the last token that is known."""
        return self._num_known

    def encode(self, text: str) -> list[int]:
        """The tokens of a text. Names of special tokens in the text become those tokens.

        A byte that the vocabulary has no token for is left out; the default model's lacks some
        control characters and bytes that begin no assigned character. Raises ValueError for what
        is no valid text.
        """
        return self._fast.encode(check_text(text, "the text")).ids

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The tokens of a conversation, up to where the assistant's answer begins.

        ``messages`` are mappings with ``role`` and ``content``. Raises ValueError as
        ``render_chat`` does.
        """
        text = check_text(self.render_chat(messages), "the text of the chat")
        return self._fast.encode(text, add_special_tokens=False).ids

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The conversation as one text, by the model's chat template.

        The template comes with the model and is a program: it runs sandboxed. Raises ValueError
        when there is no template, a message is no valid text, or the template fails or refuses the
        messages.
        """
        if not self.chat_template:
            raise ValueError("the model has no chat template")
        for message in messages:
            if not {"role", "content"} <= message.keys():
                raise ValueError(f"a message needs role and content, got {dict(message)!r}")
            for key in ("role", "content"):
                check_text(message[key], f"the {key} of a message")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        names = self._names | {
            "raise_exception": _refuse,
            "strftime_now": datetime.now().strftime,
        }
        try:
            template = environment.from_string(self.chat_template)
            return template.render(messages=messages, add_generation_prompt=True, **names)
        except Exception as reason:  # a program may fail with anything
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
