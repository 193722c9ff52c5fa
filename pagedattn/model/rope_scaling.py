"""Rotary embedding stretched to longer texts, as Llama 3.1 does it.

Source: "The Llama 3 Herd of Models" (2024), and ``apply_scaling`` in meta-llama/llama-models.
"""

import math


def llama3_rope_factors(
    *,
    head_dim: int,
    rope_theta: float,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_seq_len: int,
) -> tuple[float, ...]:
    """The head_dim / 2 numbers that divide the rotary frequencies, one for each pair.

    How often does a pair turn within the original length? At least high_freq_factor times: 1, it
    stays as it was. At most low_freq_factor times: ``factor``, it turns so much slower. Between
    them the frequency goes linearly from one to the other.

    Raises ValueError for a number that is not finite and above 0, or unless low_freq_factor <
    high_freq_factor.
    """
    low, high = low_freq_factor, high_freq_factor
    for name, number in (("factor", factor), ("low_freq_factor", low), ("high_freq_factor", high)):
        if not 0 < number < math.inf:
            raise ValueError(f"{name} must be finite and above 0, got {number}")
    if original_max_seq_len < 1:
        raise ValueError(f"the original length must be at least 1, got {original_max_seq_len}")
    if low >= high:
        raise ValueError(f"low_freq_factor {low} is not below high_freq_factor {high}")
    factors = []
    for pair in range(head_dim // 2):
        frequency = rope_theta ** (-2 * pair / head_dim)  # radians a position
        turns = original_max_seq_len * frequency / (2 * math.pi)
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)  # share of the old frequency
        factors.append(1 / (kept + (1 - kept) / factor))
    return tuple(factors)
