"""Beam search equals ``transformers`` with the real model: same hypotheses, same scores.

What ``transformers`` found is in ../data/beam_search.json, written by record_beam_search.py: ten
prompts, widths 2, 4 and 8, length penalties 0.6, 1 and 1.4, the three modes of early stopping. Six
settings run here with two prompts each; ``pytest --slow`` runs all with all prompts.
"""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from pagedattn import sharing
from pagedattn.model import Llama, Tokenizer, cache_config
from pagedattn.model.beam_search import beam_search
from pagedattn.model.beams import BeamSearchParams, EarlyStopping

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "beam_search.json").read_text())
PROMPTS: list[dict[str, Any]] = RECORDED["prompts"]
NEW_TOKENS: int = RECORDED["max_new_tokens"]
END_TOKEN: int = RECORDED["end_token"]
WIDTHS, PENALTIES = (2, 4, 8), (0.6, 1.0, 1.4)
MODES: tuple[EarlyStopping, ...] = (True, False, "never")
Setting = tuple[int, float, EarlyStopping]
SETTINGS: list[Setting] = list(itertools.product(WIDTHS, PENALTIES, MODES))
RUNS: dict[tuple[int, Setting], list[tuple[list[int], float]]] = {
    (run["prompt"], (run["width"], run["length_penalty"], run["early_stopping"])): [
        (PROMPTS[run["prompt"]]["answers"][answer], score) for answer, score in run["hypotheses"]
    ]
    for run in RECORDED["runs"]
}
# Sums of up to 24 log-probabilities of float32 scores that differ by 1e-5.
TOLERANCE = 1e-4


def search(model: Llama, prompts: list[int], setting: Setting) -> None:
    """Search these prompts in one batch, and compare with what was recorded."""
    width, length_penalty, early_stopping = setting
    cache = sharing.build_cache(
        cache_config(model.config, num_blocks=1 + len(prompts) * (2 + 2 * width), max_seq_len=64)
    )
    params = BeamSearchParams(
        width=width,
        max_new_tokens=NEW_TOKENS,
        end_token_ids=[END_TOKEN],
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    found = beam_search(model, cache, [PROMPTS[i]["token_ids"] for i in prompts], params)
    for index, hypotheses in zip(prompts, found, strict=True):
        wanted = RUNS[index, setting]
        # Two whose scores differ by less than the tolerance may have changed places.
        assert [h.score for h in hypotheses] == pytest.approx([s for _, s in wanted], abs=TOLERANCE)
        scores = {h.token_ids: h.score for h in hypotheses}
        assert scores == pytest.approx({tuple(t): s for t, s in wanted}, abs=TOLERANCE)
        for hypothesis in hypotheses:
            ended = hypothesis.token_ids[-1] == END_TOKEN
            assert hypothesis.finish_reason == ("stop" if ended else "length")
    assert cache.pool.num_free_blocks == cache.config.num_blocks - 1


def test_what_was_recorded_can_tell_searches_apart() -> None:
    assert set(RUNS) == set(itertools.product(range(10), SETTINGS))
    for (_, (width, *_)), hypotheses in RUNS.items():
        assert len(hypotheses) == width
    lengths = {(tokens[-1] == END_TOKEN, len(tokens)) for run in RUNS.values() for tokens, _ in run}
    assert (False, NEW_TOKENS) in lengths
    assert sum(ends for ends, _ in lengths) > 10
    for mode, other in itertools.combinations(MODES, 2):
        differing = [
            (prompt, width, penalty)
            for prompt, width, penalty in itertools.product(range(10), WIDTHS, PENALTIES)
            if RUNS[prompt, (width, penalty, mode)] != RUNS[prompt, (width, penalty, other)]
        ]
        assert differing, f"early stopping {mode} and {other} never differ"


@pytest.mark.parametrize(
    ("prompts", "setting"),
    [
        ([6, 9], (2, 0.6, True)),
        ([0, 3], (2, 1.0, "never")),
        ([5, 4], (4, 0.6, "never")),
        ([2, 7], (4, 1.4, False)),
        ([5, 8], (8, 1.0, False)),
        ([0, 1], (8, 1.4, True)),
    ],
)
def test_two_prompts_equal_transformers(
    real_model: tuple[Llama, Tokenizer], prompts: list[int], setting: Setting
) -> None:
    search(real_model[0], prompts, setting)


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_all_prompts_equal_transformers(
    real_model: tuple[Llama, Tokenizer], setting: Setting
) -> None:
    search(real_model[0], list(range(10)), setting)
