"""Equal calls share one rule; calls that Python merely compares as equal do not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from hetspmd.rules import OpRule, registry, rule, unregister
from hetspmd.rules.rule import Call
from hetspmd.rules.theory import derive
from hetspmd.trace.graph import INPUT, Argument, Graph, Input, Instruction, Ref, Tensor
from hetspmd.trace.trace import trace


def graph_of(*calls: tuple[str, tuple[Argument, ...]]) -> Graph:
    """Three inputs of 4 x 6 (0 and 1 float32, 2 float64), then the calls, each of one 4 x 6 output."""
    tensors = [Tensor(i, f"x{i}", (4, 6), dtype) for i, dtype in enumerate(("float32", "float32", "float64"))]
    instructions = [Instruction(i, f"x{i}", INPUT, (), (), (), (i,)) for i in range(3)]
    for op, args in calls:
        id_ = len(tensors)
        tensors.append(Tensor(id_, f"t{id_}", (4, 6), "float32"))
        inputs = tuple(a.id for a in args if isinstance(a, Ref))
        instructions.append(Instruction(id_, f"t{id_}", op, args, (), inputs, (id_,)))
    batch = tuple(Input(f"x{i}", i, i) for i in range(3))
    return Graph(tuple(tensors), tuple(instructions), (), (), batch, (), (), (), None, None, "", "")


@pytest.fixture
def asked() -> Iterator[list[Call]]:
    """The calls for which the rule of ``test::op`` was asked."""
    calls: list[Call] = []

    @rule("test::op")
    def _(call: Call) -> OpRule:
        calls.append(call)
        return OpRule(flops=float(len(calls)))

    yield calls
    unregister("test::op")


OP = "test.op.default"


def test_equal_calls_share_a_rule(asked: list[Call]) -> None:
    theory = derive(graph_of((OP, (Ref(0), 1)), (OP, (Ref(1), 1)), (OP, (Ref(3), 1))))
    assert len(asked) == 1
    assert theory.rules[3] is theory.rules[4] is theory.rules[5]
    assert theory.calls[3].args == (Ref(0), 1)


@pytest.mark.parametrize(
    "args",
    [
        (Ref(0), True), (Ref(0), 1.0), (Ref(0), 1, 1), (Ref(0), (1,)), (Ref(0), "1"), (Ref(0), None),
        (Ref(2), 1), (Ref(0), Ref(1), 1), (1, Ref(0)),
    ],
    ids=repr,
)  # fmt: skip
def test_other_calls_have_their_own_rule(asked: list[Call], args: tuple[Argument, ...]) -> None:
    theory = derive(graph_of((OP, (Ref(0), 1)), (OP, args)))
    assert len(asked) == 2
    assert [theory.rules[i].flops for i in (3, 4)] == [1.0, 2.0]
    assert theory.calls[4] == asked[1]


def test_negative_zero_is_another_number(asked: list[Call]) -> None:
    derive(graph_of((OP, (Ref(0), 0.0)), (OP, (Ref(0), -0.0))))
    assert len(asked) == 2


def test_axes_follow_each_instruction_of_a_kind() -> None:
    op = "aten.mul.Tensor"
    theory = derive(graph_of((op, (Ref(0), Ref(1))), (op, (Ref(2), Ref(2)))))
    assert registry.rule_function(op) is not None
    assert theory.rules[3] is not theory.rules[4]
    first, second = theory.axes.axis(3, 0), theory.axes.axis(4, 0)
    assert first is not None
    assert second is not None
    assert first.members == ((0, 0), (1, 0), (3, 0))
    assert second.members == ((2, 0), (4, 0))


class Heads(nn.Module):
    """``a`` makes heads, which are whole; ``b`` reads them side by side."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(20, 6 * width), nn.Linear(6 * width, 30)
        self.width = width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.a(x).view(len(x), 6, self.width).softmax(-1)
        loss: torch.Tensor = self.b(heads.flatten(1)).square().mean()
        return loss


@pytest.mark.parametrize(("width", "alignment"), [(1, 8), (2, 4), (6, 4), (8, 1), (16, 1)])
def test_slices_of_parameters_have_alignments(width: int, alignment: int) -> None:
    """Multiples of 8 elements of a parameter, in units of whatever size; rows of a batch have none."""
    theory = derive(trace(Heads(width), (torch.ones(16, 20),), {}))
    parameters = {p.name: p.tensor for p in theory.graph.parameters}

    def alignments(tensor: int) -> list[int]:
        found = [theory.axes.axis(tensor, dim) for dim in range(len(theory.graph.tensors[tensor].shape))]
        return [axis.alignment for axis in found if axis is not None]

    assert alignments(parameters["a.weight"]) == [alignment, 8]
    assert alignments(parameters["a.bias"]) == [alignment]
    assert alignments(parameters["b.weight"]) == [8, alignment]
    assert alignments(theory.graph.inputs[0].tensor) == [1, 8]
