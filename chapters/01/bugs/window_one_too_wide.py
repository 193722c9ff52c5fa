"""A window of W covers W + 1 keys.

Some attention libraries ask how many keys to the left a query sees, itself not counted. Whoever
passes them W where they mean W - 1 sees one key too many, and two implementations of the same model
disagree by a little, everywhere. vllm-project/vllm#3385, huggingface/transformers#29623 and #39408.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from pagedattn.attention import AttentionSpec

SYMPTOM = "with a window of 4 the query at position 9 sees the keys 5 .. 9"
KILLED_BY = ("test_verbs.py::test_window", "test_verbs.py::test_every_layer_has_its_own_spec")


def apply(stage: Any) -> None:
    right = stage.attention

    def attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        if spec.window is not None:
            spec = replace(spec, window=spec.window + 1)
        return right(q, k, v, spec)

    stage.attention = attention
