"""A prompt is read backwards and forwards as soon as there is a cache.

"There is a cache" was taken to mean "there is one new token". One new token may look at every key,
so the mask was left out, and then every token of a prompt saw the tokens behind it. Training, where
there is no cache, stayed right; generation drifted. Mikyx-1/TinyLLM#18.
"""

from functools import partial
from typing import Any

SYMPTOM = "the output of an early token changes with a later token of the prompt"
KILLED_BY = (
    "test_verbs.py::test_a_prompt_is_read_causally",
    "test_verbs.py::test_prompt_then_decode",
)


def apply(stage: Any) -> None:
    stage.attention = partial(stage.attention, causal=False)
