"""Tracing: what becomes of parameters, buffers, inputs and outputs; the graph itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import hetspmd.rules.ops  # noqa: F401  # registers the rules
from hetspmd.errors import DroppedOutputWarning, ExampleError, TraceError
from hetspmd.trace.graph import BUFFER, INPUT, PARAMETER, TANGENT, Graph
from hetspmd.trace.trace import split_example, trace
from nets import Net, by_name, names, ops, parameter, traced

# parameters and buffers ---------------------------------------------------------------------------------------


def test_a_tied_parameter_is_one_tensor_with_one_gradient() -> None:
    head, tokens = nn.Linear(4, 7, bias=False), nn.Embedding(7, 4)
    head.weight = tokens.weight
    graph = trace(
        Net(lambda m, ids: m.head(m.tokens(ids)).square().mean(), tokens=tokens, head=head),
        (torch.arange(5),),
        {},
    )
    (found,) = graph.parameters
    assert found.names == ("tokens.weight", "head.weight")
    assert found.gradient is not None
    last = graph.producer(found.gradient)
    assert last.op == "aten.add.Tensor", "the sum of both uses"


def test_frozen_and_unused_parameters_have_no_gradient() -> None:
    frozen, unused, used = parameter(3), parameter(2), parameter(3)
    frozen.requires_grad_(False)
    members = {"frozen": frozen, "unused": unused, "used": used}
    found = by_name(traced(lambda m, x: (x * m.frozen * m.used).sum(), torch.randn(4, 3), **members))
    assert (found["frozen"].requires_grad, found["frozen"].gradient) == (False, None)
    assert (found["unused"].requires_grad, found["unused"].gradient) == (True, None)
    assert found["used"].gradient is not None
    assert set(found) == {"frozen", "unused", "used"}


def test_a_wholly_frozen_model_has_no_backward() -> None:
    weight = parameter(3).requires_grad_(False)
    graph = traced(lambda m, x: (x * m.weight).sum(), torch.randn(4, 3), weight=weight)
    assert graph.tangent is None
    assert ops(graph, "backward") == []


def test_mutated_buffers_have_their_new_values() -> None:
    norm = nn.BatchNorm1d(3)
    graph = traced(lambda m, x: m.norm(x).square().sum(), torch.randn(5, 3), norm=norm)
    updated = {b.name: b.updated for b in graph.buffers}
    assert set(updated) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert None not in updated.values()
    assert graph.tensors[updated["norm.num_batches_tracked"]].dtype == "int64"
    assert {i.phase for t in updated.values() for i in [graph.producer(t)]} == {"forward"}


def test_a_buffer_that_is_only_read_is_not_updated() -> None:
    net = Net(lambda m, x: (x * m.scale * m.w).sum(), w=parameter(3))
    net.register_buffer("scale", torch.ones(3))
    (buffer,) = trace(net, (torch.randn(2, 3),), {}).buffers
    assert (buffer.names, buffer.updated) == (("scale",), None)


def test_batch_norm_in_evaluation_changes_nothing() -> None:
    net = Net(lambda m, x: (m.norm(x) * m.w).sum(), norm=nn.BatchNorm1d(3), w=parameter(3)).eval()
    assert all(b.updated is None for b in trace(net, (torch.randn(5, 3),), {}).buffers)


def test_the_model_is_left_as_it_was() -> None:
    net = Net(lambda m, x: m.norm(m.layer(x)).sum(), layer=nn.Linear(3, 3), norm=nn.BatchNorm1d(3))
    before = {k: v.clone() for k, v in net.state_dict().items()}
    objects = [id(p) for p in net.parameters()]
    net.norm.eval()
    trace(net, (torch.randn(5, 3),), {})
    assert [id(p) for p in net.parameters()] == objects
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert (net.training, net.norm.training) == (True, False)
    assert all(p.grad is None for p in net.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


# inputs and outputs -------------------------------------------------------------------------------------------


def test_inputs_are_named_by_their_paths_and_keep_their_dtypes() -> None:
    def forward(_: nn.Module, x: Any, pair: Any, *, labels: Any, options: Any) -> Any:
        return (x @ pair[0]).sum() + pair[1]["scale"].sum() + F.cross_entropy(x, labels) * options["weight"]

    net = Net(lambda m, *a, **k: forward(m, *a, **k) * m.w.sum(), w=parameter(2))
    args = (torch.randn(4, 3), (torch.randn(3, 2), {"scale": torch.randn(2)}))
    kwargs = {"labels": torch.randint(0, 3, (4,)), "options": {"weight": 0.5, "name": "x", "flag": None}}
    graph = trace(net, args, kwargs)
    paths = {i.path: graph.tensors[i.tensor].dtype for i in graph.inputs}
    assert paths == {
        "args[0]": "float32", "args[1][0]": "float32", "args[1][1]['scale']": "float32", "labels": "int64"
    }  # fmt: skip
    statics = {s.path: s.value for s in graph.statics}
    assert statics == {"options['weight']": 0.5, "options['name']": "x", "options['flag']": None}
    leaves = [leaf.leaf for leaf in (*graph.inputs, *graph.statics)]
    assert sorted(leaves) == list(range(len(leaves)))


def test_nested_outputs_keep_their_structure() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        y = x * m.w
        return {"loss": y.sum(), "hidden": (y, [x, 3]), "name": "net", "none": None}

    graph = traced(forward, torch.randn(4, 3), w=parameter(3))
    assert graph.loss is not None
    tensors = [o.tensor for o in graph.outputs]
    values = [o.value for o in graph.outputs if o.tensor is None]
    assert tensors.count(graph.loss) == 1
    assert values == [3, "net", None]
    spec = pytree.treespec_loads(graph.output_spec)
    rebuilt = pytree.tree_unflatten(list(range(len(tensors))), spec)
    assert list(rebuilt) == ["loss", "hidden", "name", "none"]
    hidden, passed = rebuilt["hidden"][0], rebuilt["hidden"][1][0]
    assert graph.producer(tensors[hidden]).op == "aten.mul.Tensor"
    assert graph.producer(tensors[passed]).op == INPUT


class Cache:
    """An opaque object in an output, as key-value caches are."""


def test_a_cache_becomes_none_and_other_opaque_outputs_are_refused() -> None:
    with pytest.warns(DroppedOutputWarning, match="Cache"):
        graph = traced(lambda m, x: ((x * m.w).sum(), Cache()), torch.randn(2), w=parameter(2))
    assert [(o.tensor is None, o.value) for o in graph.outputs] == [(False, None), (True, None)]
    with pytest.raises(TraceError, match=r"the model's output\[1\] is a builtins.set"):
        traced(lambda m, x: ((x * m.w).sum(), {1, 2}), torch.randn(2), w=parameter(2))


@pytest.mark.parametrize(
    "wrap",
    [lambda s: s, lambda s: (s, 1), lambda s: [s], lambda s: {"loss": s}, lambda s: {"other": 1, "loss": s}],
)
def test_the_loss_is_found(wrap: Callable[[torch.Tensor], Any]) -> None:
    graph = traced(lambda m, x: wrap((x * m.w).sum()), torch.randn(2), w=parameter(2))
    assert graph.loss is not None
    assert graph.tensors[graph.loss].shape == ()
    assert names(graph, TANGENT) == ["tangent"]


def test_a_loss_function_gets_the_model_and_the_batch() -> None:
    net = nn.Linear(3, 2)
    graph = trace(net, (torch.randn(4, 3), torch.randn(4, 2)), {}, loss=lambda m, x, y: F.mse_loss(m(x), y))
    assert [i.path for i in graph.inputs] == ["args[0]", "args[1]"]
    assert all(p.gradient is not None for p in graph.parameters)


def test_no_loss_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(
        TraceError,
        match=r"returns no scalar loss \(it returned a Tensor of float32.*\); pass labels.*loss=lambda",
    ):
        traced(lambda m, x: x * m.w, torch.randn(2), w=parameter(2))
    with pytest.raises(TraceError, match="it returned a dict of"):
        traced(lambda m, x: {"logits": x * m.w}, torch.randn(2), w=parameter(2))


def test_the_forward_alone_needs_no_loss() -> None:
    graph = traced(lambda m, x: x * m.w, torch.randn(2), w=parameter(2), training=False)
    assert (graph.loss, graph.tangent, graph.training) == (None, None, False)
    assert graph.parameters[0].gradient is None
    assert {i.phase for i in graph.instructions} == {"forward"}


def test_without_outputs_drops_what_only_they_needed() -> None:
    graph = traced(lambda m, x: ((x * m.w).sum(), (x * 2).exp()), torch.randn(3), w=parameter(3))
    smaller = graph.without_outputs()
    assert "exp" in ops(graph)
    assert "exp" not in ops(smaller)
    assert [o.tensor for o in smaller.outputs] == [graph.loss, None]
    assert [i.id for i in smaller.instructions] == list(range(len(smaller.instructions)))


@pytest.mark.parametrize(
    ("example", "wanted"),
    [
        ({"x": 1}, ((), {"x": 1})),
        ((1, 2), ((1, 2), {})),
        ([1, 2], ((1, 2), {})),
    ],
)
def test_examples(example: Any, wanted: Any) -> None:
    assert split_example(example) == wanted


def test_a_tensor_is_an_example_and_other_things_are_not() -> None:
    x = torch.zeros(1)
    assert split_example(x)[0][0] is x
    with pytest.raises(ExampleError, match="the example is a str; give a dict"):
        split_example("x")
    with pytest.raises(ExampleError, match=r"keys must be argument names, got \[1\]"):
        split_example({1: x})


# the graph itself -----------------------------------------------------------------------------------------------

SOURCES = """\
up.weight: float32[4, 3] = hetspmd.parameter()
up.bias: float32[4] = hetspmd.parameter()
down.weight: float32[1, 4] = hetspmd.parameter()
args[0]: float32[5, 3] = hetspmd.input()
tangent: float32[] = hetspmd.tangent()
"""


def small_mlp() -> Graph:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.down(torch.relu(m.up(x))).mean()

    return traced(forward, torch.randn(5, 3), up=nn.Linear(3, 4), down=nn.Linear(4, 1, bias=False))


def test_the_text_of_a_small_graph() -> None:
    assert str(small_mlp()) + "\n" == SOURCES + COMPUTED


COMPUTED = """\
t: float32[3, 4] = aten.t.default(up.weight)
addmm: float32[5, 4] = aten.addmm.default(up.bias, args[0], t)
relu: float32[5, 4] = aten.relu.default(addmm)
t_1: float32[4, 1] = aten.t.default(down.weight)
mm: float32[5, 1] = aten.mm.default(relu, t_1)
sum_1: float32[] = aten.sum.dim_IntList(mm, [0, 1])
div: float32[] = aten.div.Tensor(sum_1, 5)
expand: float32[5, 1] = aten.expand.default(tangent, [5, 1])
div_1: float32[5, 1] = aten.div.Scalar(expand, 5)
t_2: float32[1, 5] = aten.t.default(div_1)
mm_1: float32[1, 4] = aten.mm.default(t_2, relu)
down.weight again: float32[1, 4] = aten.alias.default(down.weight)
mm_2: float32[5, 4] = aten.mm.default(div_1, down.weight again)
threshold_backward: float32[5, 4] = aten.threshold_backward.default(mm_2, relu, 0)
t_6: float32[4, 5] = aten.t.default(threshold_backward)
mm_3: float32[4, 3] = aten.mm.default(t_6, args[0])
sum_2: float32[1, 4] = aten.sum.dim_IntList(threshold_backward, [0], True)
view: float32[4] = aten.view.default(sum_2, [4])
"""


def test_every_graph_is_in_execution_order_with_numbers_for_names() -> None:
    graph = small_mlp()
    assert [t.id for t in graph.tensors] == list(range(len(graph.tensors)))
    made: set[int] = set()
    for position, instruction in enumerate(graph.instructions):
        assert instruction.id == position
        assert set(instruction.inputs) <= made
        made.update(instruction.outputs)
    phases = [i.phase for i in graph.instructions if not i.is_source]
    assert phases == sorted(phases, reverse=True), "forward, then backward"
    modules = {i.name: i.source for i in graph.instructions}
    assert modules["addmm"] == "up"
    kinds = {i.op for i in graph.instructions if i.is_source}
    assert kinds == {PARAMETER, INPUT, TANGENT}
    assert BUFFER not in kinds


def test_gradients_know_the_module_that_their_forward_came_from() -> None:
    graph = small_mlp()
    backward = {i.source for i in graph.instructions if i.phase == "backward" and not i.is_source}
    assert {"up", "down"} <= backward
