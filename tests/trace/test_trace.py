"""Tracing: what becomes of parameters, buffers, inputs, outputs and constants; and what cannot be traced."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import hetspmd.rules.ops  # noqa: F401  # registers the rules
from hetspmd.errors import DeviceError, ExampleError, HetspmdError, TraceError
from hetspmd.trace.graph import BUFFER, CONSTANT, INPUT, PARAMETER, TANGENT, Graph
from hetspmd.trace.trace import split_example, trace


class Net(nn.Module):
    """A module whose forward is a function of the module and its inputs."""

    def __init__(self, forward: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        self.function = forward
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def traced(forward: Callable[..., Any], *args: Any, training: bool = True, **members: Any) -> Graph:
    return trace(Net(forward, **members), args, {}, training=training)


def ops(graph: Graph, phase: str | None = None) -> list[str]:
    """Names of the ops that compute, without namespace and overload."""
    return [i.op.split(".")[1] for i in graph.instructions if not i.is_source and phase in (None, i.phase)]


def names(graph: Graph, op: str) -> list[str]:
    return [i.name for i in graph.instructions if i.op == op]


def by_name(graph: Graph) -> dict[str, Any]:
    return {p.name: p for p in graph.parameters}


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
    assert graph.tensors[updated["norm.num_batches_tracked"]].dtype == "int64"  # type: ignore[index]
    assert {i.phase for t in updated.values() for i in [graph.producer(t)]} == {"forward"}  # type: ignore[arg-type]


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
    assert graph.producer(tensors[hidden]).op == "aten.mul.Tensor"  # type: ignore[arg-type]
    assert graph.producer(tensors[passed]).op == INPUT  # type: ignore[arg-type]


class Cache:
    """An opaque object in an output, as key-value caches are."""


def test_opaque_outputs_become_none() -> None:
    graph = traced(lambda m, x: ((x * m.w).sum(), Cache(), {1, 2}), torch.randn(2), w=parameter(2))
    assert [(o.tensor is None, o.value) for o in graph.outputs] == [(False, None), (True, None), (True, None)]


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
        TraceError, match=r"returns no scalar loss \(it returned a Tensor\); pass labels.*or loss=lambda"
    ):
        traced(lambda m, x: x * m.w, torch.randn(2), w=parameter(2))
    with pytest.raises(TraceError, match="it returned a dict"):
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


# constants and randomness --------------------------------------------------------------------------------------


def test_what_depends_on_nothing_is_folded() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        positions = (torch.arange(3) * 2 + 1).float().exp()
        mask = torch.ones(3, 3).tril().bool()
        return ((x * positions) @ m.w).masked_fill(~mask, 0.0).sum()

    graph = traced(forward, torch.randn(3, 3), w=parameter(3, 3))
    constants = [graph.tensors[c.tensor] for c in graph.constants]
    assert sorted((t.shape, t.dtype) for t in constants) == [((3,), "float32"), ((3, 3), "bool")]
    assert len(names(graph, CONSTANT)) == 2
    assert not {"tril", "exp", "bitwise_not"} & set(ops(graph))
    assert all(c.program and c.data is None for c in graph.constants)


def test_plain_tensors_are_constants_with_their_data() -> None:
    table = torch.tensor([1.0, 2.5, -3.0])
    graph = traced(lambda m, x: (x * table * m.w).sum(), torch.randn(3), w=parameter(3))
    (constant,) = graph.constants
    assert constant.data is not None
    from hetspmd.trace.assemble import constant_data

    assert torch.equal(constant_data(constant.data, (3,), torch.float32), table)


def test_a_created_tensor_stays_an_instruction() -> None:
    graph = traced(
        lambda m, x: (torch.cat([x, torch.zeros(4, 2)], 1) @ m.w).sum(), torch.randn(4, 1), w=parameter(3, 2)
    )
    assert not graph.constants
    assert {"zeros", "full"} & set(ops(graph))


def test_random_bits_are_never_folded() -> None:
    graph = traced(
        lambda m, x: (x * torch.rand(3) * (torch.randn(3) > 0) * m.w).sum(), torch.randn(3), w=parameter(3)
    )
    assert not graph.constants
    assert {"rand", "randn"} <= set(ops(graph))


def test_dropout_that_drops_nothing_disappears() -> None:
    def found(p: float, train: bool = True) -> list[str]:
        net = Net(lambda m, x: m.drop(x * m.w).sum(), drop=nn.Dropout(p), w=parameter(3)).train(train)
        return ops(trace(net, (torch.randn(4, 3),), {}))

    assert "native_dropout" in found(0.3)
    assert "native_dropout_backward" in found(0.3)
    assert not any("dropout" in op for op in found(0.0))
    assert not any("dropout" in op for op in found(0.3, train=False))


def test_copies_views_of_views_and_double_transposes_disappear() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.clone().contiguous().view(6, 2).view(3, 4).detach().t().t()
        return (y.expand(3, 4) * m.w).sum()

    graph = traced(forward, torch.randn(3, 4), w=parameter(4))
    assert ops(graph, "forward") == ["mul", "sum"]


# decompositions ---------------------------------------------------------------------------------------------


def test_a_mean_is_a_sum_over_a_global_count() -> None:
    graph = traced(lambda m, x: (x * m.w).mean(), torch.randn(4, 6), w=parameter(6))
    assert "mean" not in ops(graph)
    (division,) = (i for i in graph.instructions if i.op == "aten.div.Tensor" and i.phase == "forward")
    assert division.args[1] == 24
    assert ops(graph, "forward") == ["mul", "sum", "div"]


def test_a_mean_loss_with_ignored_labels_counts_over_the_whole_batch() -> None:
    graph = traced(lambda m, x, y: F.cross_entropy(x * m.w, y), torch.randn(4, 6), torch.randint(0, 6, (4,)),
                   w=parameter(6))  # fmt: skip
    found = ops(graph, "forward")
    assert not any("nll_loss" in op for op in ops(graph))
    assert found.count("sum") == 2, "the sum of the losses and the number of labels that count"
    assert found[-1] == "div"
    assert {"_log_softmax", "gather"} <= set(found)


@pytest.mark.parametrize(
    "loss",
    [
        F.mse_loss,
        F.l1_loss,
        F.smooth_l1_loss,
        F.huber_loss,
        F.binary_cross_entropy_with_logits,
        F.soft_margin_loss,
    ],
)
def test_elementwise_losses_end_in_a_sum_and_a_division(loss: Callable[..., torch.Tensor]) -> None:
    graph = traced(lambda m, x, y: loss(x * m.w, y), torch.randn(4, 6), torch.rand(4, 6), w=parameter(6))
    assert not any("loss" in op for op in ops(graph)), ops(graph)
    forward = ops(graph, "forward")
    assert "mean" not in forward
    assert forward[-2:] == ["sum", "div"]


@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 4), (2, 3, 4, 4), (2, 3, 2, 2, 2)])
def test_batch_norm_is_sums_over_the_global_batch(shape: tuple[int, ...]) -> None:
    norm = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)](3)
    graph = traced(lambda m, x: (m.norm(x) ** 2).sum(), torch.randn(shape), norm=norm)
    assert not any("batch_norm" in op or op in ("var_mean", "mean") for op in ops(graph)), ops(graph)
    sums = [i for i in graph.instructions if i.op == "aten.sum.dim_IntList" and i.phase == "forward"]
    assert len(sums) >= 2
    assert all(
        1 not in i.args[1] for i in sums if i.args[0].id != graph.loss and len(i.args[1]) == len(shape) - 1
    )


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(4, 6, 3),
        nn.Conv2d(4, 6, 3, groups=2),
        nn.ConvTranspose2d(4, 6, 2),
        nn.Conv3d(4, 6, 2, bias=False),
    ],
)
def test_convolution_backward_is_one_instruction_per_gradient(layer: nn.Module) -> None:
    dims = layer.weight.ndim - 2  # type: ignore[union-attr, operator]
    graph = traced(lambda m, x: m.layer(x * m.w).square().sum(), torch.randn(2, 4, *[5] * dims), layer=layer,
                   w=parameter(1))  # fmt: skip
    found = [i for i in graph.instructions if i.op == "aten.convolution_backward.default"]
    assert sorted(i.args[10] for i in found) == [(False, True, False), (True, False, False)]
    bias = by_name(graph).get("layer.bias")
    if bias is not None:
        assert graph.producer(bias.gradient).op == "aten.sum.dim_IntList"


def test_recurrent_layers_are_products_and_pointwise_ops() -> None:
    graph = traced(lambda m, x: m.rnn(x)[0].sum(), torch.randn(2, 3, 4), rnn=nn.LSTM(4, 5, batch_first=True))
    assert not any("rnn" in op or "lstm" in op for op in ops(graph))
    assert {"sigmoid", "tanh"} <= set(ops(graph))
    assert {"mm", "addmm"} & set(ops(graph))


# devices --------------------------------------------------------------------------------------------------------


def test_a_model_on_the_meta_device_gives_the_same_graph() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    real = trace(build(), (torch.randn(3, 4),), {}, loss=loss)
    with torch.device("meta"):
        model, x = build(), torch.empty(3, 4)
    assert trace(model, (x,), {}, loss=loss) == real
    assert trace(model, (torch.randn(3, 4),), {}, loss=loss) == real


def test_a_model_on_two_devices_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(
        DeviceError, match=r"several devices \(0.weight on cpu, 1.weight on meta\); move it to one"
    ):
        trace(model, (torch.randn(2, 2),), {}, loss=lambda m, x: m(x).sum())


# what cannot be traced ----------------------------------------------------------------------------------------


def branching(m: Any, x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:  # this line is named in the error
        return (x * m.w).sum()
    return (x - m.w).sum()


def picking(m: Any, x: torch.Tensor) -> torch.Tensor:
    return (x[x > 0] * m.w).sum()  # so is this one


def converting(m: Any, x: torch.Tensor) -> torch.Tensor:
    return (x * m.w).sum() * float(x.max())  # and this one


@pytest.mark.parametrize("forward", [branching, picking, converting])
def test_what_depends_on_data_is_named_with_the_models_own_line(forward: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(TraceError) as caught:
        traced(forward, torch.randn(3), w=parameter(1))
    text = str(caught.value)
    code = forward.__code__
    lines = "|".join(str(n) for n in range(code.co_firstlineno, code.co_firstlineno + 5))
    assert re.search(rf"cannot be traced to one static graph at {re.escape(__file__)}:({lines}): ", text)
    assert re.search("named in the error|so is this one|and this one", text)
    assert "torch.where" in text


def test_an_input_changed_in_place_is_refused() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        x.add_(1.0)
        return (x * m.w).sum()

    with pytest.raises(
        TraceError, match="changes input 0 in place during forward; write to a buffer or a copy"
    ):
        traced(forward, torch.randn(3), w=parameter(3))


def test_a_parameter_changed_in_place_is_refused() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            m.w.mul_(0.5)
        return (x * m.w).sum()

    with pytest.raises(HetspmdError, match=r"in place|in-place"):
        traced(forward, torch.randn(3), w=parameter(3))


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (
            (),
            {"y": torch.randn(2, 3)},
            r"the example does not fit Linear.forward: missing a required argument: 'input'",
        ),
        ((torch.randn(2, 3), 1), {}, "too many positional arguments"),
        (({1, 2},), {}, r"args\[0\] is a set; a batch holds tensors and plain values"),
    ],
)
def test_an_example_of_another_signature_is_refused(args: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(ExampleError, match=message):
        trace(nn.Linear(3, 2), args, kwargs)


def test_an_example_of_another_shape_is_named_with_the_failing_line() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return (x @ m.w).sum()

    with pytest.raises(
        ExampleError, match=r"Net fails on the example at .*test_trace.py:\d+: .*try model\(batch\)"
    ):
        traced(forward, torch.randn(2, 4), w=parameter(3, 2))


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
