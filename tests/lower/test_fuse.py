"""Rewrites of local graphs are exact: the same program with and without them, and the single device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from program_builder import build, cheap_random_program, data_parallel, random_program, uneven
from small_models import Case, case
from test_lower import compare, distributed
from torch import fx
from torch.utils._pytree import tree_leaves

from hetspmd.lower import passes
from hetspmd.lower.aliases import SILENT_VIEWS
from hetspmd.lower.emit import DTYPE, SHAPE, item
from hetspmd.rules.samples import load
from hetspmd.trace.values import torch_op

aten = torch.ops.aten


@pytest.fixture(scope="module")
def residual() -> Case:
    return case("residual")


def calls(*graphs: fx.GraphModule | None) -> list[fx.Node]:
    return [n for g in graphs if g is not None for n in g.graph.nodes if n.op == "call_function"]


def test_a_lone_device_runs_the_ops_of_eager_pytorch(residual: Case) -> None:
    theory = residual.theory
    program = data_parallel(theory, theory.graph.inputs[0].tensor)
    lengths = uneven(theory, 1)
    compare(residual, program, lengths)
    ((lowered, *_),) = distributed(residual, program, lengths)
    nodes = calls(lowered.forward, lowered.backward)
    targets = [n.target for n in nodes]
    assert [n.args[10] for n in nodes if n.target is aten.convolution_backward.default] == [
        [True, True, False], [False, True, False]
    ]  # fmt: skip
    assert aten.scatter_.src in targets
    assert aten.scatter.value not in targets
    assert targets.count(aten.relu_.default) == 2
    assert aten.alias.default not in targets
    assert aten.slice.Tensor not in targets
    assert not any("start" in str(t) for t in targets)


def test_fused_and_not_the_bits_agree_but_for_sums_in_another_order(residual: Case) -> None:
    theory = residual.theory
    program = data_parallel(theory, theory.graph.inputs[0].tensor)
    fused = distributed(residual, program, uneven(theory, 1))
    kept = tuple(p for p in passes.PASSES if p.name in ("emit", "unread", "spare", "check"))
    with patch.object(passes, "PASSES", kept):
        plain = distributed(residual, program, uneven(theory, 1))
    for (_, *one), (_, *other) in zip(fused, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_random_programs_equal_the_single_device(residual: Case, world: int) -> None:
    for seed in range(4):
        make = random_program if seed % 2 else cheap_random_program
        compare(residual, make(residual.theory, seed), uneven(residual.theory, world, seed))


def test_every_row_taken_whole_on_several_ranks(residual: Case) -> None:
    """Nothing is sharded, so that all is fused on every rank of several."""
    program = build(residual.theory, lambda _, rows: rows[0])
    compare(residual, program, uneven(residual.theory, 3, 1))


# graphs written by hand -----------------------------------------------------------------------------------------


class Written:
    """A graph over float64 placeholders of the given shapes."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        self.graph = fx.Graph()
        self.values = {name: torch.rand(shape, dtype=torch.float64) - 0.5 for name, shape in shapes.items()}
        self.nodes = {name: self.graph.placeholder(name) for name in shapes}
        for name, shape in shapes.items():
            self.nodes[name].meta.update({SHAPE: shape, DTYPE: "float64"})

    def call(self, target: Any, *args: Any, shape: tuple[int, ...] | None = None, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta.update({SHAPE: shape, DTYPE: "float64"})
        return node

    def fused(self, *results: fx.Node) -> list[Any]:
        """The targets after the rewrites, which change neither results nor what was given."""
        self.graph.output(list(results))
        inputs = list(self.values.values())
        want = fx.GraphModule({}, self.graph)(*[t.clone() for t in inputs])
        for each in passes.PASSES:
            if isinstance(each.run, passes.Rewrite):
                each.run.rewrite(self.graph)
        self.graph.lint()
        given = [t.clone() for t in inputs]
        got = fx.GraphModule({}, self.graph)(*given)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(given, inputs, rtol=0, atol=0)
        return [n.target for n in self.graph.nodes if n.op == "call_function"]


def test_what_dies_is_written_to() -> None:
    w = Written(x=(3, 4), y=(3, 4))
    made = w.call(aten.exp.default, w.nodes["x"], shape=(3, 4))
    total = w.call(aten.add.Tensor, w.nodes["y"], made, shape=(3, 4))
    assert w.fused(w.call(aten.relu.default, total, shape=(3, 4))) == [
        aten.exp.default, aten.add_.Tensor, aten.relu_.default
    ]  # fmt: skip


@pytest.mark.parametrize(
    "how",
    ["given", "read later", "result", "viewed", "broadcast", "twice", "alpha", "narrower", "view of view"],
)
def test_what_lives_on_is_not_written_to(how: str) -> None:
    w = Written(x=(3, 4), y=(1, 4))
    x = w.nodes["x"]
    made = w.call(aten.exp.default, x, shape=(3, 4))
    if how == "given":
        assert aten.relu.default in w.fused(w.call(aten.relu.default, x, shape=(3, 4)))
    elif how == "read later":
        one = w.call(aten.relu.default, made, shape=(3, 4))
        assert aten.relu.default in w.fused(one, w.call(aten.sin.default, made, shape=(3, 4)))
    elif how == "result":
        assert aten.relu.default in w.fused(made, w.call(aten.relu.default, made, shape=(3, 4)))
    elif how in ("viewed", "view of view"):
        view = w.call(aten.t.default, made, shape=(4, 3))
        if how == "view of view":
            view = w.call(aten.t.default, view, shape=(3, 4))
        one = w.call(aten.relu.default, made, shape=(3, 4))
        assert aten.relu.default in w.fused(one, w.call(aten.sin.default, view))
    elif how == "broadcast":
        small = w.call(aten.exp.default, w.nodes["y"], shape=(1, 4))
        assert aten.sub.Tensor in w.fused(w.call(aten.sub.Tensor, small, x, shape=(3, 4)))
    elif how == "twice":
        assert aten.mul.Tensor in w.fused(w.call(aten.mul.Tensor, made, made, shape=(3, 4)))
    elif how == "alpha":
        assert aten.add.Tensor in w.fused(w.call(aten.add.Tensor, x, made, shape=(3, 4), alpha=3))
    else:
        whole = w.call(aten.ones_like.default, x, shape=(3, 4), dtype=torch.int64)
        whole.meta[DTYPE] = "int64"
        assert aten.div.Tensor in w.fused(w.call(aten.div.Tensor, whole, 2, shape=(3, 4)))


@pytest.mark.parametrize("change", ["none", "rows", "value read", "not zeros"])
def test_numbers_are_scattered_only_to_zeros(change: str) -> None:
    w = Written(x=(5, 3), row=(5, 1), wide=(5, 3))
    make = aten.ones_like.default if change == "not zeros" else aten.zeros_like.default
    index = w.call(aten.argmax.default, w.nodes["x"], 1, True, shape=(5, 1))
    filled = w.call(
        aten.scatter.value, w.call(make, w.nodes["x"], shape=(5, 3)), 1, index, -1.0, shape=(5, 3)
    )
    row = w.nodes["wide" if change == "rows" else "row"]
    product = w.call(aten.mul.Tensor, filled, row, shape=(5, 3))
    targets = w.fused(product, *([filled] if change == "value read" else []))
    assert (aten.scatter_.src in targets) == (change == "none")


@pytest.mark.parametrize("between", [False, True])
def test_gradients_of_a_convolution_are_joined_where_they_are_neighbours(between: bool) -> None:
    w = Written(g=(2, 4, 3, 3), x=(2, 3, 5, 5), w=(4, 3, 3, 3))
    g, x, weight = w.nodes.values()
    more = ([0], [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    first = w.call(aten.convolution_backward.default, g, x, weight, *more, [True, False, False])
    dx = w.call(item, first, 0)
    if between:
        dx = w.call(aten.sin.default, dx)
    second = w.call(aten.convolution_backward.default, g, x, weight, *more, [False, True, False])
    targets = w.fused(dx, w.call(item, second, 1))
    assert targets.count(aten.convolution_backward.default) == (2 if between else 1)


# which results are memory of their own --------------------------------------------------------------------------


def sampled() -> Iterator[tuple[str, Any]]:
    for op, samples in sorted(load().samples.items()):
        if op.startswith("aten."):
            yield op, samples


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter")
def test_no_op_but_the_listed_returns_its_operands_memory_silently() -> None:
    seen = 0
    for name, samples in sampled():
        op = torch_op(name)
        if any(r.alias_info is not None for r in op._schema.returns):
            continue
        for args, kwargs in samples():
            given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            memory = {t.untyped_storage().data_ptr() for t in given if t.untyped_storage().nbytes()}
            with torch.no_grad():
                results = tree_leaves(op(*args, **kwargs))
            made = [t for t in results if isinstance(t, torch.Tensor) and t.untyped_storage().nbytes()]
            storages = [t.untyped_storage().data_ptr() for t in made]
            seen += 1
            if op not in SILENT_VIEWS:
                assert not memory & set(storages), name
    assert seen > 500
