# Chapter 06, given: pagedattn/manager/limits.py; the tasks stand in the files beside it.
#   pytest chapters/06 --student                all its tests on this folder
#   pytest chapters/06 --student --task 6.1     those of one task
# `pagedattn exercises` wrote it and never overwrites your work; with --force it does.
# made from sha256 caa2bca4fa3be5bfea717acce85975ae3d3145f9f70d4b2cbe2b3c909fb02085

"""The limits of a server that decide how much one sequence may need."""

from __future__ import annotations

from dataclasses import dataclass

from pagedattn.whole_number import at_least_1, whole_number


@dataclass(frozen=True, kw_only=True)
class Limits:
    """All lengths in tokens.

    ``max_model_len`` is the longest sequence, ``max_num_batched_tokens`` the most tokens of one
    step (None: as many as ``max_model_len``), ``max_encoder_len`` the longest input of an encoder.
    Context parallelism spreads the tokens of a sequence over ``decode_context_parallel_size`` *
    ``prefill_context_parallel_size`` ranks. Raises ValueError for a limit below 1, or below 0 for
    ``max_encoder_len``.

    Source: ``vllm/config``: the model's, the scheduler's and the parallel configuration.
    """

    max_model_len: int
    max_num_batched_tokens: int | None = None
    max_encoder_len: int = 0
    decode_context_parallel_size: int = 1
    prefill_context_parallel_size: int = 1

    def __post_init__(self) -> None:
        at_least_1(self.max_model_len, "max_model_len")
        if self.max_num_batched_tokens is not None:
            at_least_1(self.max_num_batched_tokens, "max_num_batched_tokens")
        if whole_number(self.max_encoder_len, "max_encoder_len") < 0:
            raise ValueError(f"max_encoder_len is {self.max_encoder_len}, below 0")
        at_least_1(self.decode_context_parallel_size, "decode_context_parallel_size")
        at_least_1(self.prefill_context_parallel_size, "prefill_context_parallel_size")

    @property
    def context_parallel_size(self) -> int:
        """How many ranks share the tokens of a sequence."""
        return self.decode_context_parallel_size * self.prefill_context_parallel_size

    @property
    def max_tokens_a_step(self) -> int:
        """The most tokens of one sequence that one step can compute."""
        if self.max_num_batched_tokens is None:
            return self.max_model_len
        return self.max_num_batched_tokens

    def check_no_context_parallelism(self, kind: str) -> None:
        """Raises ValueError if several ranks share a sequence, which ``kind`` cannot do."""
        if self.context_parallel_size > 1:
            raise ValueError(
                f"{kind} cannot be spread over {self.context_parallel_size} context-parallel ranks"
            )
