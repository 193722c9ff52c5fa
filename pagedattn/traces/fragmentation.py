"""What blocks waste, without any pool: the slots of a request's last block that hold no token."""

from collections.abc import Sequence
from dataclasses import dataclass

from pagedattn.traces.recorded import Request


@dataclass(frozen=True)
class Fragmentation:
    """Reserved slots that hold no token. The first three are shares of all reserved slots."""

    prompt: float  # when the prompts are stored
    life: float  # over every step from the prompt to the last token
    final: float  # when the last token is stored
    mean_waste: float  # slots a request, when the last token is stored
    mean_blocks: float  # blocks a request, when the last token is stored


def fragmentation(requests: Sequence[Request], block_size: int) -> Fragmentation:
    """Measure the requests in blocks of `block_size` slots.

    Raises ValueError for a block size under 1, and for an empty trace.
    """
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}, but must be at least 1")
    if not requests:
        raise ValueError("the trace is empty")

    def share(used: int, blocks: int) -> float:
        return 1 - used / (blocks * block_size)

    prompts = [request.input_length for request in requests]
    totals = [request.total_length for request in requests]
    lives = list(zip(prompts, totals, strict=True))
    blocks = sum(-(-total // block_size) for total in totals)
    return Fragmentation(
        prompt=share(sum(prompts), sum(-(-prompt // block_size) for prompt in prompts)),
        life=share(
            sum(_sum_to(total, 1) - _sum_to(prompt - 1, 1) for prompt, total in lives),
            sum(
                _sum_to(total, block_size) - _sum_to(prompt - 1, block_size)
                for prompt, total in lives
            ),
        ),
        final=share(sum(totals), blocks),
        mean_waste=(blocks * block_size - sum(totals)) / len(requests),
        mean_blocks=blocks / len(requests),
    )


def _sum_to(num_tokens: int, block_size: int) -> int:
    """Blocks that 1, 2, … num_tokens tokens take, added up."""
    # Full blocks 1, 2, … each stay the last one for block_size tokens.
    full, rest = divmod(num_tokens, block_size)
    return block_size * full * (full + 1) // 2 + rest * (full + 1)
