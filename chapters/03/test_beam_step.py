"""One step of a beam search: some sequences end, and others continue them by one token each."""

from types import SimpleNamespace

import pytest

from pagedattn.course.witness import Witness


def beams(stage, num_tokens, names, **options):
    """Beams of one prompt, each with its own last token computed."""
    witness = Witness(stage, **options)
    witness.add(names[0], num_tokens - 1)
    witness.step({names[0]: witness.waiting(names[0])})
    for name in names[1:]:
        witness.fork(names[0], name)
    witness.decode(*names)
    return witness


@pytest.mark.contract
def test_heirs_continue_their_parents(stage):
    """A has two heirs, B one, C none."""
    witness = beams(stage, 7, "ABC")
    known = {s: list(h.token_ids) for s, h in witness.histories.items()}
    witness.replace(list("ABC"), [("A", "D"), ("B", "E"), ("A", "F")])
    assert set(witness.cache.seq_ids) == set("DEF"), repr(witness)
    for child, parent in {"D": "A", "E": "B", "F": "A"}.items():
        history = witness.histories[child].token_ids
        assert history[:-1] == known[parent] and len(history) == 8
        assert witness.cache.num_tokens(child) == 8, (
            f"{child} is {parent} and one token: no token of another heir ({witness!r})"
        )
        assert witness.cache.num_computed_tokens(child) == 7
    witness.step(dict.fromkeys("DEF", 1))
    witness.check_contents()


@pytest.mark.contract
def test_no_child_has_the_token_of_another(stage):
    """Canonical: vllm-project/vllm#1101. One parent, the continuations x, y and z."""
    witness = Witness(stage)
    witness.add("A", 6)
    witness.step({"A": witness.waiting("A")})
    witness.replace(["A"], [("A", "x"), ("A", "y"), ("A", "z")])
    batch = witness.reserve(dict.fromkeys("xyz", 1))  # compares the tokens with the histories
    witness.attend(batch)
    witness.commit(batch)
    assert len({witness.histories[s].token_ids[-1] for s in "xyz"}) == 3
    witness.check_contents()


@pytest.mark.contract
def test_a_sole_heir_writes_in_place(stage):
    """B dies, A has one heir: nobody else names A's last block when the heir writes."""
    witness = beams(stage, 7, "AB")
    copies, last = witness.cache.num_copies, witness.cache.block_ids("A")[1]
    witness.replace(["A", "B"], [("A", "C")])
    witness.step({"C": 1})
    assert witness.cache.num_copies == copies, f"C is the only owner: {witness!r}"
    assert witness.cache.block_ids("C")[1] == last, repr(witness)
    witness.check_contents()


@pytest.mark.contract
def test_several_heirs_need_one_copy_less(stage):
    witness = beams(stage, 7, "ABC")
    copies = witness.cache.num_copies
    witness.replace(list("ABC"), [("B", "D"), ("B", "E"), ("B", "F")])
    witness.step(dict.fromkeys("DEF", 1))
    assert witness.cache.num_copies == copies + 2, f"3 heirs of one beam: {witness!r}"
    witness.check_contents()


@pytest.mark.contract
def test_what_only_the_dead_held_is_free(stage):
    witness = beams(stage, 7, "ABC")  # one shared block and three own ones
    free = witness.cache.pool.num_free_blocks
    witness.replace(list("ABC"), [("B", "D")])
    assert witness.cache.pool.num_free_blocks == free + 2, f"A and C are gone: {witness!r}"
    witness.check()


@pytest.mark.contract
def test_a_step_takes_no_block(stage):
    """With no free block at all the beams are still replaced; only `reserve` needs memory."""
    witness = beams(stage, 6, "AB", num_blocks=4)
    assert witness.cache.pool.num_free_blocks == 0, repr(witness)
    witness.replace(["A", "B"], [("A", "C"), ("B", "D")])
    witness.step({"C": 1, "D": 1})
    witness.check_contents()


@pytest.mark.contract
def test_no_heir_at_all(stage):
    witness = beams(stage, 7, "AB")
    witness.replace(["A", "B"], [])
    usage = witness.cache.usage()
    assert usage.free == usage.total, repr(witness)


