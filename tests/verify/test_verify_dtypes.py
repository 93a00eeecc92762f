"""Verification in another dtype: both sides compute the same, whatever a model does with dtypes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_plans import cluster
from torch import nn
from torch.nn import functional as F

from hetspmd.cluster.collective_kinds import kinds_between
from hetspmd.codec.records import DamageError, decode, encode
from hetspmd.dist import collectives
from hetspmd.dist.communicator import Communicator
from hetspmd.dist.random import Randomness
from hetspmd.dist.runtime import Runtime
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.optimize.compiler import compile as compile_plan
from hetspmd.plan.plan import Plan
from hetspmd.trace.graph import CONSTANT
from hetspmd.trace.trace import trace
from hetspmd.verify.comparison import VerifyReport, verify
from hetspmd.verify.model_numbers import with_own_numbers
from hetspmd.verify.precision import all_in, other_dtype, retyped_graph
from nets import Net

torch.manual_seed(0)
X = torch.randn(16, 12)
DEVICES = cluster(4, 2, 1, 1)
Forward = Callable[..., Any]


def net(forward: Forward, **parts: Any) -> Net:
    torch.manual_seed(1)
    return Net(forward, a=nn.Linear(12, 24), b=nn.Linear(24, 12), **parts)


def check(model: nn.Module, *batch: torch.Tensor, error: float = 1e-12, **options: Any) -> VerifyReport:
    report = verify(model, batch or (X,), DEVICES, **options)
    assert report.ok, report.text
    assert report.text.startswith("equal to "), report.text
    assert max(report.loss_error, report.gradient_error) < error, report.text
    return report


def divides(plan: Plan) -> None:
    assert any(
        form >= 2 for step in plan.program.steps for form in getattr(getattr(step, "row", None), "post", ())
    )


def loss(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


SCALE = torch.tensor(0.1)
COMPLEX: dict[str, Forward] = {
    "a complex scalar": lambda s, x: loss(
        torch.fft.irfft(torch.fft.rfft(s.a(x)) * torch.ones(13) * (1 + 0.1j))
    ),
    "a complex constant": lambda s, x: loss(
        torch.fft.irfft(torch.fft.rfft(s.a(x)) * torch.exp(1j * torch.arange(13)))
    ),
    "complex64 by name": lambda s, x: (s.a(x).to(torch.complex64) * (0.3 - 2j)).abs().mean(),
    "torch.complex": lambda s, x: torch.complex(s.a(x), s.b(torch.tanh(s.a(x))).repeat(1, 2)).abs().mean(),
    "a rotation": lambda s, x: loss(
        torch.view_as_real(
            torch.view_as_complex(s.a(x).float().view(16, 12, 2))
            * torch.polar(torch.ones(12), torch.arange(12) * 0.1)
        )
    ),
    "a conjugate": lambda s, x: (torch.fft.fft(s.a(x)) * torch.fft.fft(s.a(x)).conj()).real.mean(),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_numbers(name: str) -> None:
    check(net(COMPLEX[name]))


def cfloat(*shape: int) -> nn.Parameter:
    torch.manual_seed(2)
    return nn.Parameter(torch.randn(*shape, dtype=torch.cfloat))


COMPLEX_PARAMETERS: dict[str, Callable[[], nn.Module]] = {
    "a vector": lambda: net(lambda s, x: (s.a(x) * s.w).abs().mean(), w=cfloat(24)),
    "a matrix": lambda: net(lambda s, x: (s.a(x).to(torch.cfloat) @ s.w).abs().mean(), w=cfloat(24, 8)),
    "filters": lambda: net(lambda s, x: loss(torch.fft.irfft(torch.fft.rfft(s.a(x)) * s.w)), w=cfloat(13)),
    "a linear layer": lambda: net(
        lambda s, x: s.c(torch.fft.fft(s.a(x))).abs().mean(), c=nn.Linear(24, 6, dtype=torch.cfloat)
    ),
    "complex128": lambda: net(
        lambda s, x: (s.a(x) * s.w).abs().mean(), w=nn.Parameter(torch.randn(24, dtype=torch.cdouble))
    ),
}


@pytest.mark.parametrize("name", COMPLEX_PARAMETERS)
def test_complex_parameters(name: str) -> None:
    check(COMPLEX_PARAMETERS[name](), constraints={"w": "shard(0)"} if name == "a vector" else {})


def test_a_complex_buffer_is_kept() -> None:
    model = net(lambda s, x: (s.a(x) * s.w).abs().mean())
    model.register_buffer("w", torch.randn(24, dtype=torch.cfloat))
    check(model)


DEFAULTS: dict[str, Forward] = {
    "arange / 10": lambda s, x: (s.a(x).pow(2).mean(1) * (torch.arange(16) / 10)).sum(),
    "full of a number": lambda s, x: (s.a(x) * torch.full((24,), 0.1)).square().mean(),
    "linspace": lambda s, x: (s.a(x) * torch.linspace(0.0, 0.7, 24)).square().mean(),
    "sqrt of integers": lambda s, x: (s.a(x) * torch.arange(24).sqrt()).square().mean(),
    "a scalar tensor": lambda s, x: (s.a(x) * torch.tensor(0.1)).square().mean(),
    "a tensor of numbers": lambda s, x: (s.b(s.a(x)) * torch.tensor([0.1, 0.7, 1.3] * 4)).square().mean(),
    "float32 by name": lambda s, x: (s.b(s.a(x)) * torch.tensor([0.1] * 12, dtype=torch.float32)).square().mean(),
    "mean of bools": lambda s, x: s.a(x).square().mean() * (x > 0).float().mean(),
    "eps of the dtype": lambda s, x: (s.a(x).abs() + torch.finfo(x.dtype).eps * 1e4).log().mean(),
    "root of the eps": lambda s, x: (s.a(x).abs() + torch.finfo(x.dtype).eps ** 0.5).log().mean(),
    "least of the dtype": lambda s, x: torch.softmax(
        s.a(x).masked_fill(torch.ones(24).cumsum(0) > 20, torch.finfo(x.dtype).min), -1
    ).square().sum(),
    "new_tensor": lambda s, x: (s.a(x) * x.new_tensor([0.1] * 24)).square().mean(),
    "an outer float32 tensor": lambda s, x: (s.a(x) * SCALE).square().mean(),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_default_dtype_is_the_comparisons_own(name: str) -> None:
    check(net(DEFAULTS[name]), error=1e-11)


def test_the_default_dtype_is_put_back() -> None:
    check(net(DEFAULTS["arange / 10"]))
    assert torch.get_default_dtype() == torch.float32


def test_class_weights_outside_of_the_model() -> None:
    weights, labels = torch.rand(24) + 0.5, torch.randint(0, 24, (16,))

    def weighted(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y, weight=weights)

    check(net(lambda s, x: s.a(x)), X, labels, loss=weighted)


def test_a_plain_tensor_attribute_and_a_teacher() -> None:
    teacher = [nn.Linear(12, 24).requires_grad_(False)]

    def distil(s: Any, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(s.a(x) @ s.basis, teacher[0](x))

    model = net(distil)
    model.basis = torch.randn(24, 24)
    check(model)
    assert model.basis.dtype == teacher[0].weight.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_models_in_other_dtypes(dtype: torch.dtype) -> None:
    model = net(lambda s, x: F.mse_loss(s.b(torch.tanh(s.a(x))).float(), x.float())).to(dtype)
    check(model, X.to(dtype))
    assert next(model.parameters()).dtype == dtype


def test_in_float32() -> None:
    check(net(DEFAULTS["arange / 10"]), dtype="float32", error=1e-4)
    check(net(COMPLEX["a rotation"]).double(), X.double(), dtype="float32", error=1e-4)


def test_integers_alone_in_the_batch() -> None:
    model = Net(
        lambda s, i, y: F.cross_entropy(s.o(s.e(i).mean(1)), y), e=nn.Embedding(30, 12), o=nn.Linear(12, 7)
    )
    check(model, torch.randint(0, 30, (16, 5)), torch.randint(0, 7, (16,)))


def test_the_plans_divide() -> None:
    for forward in (COMPLEX["a complex scalar"], COMPLEX["a rotation"], DEFAULTS["arange / 10"]):
        divides(compile_plan(net(forward), (X,), DEVICES))


def test_a_plan_with_complex_numbers_is_stored(tmp_path: Any) -> None:
    plan = compile_plan(net(COMPLEX["a complex scalar"]), (X,), DEVICES)
    plan.save(tmp_path / "plan")
    assert Plan.load(tmp_path / "plan") == plan
    assert any("0.1j" in repr(i.args) for c in plan.graph.constants for i in c.program) or "0.1j" in str(
        plan.graph
    )
    for number in (1 + 2j, -0.0 - 1j, complex("inf+nanj")):
        assert repr(decode(json.loads(json.dumps(encode(number))), Any)) == repr(number)
    with pytest.raises(DamageError, match="the two parts of a complex number"):
        decode({"$complex": [1, 2.0]}, Any)


def test_other_numbers_than_the_models_are_not_equal() -> None:
    """A plan of the model with another constant: its numbers are no roundings of the model's."""
    temperature = [0.1]
    model = net(lambda s, x: (s.a(x) * torch.tensor([temperature[0]] * 24)).square().mean())
    plan = compile_plan(model, (X,), DEVICES)
    assert verify(model, (X,), DEVICES, plan=plan).ok
    temperature[0] = 0.1000001
    assert not verify(model, (X,), DEVICES, plan=plan).ok


