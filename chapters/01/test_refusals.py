"""What a cache refuses: in words that name the value and the limit, and with nothing changed.

Every later stage runs these tests too.
"""

import re
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from pagedattn.cache import Config, OutOfBlocks
from pagedattn.course.witness import Witness

contract = pytest.mark.contract


@pytest.fixture
def witness(stage: ModuleType) -> Witness:
    """A: 5 of 7 tokens computed, at most 8. B: 3 of 3 computed. No third sequence is allowed."""
    witness = Witness(stage, max_num_seqs=2)
    witness.add("A", 5, max_tokens=8)
    witness.add("B", 3)
    witness.step({"A": witness.waiting("A"), "B": witness.waiting("B")})
    witness.append("A", 2)
    return witness


def refuse(witness: Witness, words: str, what: Callable[[], object]) -> None:
    """It raises ValueError in these words, and the cache is byte for byte what it was."""
    before = witness.snapshot()
    with pytest.raises(ValueError, match=re.escape(words)):
        what()
    witness.assert_unchanged(before, f"a refusal ({words})")
    witness.check()


@contract
@pytest.mark.parametrize(
    "words, verb, arguments",
    [
        ("unknown sequence 'X'", "append", ("X", [1])),
        ("unknown sequence 'X'", "reserve", ({"X": 1},)),
        ("unknown sequence 'X'", "reserve", ({"A": 1, "X": 1},)),
        ("unknown sequence 'X'", "free", ("X",)),
        ("unknown sequence 'X'", "num_tokens", ("X",)),
        ("unknown sequence 'X'", "num_computed_tokens", ("X",)),
        ("sequence 'A' is in the cache already", "add", ("A", [1, 2])),
        ("token id -1", "append", ("A", [-1])),
        ("token id is 1.5; it must be a whole number", "append", ("A", [1, 1.5])),
        ("token id 9223372036854775808", "append", ("A", [2**63])),
        ("n is 1.0; it must be a whole number", "reserve", ({"A": 1.0},)),
        ("sequence 'A' has 7 tokens; 2 more exceed its limit of 8", "append", ("A", [1, 2])),
        ("at least one sequence", "reserve", ({},)),
        ("reserve 0 tokens of sequence 'A': 2 are", "reserve", ({"A": 0},)),
        ("reserve -1 tokens of sequence 'A': 2 are", "reserve", ({"A": -1},)),
        ("reserve 3 tokens of sequence 'A': 2 are", "reserve", ({"A": 3},)),
        ("reserve 1 tokens of sequence 'B': 0 are", "reserve", ({"A": 2, "B": 1},)),
        ("2 sequences are in the cache: max_num_seqs", "add", ("C", [1, 2])),
    ],
)
def test_bad_verb(witness: Witness, words: str, verb: str, arguments: tuple[object, ...]) -> None:
    refuse(witness, words, lambda: getattr(witness.cache, verb)(*arguments))
    witness.step({"A": 2})
    witness.decode("B")


@contract
@pytest.mark.parametrize(
    "words, token_ids, max_tokens",
    [
        ("sequence 'C' has an empty prompt", [], None),
        ("sequence 'C' has 25 tokens; its limit is 24", list(range(25)), None),
        ("sequence 'C' has 5 tokens; its limit is 4", [1, 2, 3, 4, 5], 4),
        ("max_tokens is 25; max_seq_len allows 1 to 24", [1], 25),
        ("max_tokens is 0; max_seq_len allows 1 to 24", [1], 0),
        ("max_tokens is 2.5; it must be a whole number", [1], 2.5),
        ("token id -7", [3, -7], None),
        ("token id 9223372036854775808", [2**63], None),
    ],
)
def test_bad_prompt(
    stage: ModuleType, words: str, token_ids: list[int], max_tokens: float | None
) -> None:
    witness = Witness(stage)
    witness.add("A", 5)
    refuse(witness, words, lambda: witness.cache.add("C", token_ids, max_tokens))
    witness.add("C", 24)
    witness.step({"C": witness.waiting("C"), "A": witness.waiting("A")})


