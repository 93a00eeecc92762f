"""Tracing: constants, decompositions, devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hetspmd.rules.ops  # noqa: F401  # registers the rules
from hetspmd.errors import DeviceError
from hetspmd.trace.graph import CONSTANT
from hetspmd.trace.trace import trace
from nets import Net, by_name, names, ops, parameter, traced

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
    dims = layer.weight.ndim - 2
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
