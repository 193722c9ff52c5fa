"""The kernels as operators of torch: compilers see them, and results are those of the kernels."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

pytest.importorskip("triton")

from pagedattn import kernels, operators
from pagedattn.attention import AttentionSpec, attention
from pagedattn.course.witness import DEVICE
from pagedattn.kernels import AttentionPlan, new_plan

OPERATORS = torch.ops.pagedattn
HEADS, KV_HEADS, DIM, BLOCK_SIZE = 2, 1, 8, 4
TOLERANCE = 4e-6  # float32, outputs of size 1: a few units in the last place
PLAIN = AttentionSpec()
SPEC = AttentionSpec(scale=0.3, window=5, soft_cap=9.0, alibi_slopes=(0.1, 0.2))


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


class Step:
    """A prompt of 7 tokens that is whole, and one token after 5; blocks 5, 2 and 4, 1."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        with torch.device(DEVICE):
            self.q = torch.randn(8, HEADS, DIM)
            self.k, self.v = torch.randn(2, 8, KV_HEADS, DIM)
            self.k_cache, self.v_cache = torch.randn(2, 6, BLOCK_SIZE, KV_HEADS, DIM)
            self.block_table = torch.stack([int32(5, 2), int32(4, 1)])
            self.seq_lens, self.query_start_loc = int32(7, 6), int32(0, 7, 8)
            self.positions = torch.tensor([0, 1, 2, 3, 4, 5, 6, 5])
            self.slot_mapping = torch.tensor([20, 21, 22, 23, 8, 9, 10, 5])

    @property
    def batch(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.block_table, self.seq_lens, self.query_start_loc

    def plan(self, **options: Any) -> AttentionPlan:
        sizes = 2, 8, HEADS, KV_HEADS, DIM
        return new_plan(*sizes, dtype=torch.float32, device=DEVICE, **options)

    def dense(self, spec: AttentionSpec) -> Tensor:
        """Each row's attention in float64, once its new K and V are stored."""
        parts = []
        for queries, blocks, length in ((slice(0, 7), [5, 2], 7), (slice(7, 8), [4, 1], 6)):
            keys, values = (
                cache[blocks].flatten(0, 1)[:length].double()
                for cache in (self.k_cache, self.v_cache)
            )
            parts.append(attention(self.q[queries].double(), keys, values, spec))
        return torch.cat(parts).float()


@pytest.fixture
def step() -> Step:
    return Step()


def layer(step: Step, q: Tensor, plan: AttentionPlan, spec: AttentionSpec) -> Any:
    """All operators in a row, with arithmetic between them that a compiler may fuse."""
    slots = operators.compute_slot_mapping(
        step.block_table, step.query_start_loc, step.positions, BLOCK_SIZE
    )
    operators.write_kv(step.k_cache, step.v_cache, step.k, step.v, slots)
    operators.plan_attention(plan, step.seq_lens, step.query_start_loc, step.block_table)
    lse = torch.empty(q.shape[:2], device=q.device)
    caches = step.k_cache, step.v_cache
    half = operators.paged_attention(q * 0.5 * 2, *caches, *step.batch, spec, plan, lse=lse)
    out, _ = operators.merge_attention_states(half, lse, half, lse)
    operators.copy_blocks(step.k_cache[None], step.v_cache[None], int32(5), int32(3))
    return out - 1, lse


@pytest.mark.parametrize(
    ("spec", "options"),
    [(SPEC, {"window": 5}), (PLAIN, {"share_block_size": BLOCK_SIZE})],
    ids=["a plan", "a plan with shared prefixes"],
)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_function(
    step: Step, backend: str, spec: AttentionSpec, options: dict[str, Any]
) -> None:
    """One graph without a break, and what the kernels give: output and caches. A second batch
    needs no second compilation."""
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    plan = step.plan(**options)
    for _ in range(2):
        step.q.normal_(), step.k.normal_(), step.v.normal_()
        with torch._dynamo.config.patch(error_on_recompile=True):
            out, lse = compiled(step, step.q, plan, spec)
        flat = step.k_cache.flatten(0, 1)
        assert torch.equal(flat[step.slot_mapping], step.k)
        assert torch.equal(step.v_cache[3], step.v_cache[5])
        assert (out + 1 - step.dense(spec)).abs().max() < TOLERANCE  # two equal parts: their mean
        expected = torch.empty_like(lse)
        kernels.paged_attention(step.q, step.k_cache, step.v_cache, *step.batch, spec, lse=expected)
        assert (lse - expected).abs().max() < TOLERANCE


class Layer(torch.nn.Module):
    def forward(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor,
        block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor,
    ) -> Tensor:  # fmt: skip
        operators.write_kv(k_cache, v_cache, k, v, slots)
        return operators.paged_attention(
            q, k_cache, v_cache, block_table, seq_lens, query_start_loc
        )


def test_an_exported_program(step: Step) -> None:
    """It holds the operators, serves another number of tokens, and writes the caller's cache."""
    arguments = (
        step.q, step.k_cache, step.v_cache, step.k, step.v, step.slot_mapping, *step.batch
    )  # fmt: skip
    grows = {0: torch.export.Dim.AUTO}
    shapes = tuple(grows if x.shape[0] != 6 else None for x in arguments)  # the caches do not
    program = torch.export.export(Layer(), arguments, dynamic_shapes=shapes)
    called = {node.target for node in program.graph.nodes}
    assert {OPERATORS.write_kv.default, OPERATORS.paged_attention.default} <= called
    fewer = (
        step.q[:7], step.k_cache, step.v_cache, step.k[:7], step.v[:7], step.slot_mapping[:7],
        step.block_table[:1], int32(7), int32(0, 7),
    )  # fmt: skip
    found = program.module()(*fewer)
    assert torch.equal(step.k_cache.flatten(0, 1)[step.slot_mapping[:7]], step.k[:7])
    assert (found - step.dense(AttentionSpec())[:7]).abs().max() < TOLERANCE


def write(step: Step) -> tuple[Any, ...]:
    return OPERATORS.write_kv, step.k_cache, step.v_cache, step.k, step.v, step.slot_mapping


def copy(step: Step) -> tuple[Any, ...]:
    return OPERATORS.copy_blocks, step.k_cache[None], step.v_cache[None], int32(5), int32(3)


def slots(step: Step) -> tuple[Any, ...]:
    batch = step.block_table, step.query_start_loc, step.positions, BLOCK_SIZE
    return OPERATORS.compute_slot_mapping, *batch


def merge(step: Step) -> tuple[Any, ...]:
    lse = torch.randn(8, HEADS, device=DEVICE)
    return OPERATORS.merge_attention_states, step.q, lse, step.q + 1, lse - 1


def plan(step: Step) -> tuple[Any, ...]:
    parts = operators._parts(step.plan())
    return OPERATORS.plan_attention, *parts, step.seq_lens, step.query_start_loc


def attend(step: Step) -> tuple[Any, ...]:
    batch = step.q, step.k_cache, step.v_cache, *step.batch
    return OPERATORS.paged_attention, *batch, [], [], None


def attend_with_a_plan(step: Step) -> tuple[Any, ...]:
    """One row of 130 keys, which is cut into splits: their parts lie in the plan's buffers."""
    caches = torch.randn(2, 34, BLOCK_SIZE, KV_HEADS, DIM, device=DEVICE)
    table = torch.arange(1, 34, dtype=torch.int32, device=DEVICE)[None]
    lengths, bounds, made = int32(130), int32(0, 1), step.plan()
    kernels.plan_attention(made, lengths, bounds)
    numbers = [0.3, None, 9.0, [0.1] * HEADS, [0.5] * HEADS, None, None]
    lse = torch.zeros(1, HEADS, device=DEVICE)
    batch = step.q[:1], *caches, table, lengths, bounds
    return OPERATORS.paged_attention, *batch, *operators._parts(made), lse, *numbers


@pytest.mark.parametrize("call", [write, copy, slots, merge, plan, attend, attend_with_a_plan])
def test_torch_checks_each(step: Step, call: Callable[[Step], tuple[Any, ...]]) -> None:
    """What it writes is what it says; its fake gives the shapes; it can be traced."""
    operator, *arguments = call(step)
    opcheck(operator.default, tuple(arguments))


@pytest.mark.parametrize("call", [slots, merge, attend])
def test_fakes_have_the_shapes_and_types(
    step: Step, call: Callable[[Step], tuple[Any, ...]]
) -> None:
    """On tensors without numbers; nothing runs."""
    operator, *arguments = call(step)
    real = operator(*arguments)
    fake = operator(*(a.to("meta") if isinstance(a, Tensor) else a for a in arguments))
    for found, expected in zip(as_tuple(fake), as_tuple(real), strict=True):
        assert found.device.type == "meta"
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)


def as_tuple(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize(
    "options", [{}, {"window": 5}, {"share_block_size": 4}, {"batch_invariant": True}], ids=str
)
def test_a_plan_survives_the_way_through_an_operator(step: Step, options: dict[str, Any]) -> None:
    made = step.plan(**options)
    again = operators._whole(*operators._parts(made))
    for found, expected in ((again, made), (again.shared, made.shared)):
        assert type(found) is type(expected)
        for field in fields(expected) if expected is not None else ():
            value, wanted = getattr(found, field.name), getattr(expected, field.name)
            same = value is wanted if isinstance(wanted, Tensor) else value == wanted
            assert same or field.name == "shared", field.name


def test_refusals_come_through(step: Step) -> None:
    with pytest.raises(ValueError, match=r"slot_mapping is torch\.int32"):
        operators.write_kv(
            step.k_cache, step.v_cache, step.k, step.v, step.slot_mapping.to(torch.int32)
        )