def test_numbers_of_a_graph() -> None:
    def forward(s: Any, x: torch.Tensor) -> torch.Tensor:
        y = s.a(x) * torch.tensor([0.1, 0.2, 0.3] * 8)
        return (y.masked_fill(x.new_ones(24) > 2, torch.finfo(x.dtype).min) + torch.finfo(x.dtype).eps).mean()

    model = net(forward)
    narrow = retyped_graph(trace(model, (X,), {}), torch.float64)
    with all_in(torch.float64):
        wide = trace(net(forward).double(), (X.double(),), {})
    found = with_own_numbers(narrow, wide, torch.float64)
    text = str(found)
    assert str(torch.finfo(torch.float64).eps) in text
    assert str(torch.finfo(torch.float32).eps) not in text
    kept = [c for c in found.constants if c.data or any(i.op == CONSTANT for i in c.program)]
    assert kept == [c for c in wide.constants if c.data or any(i.op == CONSTANT for i in c.program)] != []
    assert with_own_numbers(narrow, narrow, torch.float64) == narrow


def test_which_dtype_another_becomes() -> None:
    assert other_dtype(torch.complex64, torch.float64) == torch.complex128
    assert other_dtype(torch.complex128, torch.float32) == torch.complex64
    assert other_dtype(torch.bfloat16, torch.float64) == torch.float64
    assert other_dtype(torch.int32, torch.float64) == torch.int32


