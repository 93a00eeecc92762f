"""What forward writes to slots and data: updates of the graph, or refused by name; the model stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hetspmd.errors import TraceError
from hetspmd.trace.trace import trace
from nets import Net, parameter, traced


def buffered(forward: Callable[..., Any], **buffers: torch.Tensor | None) -> Net:
    net = Net(forward, w=parameter(3))
    for name, value in buffers.items():
        net.register_buffer(name, value)
    return net


def replacing(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.n = m.n + 1
    return (x * m.w).sum() * m.n


def test_a_replaced_buffer_is_an_update_and_the_model_stays_as_it_was() -> None:
    net = buffered(replacing, n=torch.zeros(()))
    before = net.n
    graph = trace(net, (torch.randn(3),), {})
    assert net.n is before
    (buffer,) = graph.buffers
    assert buffer.updated is not None
    assert graph.producer(buffer.updated).op == "aten.add.Tensor"
    assert graph.updates == (buffer.updated,)
    assert [o.tensor for o in graph.outputs] == [graph.loss]


def test_data_of_a_parameter_is_an_update_and_its_gradient_is_there() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.w.data = m.w.data * 0.5
        return (x * m.w).sum()

    net = Net(forward, w=parameter(3))
    before, values = net.w, net.w.detach().clone()
    graph = trace(net, (torch.randn(3),), {})
    assert net.w is before
    assert torch.equal(net.w, values)
    (found,) = graph.parameters
    assert found.updated is not None
    assert found.gradient is not None
    assert graph.tangent is not None


def test_the_incoming_gradient_of_an_updated_parameter_is_no_input() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.w.data.mul_(0.5)
        m.v.data.mul_(0.5)
        return (x * m.w).sum()

    graph = trace(Net(forward, w=parameter(3), v=parameter(3)), (torch.randn(3),), {})
    gradients = {p.name: p.gradient for p in graph.parameters}
    assert gradients["v"] is None  # nothing reads it
    assert gradients["w"] is not None
    assert sum(i.op == "hetspmd.tangent" for i in graph.instructions) == 1


def reshaped(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.n = torch.cat([m.n, x])
    return (x * m.w).sum()


def retyped(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.n = m.n.double()
    return (x * m.w).sum()


def made(m: Any, x: torch.Tensor) -> torch.Tensor:
    if m.n is None:
        m.n = x.mean(0)
    return (x * m.w).sum()


def taken_away(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.n = None
    return (x * m.w).sum()


def deleted(m: Any, x: torch.Tensor) -> torch.Tensor:
    del m.n
    return (x * m.w).sum()


def registered(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.register_buffer("late", x.detach())
    return (x * m.w).sum()


def shares_a_parameter(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.n = m.w.detach()
    return (x * m.w).sum()


def shares_a_buffer(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.n = m.k
    return (x * m.w).sum()


def replaces_a_parameter(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.w = nn.Parameter(m.w.detach() * 2)
    return (x * m.w).sum()


def reshapes_a_parameter(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.w.data = x[:2]
    return (x[:2] * m.w).sum()


def adds_to_a_parameter(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        m.w += 1
    return (x * m.w).sum()


def sets(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        m.w.set_(m.w * 2)
    return (x * m.w).sum()


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (reshaped, r"puts float32\[6\] into buffer n, which is float32\[3\]; give it its final shape"),
        (retyped, r"puts float64\[3\] into buffer n, which is float32\[3\]"),
        (taken_away, "takes away buffer n"),
        (deleted, "takes away buffer n"),
        (registered, "registers buffer late; register it in __init__"),
        (shares_a_parameter, r"after forward n and w share memory.*value.clone\(\)"),
        (shares_a_buffer, "after forward .* share memory"),
        (replaces_a_parameter, "replaces parameter w.*copy_"),
        (
            reshapes_a_parameter,
            r"gives w, which is float32\[3\], the data of .* float32\[2\] at .*test_slots.py:\d+",
        ),
        (
            adds_to_a_parameter,
            r"assigns a changed parameter to its own name at .*test_slots.py:\d+: m.w \+= 1",
        ),
        (sets, r"calls set_ .*tensor.data = value"),
    ],
)
def test_what_is_no_update_is_refused_by_name(forward: Callable[..., Any], message: str) -> None:
    net = buffered(forward, n=torch.zeros(3), k=torch.zeros(3))
    before = dict(net._buffers), dict(net._parameters)
    with pytest.raises(TraceError, match=message):
        trace(net, (torch.randn(3),), {})
    assert before == (dict(net._buffers), dict(net._parameters))


def test_a_buffer_that_forward_makes_is_refused() -> None:
    with pytest.raises(TraceError, match="makes buffer n, which is None before; give it its final shape"):
        trace(buffered(made, n=None), (torch.randn(3),), {})


def doubled(m: Any, x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return (x * m.w).sum()


def row_set(m: Any, x: torch.Tensor) -> torch.Tensor:
    x.view(-1)[0] = 1.0
    return (x * m.w).sum()


def rectified(m: Any, x: torch.Tensor) -> torch.Tensor:
    return (nn.functional.relu(x, inplace=True) * m.w).sum()


def added(m: Any, x: torch.Tensor) -> torch.Tensor:
    x += m.w.detach()
    return (x * m.w).sum()


@pytest.mark.parametrize("forward", [doubled, row_set, rectified, added])
def test_an_input_that_is_written_to_is_refused_with_the_line(forward: Callable[..., Any]) -> None:
    with pytest.raises(
        TraceError, match=r"changes input args\[0\] in place at .*test_slots.py:\d+: .*x.clone\(\)"
    ):
        traced(forward, torch.randn(3), w=parameter(3))


def counts(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.t.add_(1)
    return (x * m.w).sum() * m.t.sum()


def accumulates(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.t += x.detach()
    return (x * m.w).sum()


def stores(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.t[0] = 1.0
    return (x * m.w).sum()


def replaces_data(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.t.data = x.detach() + 1
    return (x * m.w).sum()


@pytest.mark.parametrize("forward", [counts, accumulates, stores, replaces_data])
def test_a_write_to_a_plain_tensor_is_refused(forward: Callable[..., Any]) -> None:
    message = r"changes t \(.*\) at .*test_slots.py:\d+: m.t.*self.register_buffer\('t', tensor\)"
    with pytest.raises(TraceError, match=message):
        traced(forward, torch.randn(3), w=parameter(3), t=torch.zeros(3))