@contract
def test_refused_again_and_again(witness: Witness) -> None:
    """A hundred refusals cost nothing."""
    usage = witness.cache.usage()
    for _ in range(100):
        with pytest.raises(ValueError, match="max_num_seqs"):
            witness.cache.add("C", [1, 2, 3])
        assert witness.cache.usage() == usage, (
            f"a refused add took slots: {witness.cache.usage()}, before it {usage}; {witness!r}"
        )
    witness.free("B")
    witness.add("C", 3)
    witness.step({"C": witness.waiting("C"), "A": 2})


@contract
def test_more_tokens_than_the_pool_holds(stage: ModuleType) -> None:
    """12 slots; A takes 4 of them and 9 more tokens do not fit."""
    witness = Witness(stage, num_blocks=4, max_seq_len=12)
    witness.add("A", 4, max_tokens=4)
    witness.step({"A": witness.waiting("A")})
    before = witness.snapshot()
    with pytest.raises(OutOfBlocks) as refused:
        witness.add("B", 9)
        before = witness.snapshot()  # add took B; it is reserve that must change nothing
        witness.cache.reserve({"B": witness.waiting("B")})
    witness.assert_unchanged(before, "a refusal for want of slots")
    assert refused.value.needed > refused.value.free > 0
    assert str(refused.value.needed) in str(refused.value)
    assert str(refused.value.free) in str(refused.value)
    witness.check()


@contract
def test_all_or_nothing(stage: ModuleType) -> None:
    """Three sequences ask at once for more than there is: none of them gets anything."""
    witness = Witness(stage, num_blocks=4, max_seq_len=4)
    for seq_id in ("A", "B"):
        witness.add(seq_id, 4)
    try:
        witness.add("C", 4)
        witness.add("D", 4)
        before = witness.snapshot()
        with pytest.raises(OutOfBlocks):
            witness.cache.reserve(dict.fromkeys("ABCD", 4))
        witness.assert_unchanged(before, "a refused reserve of four sequences")
    except OutOfBlocks:
        pass  # add refused D: so it may
    witness.check()
    witness.step({"A": witness.waiting("A"), "B": witness.waiting("B")})


@contract
@pytest.mark.parametrize(
    "verb, arguments",
    [
        ("add", ("C", [1])),
        ("append", ("A", [1])),
        ("reserve", ({"A": 1},)),
        ("free", ("B",)),
    ],
)
def test_verbs_wait_for_the_open_batch(
    stage: ModuleType, verb: str, arguments: tuple[object, ...]
) -> None:
    witness = Witness(stage)
    for seq_id in ("A", "B"):
        witness.add(seq_id, 5)
        witness.step({seq_id: witness.waiting(seq_id)})
    witness.append("A", 2)
    batch = witness.reserve({"A": 2})
    words = f"{verb} while a batch of ['A'] is open"
    refuse(witness, words, lambda: getattr(witness.cache, verb)(*arguments))
    witness.attend(batch)
    witness.commit(batch)
    witness.decode("B")


@contract
@pytest.mark.parametrize("end", ["commit", "abort"])
@pytest.mark.parametrize("verb", ["attend", "commit", "abort"])
def test_a_batch_ends_once(witness: Witness, end: str, verb: str) -> None:
    """After commit or abort a batch is of no use, and it does not touch the batch that follows."""
    batch = witness.reserve({"A": 1})
    inputs = witness.inputs(batch, 0)
    witness.attend(batch)
    if end == "commit":
        witness.commit(batch)
    else:
        batch.abort()
    arguments = (0, *inputs) if verb == "attend" else ()
    words = f"{verb} on a batch that was committed or aborted before"
    refuse(witness, words, lambda: getattr(batch, verb)(*arguments))
    following = witness.reserve({"A": 1})
    refuse(witness, words, lambda: getattr(batch, verb)(*arguments))
    witness.attend(following)
    witness.commit(following)


@contract
@pytest.mark.parametrize("attended, missing", [([], "[0, 1]"), ([0], "[1]"), ([1], "[0]")])
def test_commit_needs_every_layer(witness: Witness, attended: list[int], missing: str) -> None:
    batch = witness.reserve({"A": 2})
    for layer in attended:
        witness.attend_layer(batch, layer)
    refuse(witness, f"layers {missing} have stored no K and V", batch.commit)
    witness.attend(batch)
    witness.commit(batch)


