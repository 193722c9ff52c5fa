"""Tiny models of each family, made at random by ``transformers``, and folders that hold them."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from pagedattn.attention import attention
from pagedattn.model import Llama, ModelFileError, complete, load_model
from pagedattn.model.safetensors_folder import SafetensorsFolder

transformers = pytest.importorskip("transformers")

SPECIAL = ["<|end|>", "<|begin|>", "<|turn|>"]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())  # 256 characters, one for each byte
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the")]
VOCAB_SIZE = 264  # 2 more than the tokenizer has
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
LENGTHS = (1, 3, 4, 5, 17, 80)  # of prompts: around the end of a block of 4, and longer
# Scores up to some 10 in float32; sums in another order differ by some 1e-5.
TOLERANCE = 1e-4
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": 0,
}


def _make(family: str, **settings: Any) -> Any:
    """A random model; its norms and biases are random, too, so that none can be left out."""
    if family == "qwen3":
        settings = {"head_dim": 16} | settings  # 4 heads of 16 in 32 dimensions
    config = transformers.AutoConfig.for_model(family, **SIZES | settings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            std = 2 * config.hidden_size**-0.5
            parameter.normal_(mean=float("norm" in name), std=std, generator=generator)
    return model.eval()


def _make_tokenizer() -> Any:
    tokens = [*SPECIAL, *ALPHABET, *("".join(pair) for pair in MERGES)]
    fast = FastTokenizer(BPE({token: i for i, token in enumerate(tokens)}, MERGES))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.post_processor = TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 1)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast,
        bos_token="<|begin|>",
        eos_token="<|end|>",
        additional_special_tokens=["<|turn|>"],
        chat_template=CHAT_TEMPLATE,
    )


class Folder:
    """A saved model: ``path``, and how to change its files."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def change(self, name: str, **changes: Any) -> None:
        """Change keys of a JSON file; a value of None takes the key out."""
        file = self.path / name
        found = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({k: v for k, v in found.items() if v is not None}))

    def read(self, name: str) -> Any:
        return json.loads((self.path / name).read_text())


@pytest.fixture(scope="session")
def make_reference() -> Callable[..., Any]:
    """``make_reference(family, **settings)``: a random model of transformers, in float32."""
    return _make


@pytest.fixture(scope="session")
def reference_tokenizer() -> Any:
    return _make_tokenizer()


@pytest.fixture
def save(tmp_path: Path, reference_tokenizer: Any) -> Callable[..., Folder]:
    """``save(model, **options)``: save_pretrained, and the tokenizer beside it."""

    def save(model: Any, **options: Any) -> Folder:
        folder = Folder(tmp_path / model.config.model_type)
        model.save_pretrained(folder.path, **options)
        reference_tokenizer.save_pretrained(folder.path)
        return folder

    return save


@pytest.fixture
def folder(save: Callable[..., Folder]) -> Folder:
    """A good folder: a Llama, with one file of weights."""
    return save(_make("llama"))


@pytest.fixture
def sharded(save: Callable[..., Folder]) -> Folder:
    """A good folder: a Qwen3, with several files of weights."""
    return save(_make("qwen3"), max_shard_size="20KB")


@pytest.fixture
def nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A wrong folder is refused from its headers: reading a weight fails the test. Called: from
    here on it is allowed."""

    def read(self: SafetensorsFolder, name: str) -> Tensor:
        raise AssertionError(f"{name} was read from a wrong folder")

    monkeypatch.setattr(SafetensorsFolder, "tensor", read)
    return monkeypatch.undo


@pytest.fixture
def refused() -> Callable[..., None]:
    """``refused(path, *words)``: loading fails, and the error names the path and says the words."""

    def refused(path: Path, *words: str) -> None:
        with pytest.raises(ModelFileError) as error:
            load_model(path)
        for word in (str(path), *words):
            assert word in str(error.value)

    return refused


@pytest.fixture(scope="session")
def llama3() -> dict[str, Any]:
    """Rotary scaling of Llama 3.1, for texts of 64 tokens."""
    return {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }


@pytest.fixture(scope="session")
def logits_of() -> Callable[[Llama, list[int]], Tensor]:
    """``logits_of(model, token_ids)``: the decoder with no cache at all."""
    return _logits_of


def _logits_of(model: Llama, token_ids: list[int]) -> Tensor:
    def no_cache(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v)

    ids = torch.tensor(token_ids)
    return model.compute_logits(model(ids, torch.arange(len(ids)), no_cache))


@torch.inference_mode()
def _their_logits(reference: Any, token_ids: list[int]) -> Tensor:
    logits: Tensor = reference(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits


@pytest.fixture
def assert_equal(paged_cache_for: Any) -> Callable[[Llama, Any], None]:
    """``assert_equal(model, reference)``: random prompts are answered in one batch of a paged
    cache; every token is the one that transformers finds likeliest, and the scores are the same.
    """

    def check(model: Llama, reference: Any) -> None:
        generator = torch.Generator().manual_seed(1)
        prompts = [torch.randint(VOCAB_SIZE, (n,), generator=generator).tolist() for n in LENGTHS]
        cache = paged_cache_for(model, block_size=4, num_blocks=60)
        answers = complete(model, cache, prompts, max_new_tokens=6, chunk_size=16)
        for prompt, answer in zip(prompts, answers, strict=True):
            theirs = _their_logits(reference, prompt + answer)
            assert theirs.std() > 1  # scores far apart: a mistake would show
            assert theirs[len(prompt) - 1 : -1].argmax(dim=-1).tolist() == answer
            assert (_logits_of(model, prompt + answer) - theirs).abs().max() < TOLERANCE

    return check


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """No progress bars of transformers among the tests' dots."""
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()
