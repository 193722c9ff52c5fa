"""One run: some prompts, a model, a cache; and what there is to tell about it afterwards."""

from __future__ import annotations

import string
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from pagedattn.cache import Config, InvariantError, KVCache, OutOfBlocks
from pagedattn.contiguous import kv_bytes_per_token
from pagedattn.model import Llama, SamplingParams, Token, Tokenizer, cache_config, generate
from pagedattn.viz.state import PoolState, State, capture
from pagedattn.viz.terminal import joined

LABELS = string.ascii_uppercase + string.ascii_lowercase


@dataclass
class Answer:
    """A prompt and what has come of its answer so far. ``label`` is also its name in the cache."""

    label: str
    prompt: str
    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None


@dataclass
class Run:
    """Answers prompts and watches the cache while it does.

    ``last`` and ``fullest`` are the cache's states after a step; ``broken`` is the first invariant
    that did not hold after a step, in words, and the state that it speaks of.
    """

    model: Llama
    tokenizer: Tokenizer
    cache: KVCache
    answers: list[Answer]
    max_new_tokens: int
    sampling_params: Sequence[SamplingParams]
    num_steps: int = 0
    last: State | None = None
    fullest: State | None = None
    fullest_step: int = 0
    broken: tuple[str, State] | None = None
    seconds: list[float] = field(default_factory=list)  # when each step was done

    def tokens(self) -> Iterator[Token]:
        """Every token, once it stands in its answer. Raises what ``generate`` raises; OutOfBlocks
        then says which sequences needed the blocks."""
        self.seconds = [time.perf_counter()]
        try:
            for token in self._stream():
                answer = self.answers[token.index]
                answer.token_ids.append(token.token_id)
                answer.text += token.text
                answer.finish_reason = token.finish_reason
                yield token
        except OutOfBlocks as error:
            raise OutOfBlocks(error.needed, error.free, self._shortage(error)) from error

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens read, all answers together."""
        return sum(len(answer.prompt_ids) for answer in self.answers)

    @property
    def num_written(self) -> int:
        """Tokens written so far, all answers together."""
        return sum(len(answer.token_ids) for answer in self.answers)

    def _stream(self) -> Iterator[Token]:
        return generate(
            self.model,
            self.cache,
            [answer.prompt_ids for answer in self.answers],
            max_new_tokens=self.max_new_tokens,
            sampling_params=self.sampling_params,
            tokenizer=self.tokenizer,
            seq_ids=[answer.label for answer in self.answers],
            on_step=lambda batch: self._watch(),
        )

    def _watch(self) -> None:
        self.num_steps += 1
        self.seconds.append(time.perf_counter())
        self.last = self._capture()
        if self.fullest is None or self.last.usage.used >= self.fullest.usage.used:
            self.fullest, self.fullest_step = self.last, self.num_steps
        if self.broken is None:
            try:
                self.cache.check_invariants()
            except InvariantError as error:
                self.broken = f"after step {self.num_steps}: {error}", self.last

    def _capture(self) -> State:
        return capture(self.cache, self.last)

    def _shortage(self, error: OutOfBlocks) -> str:
        needs = self._needs()
        wanted = joined(f"{label} needs {n}" for label, n in needs.items())
        config = self.cache.config
        enough = num_blocks_for(self.answers, self.max_new_tokens, config.block_size)
        unit = "slots" if hasattr(self.cache, "arena") else "blocks"
        free = f"{error.free} {'is' if error.free == 1 else 'are'} free"
        advice = f"; --num-blocks {enough} is enough" if config.num_blocks < enough else ""
        return f"out of {unit} after {self.num_steps} steps: {wanted}, {free}{advice}"

    def _needs(self) -> dict[str, int]:
        """What each sequence lacks for the step that failed: slots on a contiguous cache, else
        blocks."""
        config, running = self.cache.config, [a for a in self.answers if not a.finish_reason]
        if hasattr(self.cache, "arena"):
            room = config.num_slots
            for answer in running:
                slab = len(answer.prompt_ids) + self.max_new_tokens
                if slab > room:
                    return {answer.label: slab}
                room -= slab
        if self.last is None:
            sizes = {a.label: len(a.prompt_ids) for a in running}
            return {label: -(-size // config.block_size) for label, size in sizes.items()}
        assert isinstance(self.last, PoolState)
        stored = {owner.name: owner.num_tokens for owner, _ in self.last.tables}
        return {a.label: 1 for a in running if stored[a.label] % config.block_size == 0}


def prepare(tokenizer: Tokenizer, prompts: Sequence[str], *, raw: bool = False) -> list[Answer]:
    """The prompts with their letters and tokens: as a user's message in a chat, or ``raw``."""
    answers = []
    for label, prompt in zip(LABELS, prompts, strict=False):
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.encode(prompt) if raw else tokenizer.encode_chat(chat)
        answers.append(Answer(label, prompt, ids))
    return answers


def num_blocks_for(answers: Sequence[Answer], max_new_tokens: int, block_size: int) -> int:
    """Blocks, block 0 among them, that hold all prompts with their longest answers."""
    lengths = (len(answer.prompt_ids) + max_new_tokens for answer in answers)
    return 1 + sum(-(-length // block_size) for length in lengths)


def config_for(model: Llama, block_size: int, num_blocks: int) -> Config:
    """The configuration of a cache for which there is memory. Raises ValueError where there is not:
    a pool would make an object for each of its blocks before that showed."""
    config = cache_config(model.config, block_size=block_size, num_blocks=num_blocks)
    too_many = ValueError(
        f"{num_blocks} blocks of {block_size} slots are more than this machine's memory holds"
    )
    num_bytes = (
        num_blocks
        * block_size
        * kv_bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, config.dtype)
    )
    if num_bytes > torch.iinfo(torch.int64).max:
        raise too_many
    try:
        torch.empty(num_bytes, dtype=torch.uint8, device=config.device)
    except RuntimeError as error:  # on the CPU torch has no class of its own for this
        out_of_memory = isinstance(error, torch.OutOfMemoryError)
        if not out_of_memory and "can't allocate memory" not in str(error):
            raise
        raise too_many from error
    return config
