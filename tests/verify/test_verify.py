"""Verification: equal programs pass at 1e-9, wrong ones do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from small_models import case
from small_plans import cluster, random_plan
from torch import nn

from hetspmd.dist import collectives
from hetspmd.dist.pending import Pending
from hetspmd.dist.runtime import Runtime
from hetspmd.errors import CheckError, OptionError
from hetspmd.program.program import Communicate
from hetspmd.run.module import HAP
from hetspmd.verify.comparison import VerifyReport, largest_error, verify
from hetspmd.verify.precision import all_in, retyped_graph


@pytest.mark.parametrize("name", ["mlp", "conv", "attention"])
@pytest.mark.parametrize("world", [1, 2, 5])
def test_random_plans_verify(name: str, world: int) -> None:
    c = case(name, torch.float32)
    for seed in range(2):
        plan = random_plan(c, world, seed)
        report = verify(c.model, c.batch, plan.cluster, plan=plan)
        assert report.ok, report.text
        assert max(report.loss_error, report.gradient_error, report.parameter_error) <= 1e-9
        assert report.random is (name == "attention")


def test_compiled_plans_verify() -> None:
    c = case("attention", torch.float32)
    report = verify(c.model, c.batch, cluster(4, 2, 1, 1))
    assert report.ok, report.text
    assert "equal to its reference graph" in report.text
    report.require()


def test_a_model_without_randomness_is_compared_with_eager_pytorch() -> None:
    c = case("attention", torch.float32, dropout=0.0)
    report = verify(c.model, c.batch, cluster(3, 1), constraints={"qkv.weight": "shard(0)"})
    assert report.ok, report.text
    assert not report.random


def test_the_model_is_left_as_it_was() -> None:
    c = case("conv", torch.float32)
    before = {k: v.clone() for k, v in c.model.state_dict().items()}
    plan = random_plan(c, 2, 1)
    verify(c.model, c.batch, plan.cluster, plan=plan)
    after = c.model.state_dict()
    assert all(torch.equal(before[k], after[k]) and before[k].dtype == after[k].dtype for k in before)
    assert all(p.grad is None for p in c.model.parameters())


@pytest.mark.parametrize("broken", ["start_all_reduce", "start_reduce_scatter", "start_all_gather"])
def test_a_wrong_program_does_not_pass(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """A collective whose results are off by a thousandth."""
    right = getattr(collectives, broken)

    def wrong(runtime: Runtime, tensor: torch.Tensor, *where: Any, **how: Any) -> Pending:
        result = right(runtime, tensor, *where, **how).wait()
        return Pending((), lambda: result * 1.001 if result.is_floating_point() else result)

    c = case("mlp", torch.float32)
    plans = [random_plan(c, 3, seed) for seed in range(12)]
    kind = broken.removeprefix("start_")
    monkeypatch.setattr(collectives, broken, wrong)
    monkeypatch.setitem(collectives.STARTS, kind, replace(collectives.STARTS[kind], one=wrong))
    # Of those that have such a collective, not all read what it gives, or give it anything but zeros.
    used = [p for p in plans if any(isinstance(s, Communicate) and s.kind == kind for s in p.program.steps)]
    reports = (verify(c.model, c.batch, p.cluster, plan=p) for p in used)
    report = next(r for r in reports if not r.ok)
    assert max(report.loss_error, report.gradient_error, report.parameter_error) > 1e-5
    with pytest.raises(CheckError, match="NOT EQUAL"):
        report.require()


class Chaotic(nn.Module):
    """SGD with momentum moves each weight as the standard map does, where errors grow with every step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.w = nn.Parameter(torch.rand(64) * 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * torch.cos(self.w)).sum() / x.sum() * 500 * len(self.w)


def test_a_model_that_amplifies_rounding() -> None:
    """Its parameters may be as far from one device's as those of one device a rounding away; no further."""
    torch.manual_seed(4)
    model, batch, devices = Chaotic(), (torch.rand(96, 64) + 1,), cluster(4, 2, 1)

    def at(tolerance: float) -> VerifyReport:
        return verify(
            model, batch, devices, steps=14, optimizers=("sgd",), constraints={"args[0]": "shard(0)"},
            tolerance=tolerance,
        )  # fmt: skip

    far = at(1.0)
    assert far.ok
    assert far.rounding is None
    assert far.gradient_error < 1e-13 < 1e-11 < far.parameter_error < 1e-2, far.text
    within = at(far.parameter_error / 2)
    assert within.ok, within.text
    assert within.rounding is not None
    assert within.rounding > far.parameter_error / 4
    assert "changes the single device's own parameters" in within.text
    too_much = at(far.parameter_error / 1000)
    assert not too_much.ok, "a hundred tolerances at most"
    assert too_much.rounding == within.rounding