def test_collectives_of_conjugates() -> None:
    """Views whose memory holds other values than they show."""
    whole = torch.randn(7, 6, dtype=torch.cdouble)
    extents = (3, 0, 4)

    def body(comm: Communicator) -> list[torch.Tensor]:
        runtime = Runtime(comm, Randomness(0, comm.rank, torch.device("cpu")))
        start = (0, 3, 3)[comm.rank]
        part = whole.conj()[start : start + extents[comm.rank]]
        gathers = [collectives.STARTS[kind].one for kind in kinds_between("shard", "replicated")]
        found = [gather(runtime, part, 0, extents).wait() for gather in gathers]
        found += [gather(runtime, part.imag, 0, extents).wait() for gather in gathers]
        moved = collectives.start_all_to_all(runtime, part, 0, 1, extents, (2, 2, 2)).wait()
        found.append(collectives.start_all_gather(runtime, moved.conj(), 1, (2, 2, 2)).wait().conj())
        found.append(collectives.start_all_reduce(runtime, whole.conj()).wait() / 3)
        for kind in kinds_between("partial", "shard"):
            summed = collectives.STARTS[kind].one(runtime, whole.conj(), 0, extents).wait() / 3
            found.append(collectives.start_all_gather(runtime, summed, 0, extents).wait())
        return found

    for found in run_ranks(3, body):
        for value in found:
            assert torch.allclose(value, whole.conj() if value.is_complex() else whole.conj().imag)
