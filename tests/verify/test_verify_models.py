"""Verification of models that hold more than parameters, and in every mode."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_plans import cluster
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from hetspmd.errors import ExampleError
from hetspmd.verify import comparison
from hetspmd.verify.comparison import VerifyReport, verify
from hetspmd.verify.copies import model_in
from hetspmd.verify.training_steps import TrainedRun
from nets import Net

X = torch.randn(16, 12, generator=torch.Generator().manual_seed(3))
DEVICES = cluster(4, 2, 1, 1)


def forward(s: Any, x: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(s.b(torch.tanh(s.a(x))), x)


def net(body: Callable[..., Any] = forward, **parts: Any) -> Net:
    torch.manual_seed(1)
    return Net(body, **{"a": nn.Linear(12, 24), "b": nn.Linear(24, 12), **parts})


def check(model: nn.Module, *batch: torch.Tensor, **options: Any) -> VerifyReport:
    report = verify(model, batch or (X,), options.pop("devices", DEVICES), **options)
    assert report.ok, report.text
    assert report.text.startswith("equal to "), report.text
    return report


def kept(s: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = s.a(x)
    s.last, s.seen = hidden, [hidden.mean()]
    return F.mse_loss(s.b(torch.tanh(hidden)), x)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize("run_before", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda linear: weight_norm(linear),
        lambda linear: spectral_norm(linear).eval(),
        lambda linear: prune.l1_unstructured(linear, "weight", amount=0.3),
        lambda linear: parametrizations.weight_norm(linear),
    ],
    ids=["weight_norm", "spectral_norm", "prune", "parametrized"],
)
def test_hooks_that_leave_tensors_on_modules(
    change: Callable[[nn.Linear], nn.Module], run_before: bool
) -> None:
    model = net(a=change(nn.Linear(12, 12)), b=nn.Linear(12, 12))
    if run_before:
        model(X).backward()
    check(model)


def test_cached_activations() -> None:
    model = net(kept)
    model(X)
    last = model.last
    copied = model_in(model, torch.float64)
    assert copied.last.dtype == torch.float64
    assert copied.last.grad_fn is None
    assert copied.seen[0].dtype == torch.float64
    assert torch.equal(copied.last, last.detach().double())
    assert model.last is last


def test_a_model_that_has_been_trained_before() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(X).backward()
        optimizer.step()
    before = {n: (p.detach().clone(), p.grad.clone()) for n, p in model.named_parameters()}
    check(model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name][0])
        assert torch.equal(parameter.grad, before[name][1])


def test_copies_keep_what_is_shared() -> None:
    model = net(c=nn.Linear(12, 24))
    model.c.weight = model.a.weight
    model.register_buffer("one", torch.ones(3))
    model.a.register_buffer("two", model.one)
    model.plain = {"k": [model.one.clone(), 3]}
    made = model_in(model, torch.float64)
    assert made.c.weight is made.a.weight
    assert made.one is made.a.two
    assert made.plain["k"][0].dtype == made.one.dtype == made.a.weight.dtype == torch.float64
    assert model.plain["k"][0].dtype == model.a.weight.dtype == torch.float32
    assert made.plain["k"][1] == 3
    again = model_in(made, torch.float64)
    assert again.a.weight is not made.a.weight


def test_a_leaf_buffer_that_became_part_of_a_graph() -> None:
    model = net()
    model.register_buffer("average", torch.zeros(24))
    model.average = model.average * 0.9 + model.a(X).mean(0)
    assert not model.average.is_leaf
    copied = model_in(model, torch.float64)
    assert copied.average.is_leaf
    assert torch.equal(copied.average, model.average.detach().double())


def test_what_cannot_be_copied_is_named() -> None:
    model = net()
    model.a.lock = threading.Lock()
    with pytest.raises(ExampleError, match=r"cannot be copied to be verified \(a\.lock is a lock\)"):
        verify(model, (X,), DEVICES)


def _averages(m: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = m.a(x)
    m.kept = 0.9 * m.kept + 0.1 * hidden.detach().mean(0)
    return F.mse_loss(m.b(torch.tanh(hidden - m.kept)), x)


def _queues(m: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = m.a(x)
    m.kept = torch.cat((m.kept[12:], hidden.detach().sum(0)[:12]))
    return F.mse_loss(m.b(torch.tanh(hidden + m.kept)), x)


def _by_dict(m: Any, x: torch.Tensor) -> torch.Tensor:
    m._buffers["kept"] = m.kept + x.sum()
    return F.mse_loss(m.b(torch.tanh(m.a(x))), x) * (1 + m.kept.sin().mean())


def _twice(m: Any, x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        m.kept = 2 * m.kept + 1
        m.kept.add_(1)
    return F.mse_loss(m.b(torch.tanh(m.a(x))), x) * m.kept.log1p().mean()


def _swaps(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.kept, m.other = m.other, m.kept
    return F.mse_loss(m.b(torch.tanh(m.a(x))) * m.kept[:12], x)


REASSIGNED = {"averages": _averages, "queues": _queues, "by dict": _by_dict, "twice": _twice, "swaps": _swaps}


def reassigning(name: str) -> Net:
    """Puts another tensor into the slot of a buffer in each forward."""
    model = net(REASSIGNED[name])
    model.register_buffer("kept", torch.zeros(24))
    model.register_buffer("other", torch.linspace(0, 1, 24))
    return model


@pytest.mark.parametrize("name", REASSIGNED)
def test_buffers_that_are_reassigned_are_compared_by_name(name: str) -> None:
    """On one device and on ranks alike; the model that is given stays as it was."""
    model = reassigning(name)
    before = {key: (buffer, buffer.clone()) for key, buffer in model.named_buffers()}
    report = check(model)
    assert report.parameter_error < 1e-12
    for key, buffer in model.named_buffers():
        assert buffer is before[key][0]
        assert torch.equal(buffer, before[key][1])


@pytest.mark.parametrize("name", ["averages", "swaps"])
def test_a_reassigned_buffer_that_parts_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ranks that leave in it what was there before."""
    right = comparison.on_ranks

    def wrong(*given: Any) -> list[TrainedRun]:
        kept = (
            torch.zeros(24, dtype=torch.float64) if name == "averages" else torch.linspace(0, 2, 24).double()
        )
        return [replace(run, final={**run.final, "kept": kept}) for run in right(*given)]

    monkeypatch.setattr(comparison, "on_ranks", wrong)
    report = verify(reassigning(name), (X,), DEVICES)
    assert not report.ok
    assert report.worst["parameters"].startswith("kept ("), report.text