@contract
@pytest.mark.parametrize(
    "words, layer, name, change",
    [
        ("layer 2 of a cache with layers 0 .. 1", 2, "q", None),
        ("layer -1 of a cache with layers 0 .. 1", -1, "q", None),
        ("k is [1, 2, 8]; this batch needs [2, 2, 8]", 0, "k", lambda k: k[:1]),
        ("v is [2, 1, 8]; this batch needs [2, 2, 8]", 0, "v", lambda v: v[:, :1]),
        ("k is [2, 2, 7]; this batch needs [2, 2, 8]", 0, "k", lambda k: k[..., :7]),
        ("q is [1, 4, 8]; this batch needs [2, num_heads, 8]", 0, "q", lambda q: q[:1]),
        ("q is [2, 4, 6]; this batch needs [2, num_heads, 8]", 0, "q", lambda q: q[..., :6]),
        ("q is [8, 8]; this batch needs [2, num_heads, 8]", 0, "q", lambda q: q.flatten(0, 1)),
        ("3 query heads are not a multiple of 2 KV heads", 0, "q", lambda q: q[:, :3]),
        ("q is torch.float32, the cache holds torch.float64", 0, "q", lambda q: q.float()),
        ("k is torch.float16, the cache holds torch.float64", 0, "k", lambda k: k.half()),
        ("v is torch.float32, the cache holds torch.float64", 0, "v", lambda v: v.float()),
        ("q is on meta, the cache on", 0, "q", lambda q: q.to("meta")),
        ("k is on meta, the cache on", 0, "k", lambda k: k.to("meta")),
        ("v is on meta, the cache on", 0, "v", lambda v: v.to("meta")),
    ],
)
def test_bad_attend(
    witness: Witness,
    words: str,
    layer: int,
    name: str,
    change: Callable[[torch.Tensor], torch.Tensor] | None,
) -> None:
    batch = witness.reserve({"A": 2})
    inputs = dict(zip("qkv", witness.inputs(batch, 0), strict=True))
    if change is not None:
        inputs[name] = change(inputs[name])
    refuse(witness, words, lambda: batch.attend(layer, inputs["q"], inputs["k"], inputs["v"]))
    witness.attend(batch)
    witness.commit(batch)


@contract
@pytest.mark.parametrize(
    "words, options",
    [
        ("block_size is 0; it must be a whole number, at least 1", {"block_size": 0}),
        ("num_blocks is 1; it must be a whole number, at least 2", {"num_blocks": 1}),
        ("num_layers is 0", {"num_layers": 0}),
        ("num_kv_heads is -2", {"num_kv_heads": -2}),
        ("head_dim is 0", {"head_dim": 0}),
        ("max_seq_len is 0", {"max_seq_len": 0}),
        ("max_num_seqs is 0", {"max_num_seqs": 0}),
        ("max_seq_len is 2.5", {"max_seq_len": 2.5}),
        ("max_seq_len is True", {"max_seq_len": True}),
        ("dtype is torch.int64", {"dtype": torch.int64}),
        ("3 layer_specs for 2 layers", {"layer_specs": (None, None, None)}),
        ("1 layer_specs for 2 layers", {"layer_specs": (None,)}),
        ("each must be an AttentionSpec", {"layer_specs": (None, None)}),
        ("dtype is torch.float8_e4m3fn", {"dtype": torch.float8_e4m3fn}),
        ("dtype is float32", {"dtype": "float32"}),
        ("device is 'nowhere'", {"device": "nowhere"}),
    ],
)
def test_bad_config(stage: ModuleType, words: str, options: dict[str, object]) -> None:
    """A cache that could hold no sequence, or nothing that makes sense, is not built at all."""
    good = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "num_blocks": 9, "max_seq_len": 16}
    with pytest.raises(ValueError, match=re.escape(words)):
        stage.build_cache(Config(**(good | options)))  # type: ignore[arg-type]


@contract
def test_a_batch_that_cannot_be_built(witness: Witness, monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory for the batch's own tensors, say: what was taken for it is given back."""

    def fail(*args: object) -> None:
        raise MemoryError("no memory")

    before = witness.snapshot()
    with monkeypatch.context() as patch:
        patch.setattr(type(witness.cache), "_address", fail)
        with pytest.raises(MemoryError):
            witness.cache.reserve({"A": 2})
    witness.assert_unchanged(before, "a reserve that failed")
    witness.step({"A": 2})
