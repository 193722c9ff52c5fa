"""Text to tokens and back, and text as a stream."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.decoders import ByteLevel

from pagedattn.cli import main
from pagedattn.demo import commands
from pagedattn.model import Llama, TextStream, Tokenizer, default_model_path
from pagedattn.model.gguf_file import GGUFFile
from pagedattn.model.gguf_tokenizer import pre_tokenizer

VOCAB_SIZE = 49152
EOS = 2
# Bytes that the default model's vocabulary lacks: these characters cannot be encoded.
LOST_CONTROLS = "\x04\x06\x13\x14\x16\x1d"
TEXTS = st.text(st.characters(exclude_characters=LOST_CONTROLS, exclude_categories=["Cs", "Cn"]))
TOKEN_IDS = st.integers(0, VOCAB_SIZE - 1)


@pytest.fixture(scope="module")
def tokenizer(real_model: tuple[Llama, Tokenizer]) -> Tokenizer:
    return real_model[1]


@pytest.fixture(scope="module")
def tokens() -> list[str]:
    """The vocabulary as the file has it."""
    return GGUFFile(default_model_path()).value("tokenizer.ggml.tokens", list)


@pytest.fixture(scope="module")
def byte_ids(tokens: list[str]) -> dict[int, int]:
    """Byte -> the token of just this byte, for bytes from 0xA1 on: they stand for themselves."""
    return {ord(t): i for i, t in enumerate(tokens) if len(t) == 1 and 0xA1 <= ord(t) <= 0xFF}


def stream(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    text = TextStream(tokenizer, prompt or [])
    return [*(text.push(token_id) for token_id in ids), text.finish()]


def test_encoding_known_by_hand(tokenizer: Tokenizer, tokens: list[str]) -> None:
    """Digits one by one, and a space that leads a word belongs to it (shown as Ġ)."""
    assert [tokens[i] for i in tokenizer.encode("The 12 cats")] == ["The", "Ġ", "1", "2", "Ġcats"]
    assert tokenizer.encode("") == []
    assert tokenizer.encode("<|im_end|>") == [EOS]
    assert tokenizer.eos_token_ids == {EOS}
    assert len(tokenizer) == VOCAB_SIZE


def test_words_of_llama3() -> None:
    """Its vocabulary cuts digits in threes and keeps a leading sign with its word."""
    pre = pre_tokenizer("llama-bpe")
    assert pre is not None
    words = [word for word, _ in pre.pre_tokenize_str("It's 12345\n\n(now)")]
    assert words == ["It", "'s", "Ġ", "123", "45", "ĊĊ", "(now", ")"]


NO_TEXTS = ["\udcff", "a\ud83d", b"bytes", 7, None, ["a"]]


@pytest.mark.parametrize("text", NO_TEXTS)
def test_no_text(tokenizer: Tokenizer, text: Any) -> None:
    """A wrong byte of a command line comes as a lone surrogate, half of a character in UTF-16."""
    words = "no valid text" if isinstance(text, str) else "expected a text"
    with pytest.raises(ValueError, match=f"the text is .*{words}"):
        tokenizer.encode(text)
    for key in ("role", "content"):
        message = {"role": "user", "content": "Hi", key: text}
        with pytest.raises(ValueError, match=f"the {key} of a message is .*{words}"):
            tokenizer.encode_chat([message])


def test_prompt_of_wrong_bytes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, before a model is loaded."""
    monkeypatch.delattr(commands, "load_model")
    assert main(["generate", "--prompt", "fine", "--prompt", "\udcff"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "prompt B is no valid text" in said.err
    assert said.err.count("\n") == 1


@given(text=TEXTS)
def test_decoding_gives_the_text_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@given(ids=st.lists(TOKEN_IDS.filter(lambda i: i > 16), max_size=40))
def test_decoding_equals_that_of_tokenizers(
    tokenizer: Tokenizer, tokens: list[str], ids: list[int]
) -> None:
    """For any bytes, those that form no character included."""
    assert tokenizer.decode(ids) == ByteLevel().decode([tokens[i] for i in ids])


def test_special_tokens_are_shown_only_on_request(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one<|im_end|>two")
    assert tokenizer.decode(ids) == "onetwo"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "one<|im_end|>two"


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE])
def test_token_outside_the_vocabulary(tokenizer: Tokenizer, token_id: int) -> None:
    with pytest.raises(ValueError, match=f"token {token_id} .* {VOCAB_SIZE}"):
        tokenizer.decode([token_id])


CHAT = [{"role": "user", "content": "Hi {{ 1 + 1 }}"}]


def test_chat_template(tokenizer: Tokenizer) -> None:
    """The template adds a system message of its own unless there is one; text is not a program."""
    default = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    turn = "<|im_start|>user\nHi {{ 1 + 1 }}<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render_chat(CHAT) == f"<|im_start|>system\n{default}<|im_end|>\n{turn}"
    system = {"role": "system", "content": "Be brief."}
    expected = f"<|im_start|>system\nBe brief.<|im_end|>\n{turn}"
    assert tokenizer.render_chat([system, *CHAT]) == expected
    ids = tokenizer.encode_chat([system, *CHAT])
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected
    assert [i for i in ids if i in (1, 2)] == [1, 2, 1, 2, 1]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("", "no chat template"),
        ("{% for %}", "chat template fails"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.append(1) }}", "chat template fails"),
        ("{{ messages.__class__.__base__.__subclasses__() }}", "chat template fails"),
        ("{{ 1 / 0 }}", "chat template fails on these messages: division by zero"),
        ("{{ 1 + 'a' }}", "chat template fails"),
        ("{{ range(10 ** 9) }}", "chat template fails"),
        ("{{ 10.0 ** 999 }}", "chat template fails"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "chat template fails"),
        ("{{ " + "(" * 3000, "chat template fails"),
    ],
)
def test_bad_templates(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, template: str, words: str
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(ValueError, match=words):
        tokenizer.render_chat(CHAT)


def test_template_that_makes_no_text(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", r"{{ '\ud800' }}")
    with pytest.raises(ValueError, match="the text of the chat is no valid text"):
        tokenizer.encode_chat(CHAT)


def test_bad_message(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="role and content"):
        tokenizer.render_chat([{"role": "user"}])


class TestStream:
    @given(ids=st.lists(TOKEN_IDS, max_size=30), cut=st.integers(0, 30))
    def test_joined_pieces_are_the_text(
        self, tokenizer: Tokenizer, ids: list[int], cut: int
    ) -> None:
        """Never an exception, whatever the bytes (vllm-project/vllm#17448)."""
        pieces = stream(tokenizer, ids)
        assert "".join(pieces) == tokenizer.decode(ids)
        # What has been shown is never taken back: every part of the stream begins the text.
        assert tokenizer.decode(ids).startswith("".join(pieces[:cut]))

    @given(data=st.data())
    def test_random_bytes(self, tokenizer: Tokenizer, byte_ids: dict[int, int], data: Any) -> None:
        """Tokens of single bytes, mostly broken characters; then the stream recovers."""
        noise = data.draw(st.lists(st.sampled_from(sorted(byte_ids.values())), max_size=30))
        pieces = stream(tokenizer, [*noise, *tokenizer.encode(" good.")])
        assert "".join(pieces) == tokenizer.decode(noise) + " good."

    @given(text=st.text(st.sampled_from("aé€🙂 ."), min_size=1))
    def test_only_whole_characters(self, tokenizer: Tokenizer, text: str) -> None:
        """No piece holds a replacement sign (waybarrios/vllm-mlx#109)."""
        pieces = stream(tokenizer, tokenizer.encode(text))
        assert "�" not in "".join(pieces)
        assert "".join(pieces) == text

    def test_character_over_several_tokens(
        self, tokenizer: Tokenizer, byte_ids: dict[int, int]
    ) -> None:
        letter = [byte_ids[byte] for byte in "é".encode()]
        assert stream(tokenizer, letter) == ["", "é", ""]
        assert stream(tokenizer, letter[:1]) == ["", "�"]

    def test_space_of_a_word_is_kept(self, tokenizer: Tokenizer) -> None:
        """Once lost after a full stop (vllm-project/vllm#984)."""
        ids = [*tokenizer.encode("."), *tokenizer.encode(" It")]
        assert len(ids) == 2
        assert stream(tokenizer, ids) == [".", " It", ""]

    def test_prompt_that_ends_inside_a_character(
        self, tokenizer: Tokenizer, byte_ids: dict[int, int]
    ) -> None:
        """The first piece was once the whole prompt (vllm-project/vllm#48853)."""
        first, second, third = (byte_ids[byte] for byte in "驪".encode())
        prompt = [*tokenizer.encode("The word "), first, second]
        assert stream(tokenizer, [third], prompt) == ["驪", ""]
        assert stream(tokenizer, [EOS, third], prompt) == ["", "驪", ""]
        assert stream(tokenizer, [], prompt) == [""]
        assert stream(tokenizer, [EOS], prompt) == ["", ""]

    @given(prompt=st.lists(TOKEN_IDS, max_size=10), ids=st.lists(TOKEN_IDS, max_size=10))
    def test_prompt_text_is_never_given_out(
        self, tokenizer: Tokenizer, prompt: list[int], ids: list[int]
    ) -> None:
        """The stream is the text of all tokens less the characters finished within the prompt."""
        answer = "".join(stream(tokenizer, ids, prompt))
        whole = b"".join(map(tokenizer.token_bytes, prompt + ids)).decode(errors="replace")
        of_prompt = b"".join(map(tokenizer.token_bytes, prompt)).decode(errors="replace")
        assert whole.endswith(answer)
        shown = len(whole) - len(answer)
        if any(map(tokenizer.token_bytes, ids)):
            # At most one character of the prompt, the unfinished last one, may come again.
            assert shown >= len(of_prompt) - 1
            assert whole[:shown] == of_prompt[:shown]
        else:
            assert answer == ""

    def test_every_cut_of_a_text(self, tokenizer: Tokenizer) -> None:
        """Prompt and answer cut at every token: together always the whole text."""
        text = "Zürich, 東京 🙂🎉 naïve."
        ids = tokenizer.encode(text)
        for cut in range(len(ids) + 1):
            prompt, rest = ids[:cut], ids[cut:]
            answer = "".join(stream(tokenizer, rest, prompt))
            before = tokenizer.decode(prompt).rstrip("�") if rest else text
            assert before + answer == text


def test_byte_alphabet_is_complete(tokenizer: Tokenizer, tokens: list[str]) -> None:
    """All 256 bytes: every character of the vocabulary stands for one."""
    used = set(itertools.chain.from_iterable(tokens[17:]))
    assert len(used) > 200
    for char in used:
        token = ByteLevel().decode([char])
        data = bytes([tokenizer._byte_of[char]])
        assert data.decode(errors="replace") == token