@pytest.mark.parametrize(
    "devices", [cluster(1), cluster(4, 2, 1, 1), cluster(1e9, 1, 1)], ids=["one", "all", "idle"]
)
def test_worlds_and_active_devices(devices: Any) -> None:
    check(net(), devices=devices)


def test_evaluation_mode_and_frozen_parameters() -> None:
    model = net(c=nn.BatchNorm1d(24), d=nn.Dropout(0.5))
    model.function = lambda s, x: F.mse_loss(s.b(s.d(torch.tanh(s.c(s.a(x))))), x)
    model.c.running_mean += 0.1
    model.eval()
    report = check(model)
    assert not report.random
    frozen = net()
    frozen.a.requires_grad_(False)
    assert not check(frozen).notes


def test_no_parameter_requires_a_gradient() -> None:
    report = check(net().requires_grad_(False))
    assert report.notes == ("no parameter requires a gradient: the loss and the buffers alone were compared",)
    assert "no parameter requires a gradient" in report.text


def test_a_loss_function_is_applied_once() -> None:
    model = net(lambda s, x: s.b(torch.tanh(s.a(x))))
    seen: list[torch.Size] = []

    def loss(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        output = module(x)
        seen.append(output.shape)
        return F.mse_loss(output, x)

    check(model, loss=loss)
    assert set(seen) == {torch.Size((16, 12))}


def test_no_loss() -> None:
    c = net()
    from hetspmd.optimize.compiler import compile as compile_plan

    plan = compile_plan(c, (X,), DEVICES)
    other = copy.deepcopy(c)
    other.function = lambda s, x: s.b(torch.tanh(s.a(x)))
    with pytest.raises(ExampleError, match="returns no scalar loss for the example; pass loss="):
        verify(other, (X,), DEVICES, plan=plan)
