"""Tracing: what cannot be traced is refused with the reason and the line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hetspmd.rules.ops  # noqa: F401  # registers the rules
from hetspmd.errors import ExampleError, HetspmdError, TraceError
from hetspmd.trace.trace import trace
from nets import Net, parameter, traced

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

    with pytest.raises(TraceError, match=r"changes input args\[0\] in place at .*write to a copy"):
        traced(forward, torch.randn(3), w=parameter(3))


def test_a_parameter_changed_in_place_after_its_use_is_refused_as_by_torch() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        found = (x * m.w * m.w).sum()
        with torch.no_grad():
            m.w.mul_(0.5)
        return found

    with pytest.raises(HetspmdError, match=r"in place|inplace"):
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
        (({1, 2},), {}, r"input \(args\[0\]\) is a set; a batch holds tensors and plain values"),
    ],
)
def test_an_example_of_another_signature_is_refused(args: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(ExampleError, match=message):
        trace(nn.Linear(3, 2), args, kwargs)


def test_an_example_of_another_shape_is_named_with_the_failing_line() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return (x @ m.w).sum()

    with pytest.raises(
        ExampleError, match=r"Net fails on the example at .*test_refusals.py:\d+: .*try model\(batch\)"
    ):
        traced(forward, torch.randn(2, 4), w=parameter(3, 2))


def by_class(m: Any, x: torch.Tensor) -> torch.Tensor:
    if type(x) is not torch.Tensor:
        raise TypeError("x must be a plain tensor")
    return (x * m.w).sum()


def by_name(m: Any, x: torch.Tensor) -> torch.Tensor:
    return {"Tensor": (x * m.w).sum()}[type(x * m.w).__name__]


@pytest.mark.parametrize("body", [by_class, by_name])
def test_a_model_that_fails_only_while_it_is_traced_is_told_where_to_look(body: Any) -> None:
    """One device runs it: the advice is not to try the batch there alone."""
    x = torch.randn(4, 3)
    assert Net(body, w=parameter(4, 3))(x).isfinite()
    with pytest.raises(
        ExampleError,
        match=r"If it works there, .* while it is traced.* checks of a tensor's class",
    ):
        traced(body, x, w=parameter(4, 3))


def asserting(m: Any, x: torch.Tensor) -> torch.Tensor:
    assert (x < 100).all()
    return (x * m.w).sum()


def choosing(m: Any, x: torch.Tensor) -> torch.Tensor:
    if x.mean() > 0:
        return (x * m.w).sum()
    return m.w.sum()


def counting(m: Any, x: torch.Tensor) -> torch.Tensor:
    return sum(((x * m.w).sum() for _ in range(int(x.sum()))), m.w.sum())


def listing(m: Any, x: torch.Tensor) -> torch.Tensor:
    return (x * m.w).sum() * x.tolist()[0]


def to_numpy(m: Any, x: torch.Tensor) -> torch.Tensor:
    return (x * m.w).sum() * float(x.numpy().mean())


def an_item(m: Any, x: torch.Tensor) -> torch.Tensor:
    return (x * m.w).sum() * x.max().item()


def masking(m: Any, x: torch.Tensor) -> torch.Tensor:
    return (x * m.w)[x > 0].sum()


def distinct(m: Any, x: torch.Tensor) -> torch.Tensor:
    return (x * m.w).sum() * len(torch.unique(x))


def checked_normal(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.distributions.Normal(x * m.w, 1.0 + m.w.exp(), validate_args=True).log_prob(x).mean()


def checked_categorical(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.distributions.Categorical(logits=x * m.w, validate_args=True).entropy().mean()


@pytest.mark.parametrize(
    ("forward", "advice"),
    [
        (asserting, "remove the assertion from forward"),
        (choosing, r"torch\.where\(condition, a, b\)"),
        (counting, "loop a fixed number of times"),
        (listing, "keep to torch's functions of tensors"),
        (to_numpy, "keep to torch's functions of tensors"),
        (an_item, r"leave out \.item\(\)"),
        (masking, "multiply by the mask"),
        (distinct, "use a mask or fixed sizes"),
        (checked_normal, "validate_args=False"),
        (checked_categorical, "validate_args=False"),
    ],
)
def test_the_usual_rewrite_is_named(forward: Callable[..., torch.Tensor], advice: str) -> None:
    with pytest.raises(TraceError, match=rf"cannot be traced .*{re.escape(__file__)}:\d+: .* Here.*{advice}"):
        traced(forward, torch.randn(3), w=parameter(3))


def freezes(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.w.requires_grad_(False)
    return (x * m.w * m.v).sum()


def thaws_by_turns(m: Any, x: torch.Tensor) -> torch.Tensor:
    for p in m.parameters():
        p.requires_grad = m.training
    return (x * m.w * m.v).sum()


def freezes_a_part(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.part.requires_grad_(False)(x).sum() + m.w.sum()


@pytest.mark.parametrize("forward", [freezes, thaws_by_turns, freezes_a_part])
def test_requires_grad_that_forward_changes_is_refused(forward: Callable[..., torch.Tensor]) -> None:
    message = rf"forward changes requires_grad of a parameter at {re.escape(__file__)}:\d+: .*before the call"
    with pytest.raises(TraceError, match=message):
        traced(forward, torch.randn(3), w=parameter(3), v=parameter(3), part=nn.Linear(3, 3))


def test_a_mask_that_nn_transformer_looks_into() -> None:
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1, enable_nested_tensor=False
    )
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    with pytest.raises(TraceError, match="say is_causal=True or is_causal=False"):
        trace(model, (torch.randn(2, 4, 8), mask), {}, loss=lambda m, *a: m(*a).sum())


def test_a_package_whose_name_begins_with_torch_is_not_torch() -> None:
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.resnet18(num_classes=3)
    with pytest.raises(ExampleError, match=r"torchvision/models/resnet\.py:\d+: x = self\.conv1\(x\)"):
        trace(model, (torch.randn(2, 2, 32, 32),), {}, loss=lambda m, x: m(x).sum())


def test_torch_prints_no_traceback_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ExampleError, match="reduction dim"):
        trace(nn.Linear(3, 2), (torch.randn(2, 4),), {}, loss=lambda m, x: m(x).sum())
    assert not [r for r in caplog.records if "failed while attempting" in r.getMessage()]


@pytest.mark.parametrize(
    ("ask", "named"),
    [
        (lambda: torch.is_autocast_cache_enabled(), "torch.is_autocast_cache_enabled()"),
        (lambda: torch.backends.mkldnn.enabled, "torch.backends.mkldnn.enabled"),
    ],
)
def test_what_is_off_in_a_trace_is_not_asked_for(ask: Callable[[], bool], named: str) -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(x).sum() * (2.0 if ask() else 1.0)

    with pytest.raises(TraceError, match=re.escape(f"asks for {named}, which is off while a step is traced")):
        trace(Asking(), (torch.randn(3, 4),), {})