@pytest.mark.contract
def test_heirs_that_can_be_listed_once(stage):
    witness = beams(stage, 7, "AB")
    witness.cache.replace(iter("AB"), (heir("A", child) for child in "CD"))
    assert witness.cache.seq_ids == ["C", "D"], repr(witness)


@pytest.mark.contract
def test_a_name_within_a_name(stage):
    """Sequence "AB" is none of those that the text "AB" names letter by letter."""
    witness = beams(stage, 7, ["A", "B", "AB"])
    before = witness.snapshot()
    with pytest.raises(ValueError, match="'C' would continue 'AB', which is not among"):
        witness.cache.replace("AB", [heir("AB", "C")])
    witness.assert_unchanged(before, "a refusal")


@pytest.mark.contract
def test_others_are_left_alone(stage):
    witness = beams(stage, 7, "AB")
    witness.add("Z", 5)
    witness.step({"Z": witness.waiting("Z")})
    blocks = witness.cache.block_ids("Z")
    witness.replace(["A", "B"], [("A", "C"), ("A", "D")])
    assert witness.cache.block_ids("Z") == blocks, repr(witness)
    witness.decode("C", "Z", "D")
    witness.check_contents()


@pytest.mark.contract
def test_many_steps(stage):
    """Four beams, 12 steps; which ones live on follows a fixed pattern."""
    witness = beams(stage, 6, ["0.0", "0.1", "0.2", "0.3"])
    for step in range(1, 13):
        old = [f"{step - 1}.{i}" for i in range(4)]
        parents = [(step * i) % 4 for i in range(4)]
        heirs = [(old[parent], f"{step}.{i}") for i, parent in enumerate(parents)]
        witness.replace(old, heirs)
        witness.step({child: 1 for _, child in heirs})
        witness.check_contents()
    for i in range(4):
        witness.free(f"12.{i}")
    assert witness.cache.usage().used == 0, repr(witness)


def heir(parent, seq_id, token_id=1):
    return SimpleNamespace(parent=parent, seq_id=seq_id, token_id=token_id)


@pytest.mark.contract
@pytest.mark.parametrize(
    "words, seq_ids, heirs",
    [
        ("unknown sequence 'X'", ["A", "X"], []),
        ("'A' is to end twice", ["A", "A"], []),
        ("'D' would continue 'Z', which is not among", ["A", "B"], [heir("Z", "D")]),
        ("'D' would continue 'B', which is not among", ["A"], [heir("A", "C"), heir("B", "D")]),
        ("sequence 'Z' is in the cache already", ["A", "B"], [heir("A", "C"), heir("A", "Z")]),
        ("sequence 'A' is in the cache already", ["A", "B"], [heir("A", "A")]),
        ("sequence 'C' is in the cache already", ["A", "B"], [heir("A", "C"), heir("B", "C")]),
        ("token id -1", ["A", "B"], [heir("A", "C"), heir("B", "D", -1)]),
        ("token id is 0.5", ["A", "B"], [heir("A", "C", 0.5)]),
        ("'A' has 7 tokens; 1 more exceed its limit of 7", ["A", "B"], [heir("A", "C")]),
        ("max_num_seqs is 5", ["A", "B"], [heir("B", "C"), heir("B", "D"), heir("B", "E")]),
    ],
)
def test_refused_with_nothing_changed(stage, words, seq_ids, heirs):
    witness = Witness(stage, max_num_seqs=5)
    witness.add("A", 7, max_tokens=7 if "limit of 7" in words else None)
    for name in "BZ":
        witness.add(name, 6)
    witness.step({s: witness.waiting(s) for s in "ABZ"})
    before = witness.snapshot()
    with pytest.raises(ValueError, match=words):
        witness.cache.replace(seq_ids, heirs)
    witness.assert_unchanged(before, f"a refusal ({words})")
    witness.check()


@pytest.mark.contract
def test_not_while_a_batch_is_open(stage):
    witness = beams(stage, 7, "AB")
    witness.append("A")
    batch = witness.cache.reserve({"A": 1})
    before = witness.snapshot()
    with pytest.raises(ValueError, match="replace while a batch of \\['A'\\] is open"):
        witness.cache.replace(["A", "B"], [])
    witness.assert_unchanged(before, "a refusal")
    batch.abort()
