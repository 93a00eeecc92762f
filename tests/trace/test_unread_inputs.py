"""Tensors that are only asked for their dtype are no inputs: nothing forces them to be whole."""

from __future__ import annotations

from torch import Tensor, nn, ones

from hetspmd.trace.trace import trace


class Asking(nn.Module):
    """Adds constants of the activation's dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return (y * y + y.new_zeros(()) + y.new_ones(4) + y.new_full((4,), 3.0)).sum()


def test_new_tensors_read_nothing() -> None:
    graph = trace(Asking(), (ones(8, 4),), {})
    assert not [i.op for i in graph.instructions if ".new_" in i.op]
    made = [t for i in graph.instructions if i.op == "aten.full.default" and not i.inputs for t in i.outputs]
    added = [t for i in graph.instructions if i.op == "aten.add.Tensor" for t in i.inputs]
    assert len(made) == 3
    assert all(added.count(t) == 1 for t in made)
