"""Shards that another plan has made: taken where they fit the graph's axes, stored apart elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hetspmd.cost.model import CostModel
from hetspmd.errors import PlanError, ProofError
from hetspmd.placement import REPLICATE, shard
from hetspmd.program.checker import check
from hetspmd.program.program import Communicate, Program
from hetspmd.program.stored import Stored, as_stored
from hetspmd.rules.theory import Theory, derive
from hetspmd.search.constraints import Constraints
from hetspmd.search.search import Limits, Searcher
from hetspmd.search.space import search_space
from nets import parameter, traced
from workbench import cluster

RATIOS = ((0.5, 0.25, 0.25),)
Forward = Callable[[Any, torch.Tensor], torch.Tensor]


def theory_of(forward: Forward, training: bool = False, **shapes: tuple[int, ...]) -> Theory:
    parameters = {name: parameter(*shape) for name, shape in shapes.items()}
    return derive(traced(forward, torch.randn(4, 12), training=training, **parameters), quiet=True)


def apart(theory: Theory) -> dict[str, int]:
    return {
        p.name: d
        for p in theory.graph.parameters
        for t, d in theory.graph.stored_apart.items()
        if t == p.tensor
    }


def program(theory: Theory, stored: Stored) -> tuple[Theory, Program]:
    """The best program with that storage, proven."""
    made, forms, lengths = as_stored(theory, stored, RATIOS)
    for p in theory.graph.parameters:
        form, extents = stored.get(p.name, (REPLICATE, ()))
        assert forms[p.tensor] == form
        shape = made.graph.tensors[p.tensor].shape
        if form != REPLICATE:
            assert lengths.extents(made.axes, p.tensor, form, shape[form - 2]) == extents
    searcher = Searcher(search_space(made, Constraints(forms)))
    found = searcher.search(CostModel(made, cluster(2, 1, 1)), lengths, Limits())
    check(made, found.program)
    return made, found.program


def linear(net: Any, x: torch.Tensor) -> torch.Tensor:
    return x @ net.w


def test_shards_that_fit_are_used_where_they_lie() -> None:
    theory = theory_of(linear, w=(12, 8))
    made, forms, lengths = as_stored(theory, {"w": (shard(1), (5, 0, 3))}, RATIOS)
    assert made is theory
    axis = theory.axes.axis(theory.graph.parameters[0].tensor, 1)
    assert axis is not None
    assert lengths.units[axis.id] == (5, 0, 3)
    assert list(forms.values()) == [shard(1)]


@pytest.mark.parametrize(
    "forward",
    [
        lambda n, x: x @ n.w.softmax(0),
        lambda n, x: x @ n.w.sort(0).values,
        lambda n, x: x @ n.w.cumsum(0),
        lambda n, x: x @ torch.linalg.qr(n.w)[0],
        lambda n, x: x.sum(),
    ],
)
@pytest.mark.parametrize("training", [False, True])
def test_a_dim_that_the_graph_does_not_cut(forward: Forward, training: bool) -> None:
    scalar = lambda n, x: forward(n, x).pow(2).sum()  # noqa: E731  # one line beside its use
    theory = theory_of(scalar, training, w=(12, 8))
    made, _ = program(theory, {"w": (shard(0), (1, 0, 11))})
    assert apart(made) == {"w": 0}


def test_other_units() -> None:
    """Heads of four columns: five are no whole number of them; eight are."""
    heads = lambda n, x: (x @ n.w).view(4, 3, 4).softmax(-1)  # noqa: E731  # one line beside its use
    theory = theory_of(heads, w=(12, 12))
    made, _ = program(theory, {"w": (shard(1), (5, 6, 1))})
    assert apart(made) == {"w": 1}
    made, _ = program(theory, {"w": (shard(1), (8, 0, 4))})
    assert made is theory


def test_of_two_lengths_on_one_axis_the_larger_parameters_keep_it() -> None:
    theory = theory_of(lambda n, x: (x @ n.w + n.b) * n.c, w=(12, 8), b=(8,), c=(8,))
    wide, others = (shard(1), (4, 2, 2)), (shard(0), (2, 2, 4))
    made, _ = program(theory, {"w": wide, "b": others, "c": others})
    assert apart(made) == {"b": 0, "c": 0}
    made, _ = program(theory, {"b": others, "c": others})
    assert made is theory
    made, _ = program(theory, {"b": others, "c": (shard(0), (8, 0, 0))})
    assert apart(made) == {"c": 0}


def test_lengths_of_storage_are_nothing_elses() -> None:
    """Beside it the axes have as many units, and the lengths, that they would have without."""
    theory = theory_of(lambda n, x: (x @ n.w).view(4, 3, 4).softmax(-1) * n.s, w=(12, 12), s=(4,))
    made, _, lengths = as_stored(theory, {"w": (shard(1), (5, 6, 1))}, RATIOS)
    plain = as_stored(theory, {}, RATIOS)[2]
    w = theory.graph.parameters[0].tensor
    for (tensor, dim), axis in theory.axes.of.items():
        if tensor == w:
            continue
        new = made.axes.axis(tensor, dim)
        assert new is not None
        assert new.units == theory.axes.axes[axis].units
        assert lengths.units[new.id] == plain.units[axis]


def test_a_program_that_uses_the_shard_as_the_whole_is_refused() -> None:
    theory = theory_of(lambda n, x: x @ n.w.softmax(0), w=(12, 8))
    made, proven = program(theory, {"w": (shard(0), (1, 0, 11))})
    gathers = [s for s in proven.steps if isinstance(s, Communicate) and s.source == shard(0)]
    assert gathers
    for gather in gathers:
        left = tuple(s for s in proven.steps if s is not gather)
        wrong = Program(left, proven.loss, proven.outputs, proven.gradients, proven.buffers)
        with pytest.raises(ProofError):
            check(made, wrong)


@pytest.mark.parametrize(("form", "extents"), [(shard(0), (1, 1, 1)), (shard(2), (4, 4, 4))])
def test_extents_of_another_parameter_are_refused(form: int, extents: tuple[int, ...]) -> None:
    theory = theory_of(linear, w=(12, 8))
    with pytest.raises(PlanError, match=r"w of shape \[12, 8\] cannot be stored in shards of"):
        as_stored(theory, {"w": (form, extents)}, RATIOS)
