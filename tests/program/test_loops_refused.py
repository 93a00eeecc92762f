"""What may not run in the loop over micro-batches is refused, one reason at a time."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hetspmd
from hetspmd.cost.loop_memory import AxisPlaces
from hetspmd.errors import ProofError
from hetspmd.placement import PARTIAL, is_sharded
from hetspmd.program.loop_steps import repeatable
from hetspmd.program.micro_batch_check import check_loop, check_repeated
from hetspmd.program.micro_batches import MicroBatches, micro_batches
from hetspmd.program.time_split import Loop
from hetspmd.rules.theory import Theory, derive
from hetspmd.trace.trace import trace
from workbench import cluster

ROWS = 7


class Layers(nn.Module):
    """``dropped``: some weights of the last layer are dropped; ``scaled``: an output is a function of the whole
    loss and of weights alone; ``numbered``: each row has its number added; ``shown``: the loss is an output once
    more, as a view."""

    def __init__(self, **kinds: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.kinds = nn.Linear(6, 8), nn.Linear(8, 5), kinds

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        if self.kinds.get("numbered"):
            x = x + torch.arange(ROWS, dtype=x.dtype)[:, None]
        weight = F.dropout(self.last.weight, 0.3, self.kinds.get("dropped", False))
        loss = F.cross_entropy(F.linear(torch.tanh(self.first(x)), weight, self.last.bias), y)
        if self.kinds.get("scaled"):
            return {"loss": loss, "scaled": loss.detach().exp() * self.last.weight.detach().square().sum()}
        return {"loss": loss, "again": loss.view(1)} if self.kinds.get("shown") else loss


def batch() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(ROWS, 6, generator=draw, dtype=torch.float64),
        "y": torch.randint(0, 5, (ROWS,), generator=draw),
    }


@cache
def divided(*kinds: str) -> tuple[Theory, MicroBatches, dict[str, int]]:
    """A step in three micro-batches, of 3, 2 and 2 samples, and its tensors by name."""
    theory = derive(trace(Layers(**dict.fromkeys(kinds, True)).double(), (), batch()), quiet=True)
    return theory, micro_batches(theory, 3), {t.name: t.id for t in theory.graph.tensors}


def changed(loop: Loop, instruction: int, phase: Any, row: Any) -> Loop:
    phases, rows = list(loop.phases), list(loop.rows)
    phases[instruction], rows[instruction] = phase, row
    return replace(loop, phases=tuple(phases), rows=tuple(rows))


def test_a_source_is_not_in_the_loop() -> None:
    theory, batches, names = divided()
    source = theory.graph.producers[names["x"]]
    for row in theory.rows[source]:
        with pytest.raises(ProofError, match="is a source, which is read before the loop"):
            check_loop(theory, changed(batches.loop, source, "in", row))


def test_an_instruction_in_the_loop_divides_samples_and_no_other_axis() -> None:
    theory, batches, _ = divided()
    product = next(i for i in theory.graph.instructions if i.op == "aten.addmm.default")
    assert batches.loop.phases[product.id] == "in"
    whole = next(row for row in theory.rows[product.id] if row.factor is None and PARTIAL not in row.pre)
    with pytest.raises(ProofError, match="which divides no samples"):
        check_loop(theory, changed(batches.loop, product.id, "in", whole))
    features = next(row for row in theory.rows[product.id] if row.factor is not None and PARTIAL in row.pre)
    with pytest.raises(ProofError, match="an axis in the loop that micro-batches do not divide"):
        check_loop(theory, changed(batches.loop, product.id, "in", features))


def test_a_weight_of_which_random_numbers_choose_is_gathered_once() -> None:
    theory, batches, names = divided("dropped")
    able = repeatable(theory, batches)
    assert names["first.weight"] in able
    assert names["last.weight"] not in able
    with pytest.raises(ProofError, match="would draw other numbers in each micro-batch"):
        check_repeated(theory, batches.loop, [names["last.weight"]])


def test_what_is_read_after_the_loop_is_gathered_once() -> None:
    theory, batches, names = divided("scaled")
    able = repeatable(theory, batches)
    assert names["first.weight"] in able
    assert names["last.weight"] not in able
    read = {t for i in theory.graph.instructions if batches.loop.phases[i.id] == "after" for t in i.inputs}
    before = [t for t in sorted(read) if batches.is_made_before(theory.graph, t)]
    assert before
    for tensor in before:
        assert tensor not in able
        with pytest.raises(ProofError, match="reads it after the loop"):
            check_repeated(theory, batches.loop, [tensor])


def test_memory_is_that_of_the_largest_micro_batch() -> None:
    theory, batches, _ = divided()
    places = AxisPlaces(theory, batches)
    in_time = {t.id: batches.placements.get(t.id, PARTIAL) for t in theory.graph.tensors}
    rows = [(tensor, placement) for tensor, placement in in_time.items() if is_sharded(placement)]
    assert rows
    for tensor, placement in rows:
        _, nbytes = places.of(tensor, placement)
        assert nbytes * ROWS == theory.graph.tensors[tensor].nbytes * 3


@pytest.mark.parametrize("kind", ["shown", "numbered"])
def test_what_differs_from_one_micro_batch_to_the_next(kind: str) -> None:
    """Two sums of which one is a view of the other, and a constant with a row for each sample."""
    model = Layers(**{kind: True}).double()
    report = hetspmd.verify(model, batch(), cluster(2, 1), micro_batches=3, dtype="float64")
    assert report.ok
    assert max(report.loss_error, report.gradient_error) < 1e-12