def test_parameters_are_wrong_and_rounding_does_not_explain_it(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = HAP.full_tensors

    def wrong(hap: HAP) -> dict[str, torch.Tensor]:
        tensors = whole(hap)
        first = min(tensors)
        return {**tensors, first: tensors[first] * (1 + 1e-8)}

    monkeypatch.setattr(HAP, "full_tensors", wrong)
    c = case("mlp", torch.float32)
    report = verify(c.model, c.batch, cluster(2, 1))
    assert not report.ok, report.text
    assert report.parameter_error == pytest.approx(1e-8, rel=1e-3)
    assert report.rounding is not None
    assert report.rounding < 1e-12


def test_a_gradient_that_is_nothing_but_rounding() -> None:
    """Batch norm cancels the bias before it: in float32, too, what is left of its gradient is not compared."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.SiLU(), nn.Linear(8, 5))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.layers(x), y)

    batch = {"x": torch.randn(12, 6), "y": torch.randint(0, 5, (12,))}
    for dtype, most in (("float64", 1e-10), ("float32", 1e-4)):
        report = verify(Model(), batch, cluster(4, 2, 1), dtype=dtype, constraints={"x": "shard(0)"})
        assert report.ok, report.text
        assert 0 < report.gradient_error < most


def test_llamas_casts_are_widened() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.rand(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = x.to(torch.float32)
            return (
                (self.w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype))
                .square()
                .mean()
            )

    model, x = Norm(), torch.randn(6, 8)
    with all_in(torch.float64):
        loss = model.double()(x.double())
    assert loss.dtype == torch.float64
    wide = model.w.double()
    h = x.double()
    want = (wide * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))).square().mean()
    assert abs(loss.item() - want.item()) < 1e-15
    report = verify(Norm(), (x,), cluster(2, 1), constraints={"w": "shard(0)"})
    assert report.ok, report.text


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float64, 1e-9),
        ("float64", 1e-9),
        ("torch.float64", 1e-9),
        (torch.float32, 1e-3),
        ("float32", 1e-3),
    ],
)
def test_dtypes_by_name_and_as_torchs(dtype: str | torch.dtype, tolerance: float) -> None:
    c = case("mlp", torch.float32)
    report = verify(c.model, c.batch, cluster(2, 1), dtype=dtype, optimizers=("sgd",))
    assert report.ok, report.text
    assert report.tolerance == tolerance
    assert (report.gradient_error < 1e-12) == (tolerance == 1e-9), "computed in that dtype"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.float16}, r"dtype is torch\.float16; allowed are torch\.float64 and torch\.float32"),
        ({"dtype": "double"}, "dtype is 'double'; allowed are"),
        ({"dtype": None}, "dtype is None; allowed are"),
        ({"dtype": ["float64"]}, "allowed are"),
        ({"optimizers": ("adam",)}, r"optimizers is \('adam',\); name one or more of sgd and adamw"),
        ({"optimizers": "sgd"}, "optimizers is 'sgd'; name one or more"),
        ({"optimizers": ()}, "name one or more"),
        ({"steps": 0}, "steps is 0; take a whole number from 1"),
        ({"stepz": 3}, r"there is no argument 'stepz'; did you mean 'steps'\?"),
        ({"segment": 2}, r"there is no argument 'segment'; did you mean 'segments'\?"),
    ],
)
def test_options_that_there_are_not(options: dict[str, Any], message: str) -> None:
    c = case("mlp", torch.float32)
    with pytest.raises(OptionError, match=message):
        verify(c.model, c.batch, cluster(2, 1), **options)


def test_retyping_a_graph() -> None:
    graph = case("attention", torch.float32).theory.graph
    wide = retyped_graph(graph, torch.float64)
    assert not any(t.dtype == "float32" for t in wide.tensors)
    assert [t.dtype for t in wide.tensors if t.dtype != "float64"] == [
        t.dtype for t in graph.tensors if t.dtype != "float32"
    ]
    assert replace(retyped_graph(wide, torch.float32), host=graph.host) == graph


def test_errors_are_relative_to_the_largest_element() -> None:
    want = {"a": torch.tensor([100.0, 1.0]), "b": torch.tensor([1e-14])}
    got = {"a": torch.tensor([100.0, 2.0]), "b": torch.tensor([0.0])}
    assert largest_error(got, want, 1e-12) == (pytest.approx(0.01), "a")
    assert largest_error(got, want, 0.0) == (pytest.approx(1.0), "b")
    assert largest_error({"a": got["a"]}, want)[0] == float("inf")
    nan = {"a": torch.tensor([float("nan"), 1.0]), "b": want["b"]}
    assert largest_error(nan, want)[0] == float("inf")
    assert largest_error(nan, nan)[0] == 0.0
    infinite = {"a": torch.tensor([float("inf"), 1.0])}
    assert largest_error(infinite, infinite)[0] == 0.0
    assert largest_error({"a": torch.tensor([1.0, 1.0])}, infinite)[0] == float("inf")
