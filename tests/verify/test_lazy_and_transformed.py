"""Conjugates and negatives that torch puts off, and torch.func's transforms, in plans that divide the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import grad, hessian, jacfwd, jacrev, vmap

import hetspmd
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import TraceError
from hetspmd.run.guard import checksum
from hetspmd.run.module import HAP
from hetspmd.trace.flat_bytes import flat_bytes
from hetspmd.trace.host.plain import fingerprint
from hetspmd.verify.comparison import verify
from memory_cases import devices

CLUSTER = devices(0.5, 0.3, 0.2, flops=1e5)
torch.manual_seed(0)
TABLE = torch.randn(4, dtype=torch.complex128)
LAZY: dict[str, torch.Tensor] = {
    "a conjugate": TABLE.conj(),
    "of a part": TABLE.repeat(2)[::2].conj(),
    "a negative": TABLE.conj().imag,
    "of a transposed one": torch.randn(4, 3, dtype=torch.complex128).T.conj(),
    "of one element": TABLE[0].conj(),
    "a negative of one element": TABLE[0].conj().imag,
    "of none": TABLE[:0].conj(),
}


@pytest.mark.parametrize("name", LAZY)
def test_bytes_are_of_what_is_read(name: str) -> None:
    lazy = LAZY[name]
    assert lazy.is_conj() or lazy.is_neg()
    plain = lazy.resolve_conj().resolve_neg().contiguous()
    assert flat_bytes(lazy).numpy().tobytes() == plain.numpy().tobytes()
    assert fingerprint(lazy) == fingerprint(plain)
    assert checksum(lazy) == checksum(plain)
    if lazy.numel():
        unlike = plain.clone()
        unlike.view(-1)[-1] += 1
        assert checksum(lazy) != checksum(unlike)
        assert not np.array_equal(flat_bytes(lazy), flat_bytes(unlike))


class Turned(nn.Module):
    """Pairs of numbers as complex ones, turned by a constant."""

    def __init__(self, turn: Callable[[Any], torch.Tensor], **kept: torch.Tensor) -> None:
        super().__init__()
        self.first, self.last, self.turn = nn.Linear(6, 8), nn.Linear(8, 8), turn
        vars(self).update(kept)
        self.register_buffer("known", TABLE.conj().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.last(torch.tanh(self.first(x))).view(-1, 4, 2)
        turned = torch.view_as_complex(h) * self.turn(self)
        return (torch.view_as_real(turned).cos() - x.sum()).square().mean()


TURNS: dict[str, Callable[[Any], torch.Tensor]] = {
    "made in forward": lambda _: torch.polar(torch.ones(4), torch.arange(4.0)).to(torch.complex128),
    "its conjugate": lambda _: torch.polar(torch.ones(4), torch.arange(4.0)).to(torch.complex128).conj(),
    "outside of the model": lambda _: LAZY["a conjugate"],
    "a negative outside of the model": lambda _: LAZY["a negative"],
    "a plain attribute": lambda model: model.kept,
    "a buffer": lambda model: model.known.conj(),
}


def turned(name: str) -> nn.Module:
    torch.manual_seed(1)
    return Turned(TURNS[name], kept=LAZY["of a part"]).double()


X = torch.randn(12, 6, dtype=torch.float64)


@pytest.mark.parametrize("name", TURNS)
def test_complex_constants(name: str) -> None:
    model = turned(name)
    assert len(hetspmd.compile(model, (X,), CLUSTER).active) == 3
    verify(model, (X,), CLUSTER, optimizers=("sgd",), tolerance=1e-9).require()


@pytest.mark.parametrize("name", TURNS)
def test_further_plans_of_complex_constants(name: str) -> None:
    """Evaluation and another shape are traced anew, and compared with the first trace."""
    model = turned(name)
    expected = [model(X).item(), model(X[:7]).item()]
    models = [turned(name) for _ in range(3)]

    def body(communicator: Any) -> list[float]:
        hap = HAP(models[communicator.rank], CLUSTER, example=(X,), process_group=communicator)
        hap(X).backward()
        found = [hap(X[:7]).item()]
        hap.eval()
        return [hap(X).item(), *found]

    for found in run_ranks(3, body):
        assert found == pytest.approx(expected, rel=1e-12)


class Transformed(nn.Module):
    def __init__(self, transform: Callable[[nn.Module], Callable[[torch.Tensor], torch.Tensor]]) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.transform = transform

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.transform(self.inner)(x).square().mean() + self.inner(x).square().mean()


def one(f: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda row: f(row).square().sum()


TRANSFORMS: dict[str, Callable[[nn.Module], Callable[[torch.Tensor], torch.Tensor]]] = {
    "vmap": vmap,
    "gradients by sample": lambda f: vmap(grad(one(f))),
    "Jacobians by sample": lambda f: vmap(jacrev(f)),
    "Jacobians forward": lambda f: vmap(jacfwd(f)),
    "Hessians by sample": lambda f: vmap(hessian(one(f))),
    "a Laplacian": lambda f: vmap(lambda row: hessian(one(f))(row).diagonal().sum()),
    "a Jacobian of all": jacrev,
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_in_forward(name: str) -> None:
    torch.manual_seed(2)
    model = Transformed(TRANSFORMS[name]).double()
    verify(model, (X,), CLUSTER, optimizers=("sgd",), tolerance=1e-9).require()


def test_a_lost_write_under_a_transform_is_refused_still() -> None:
    outside = torch.zeros(12, 3, dtype=torch.float64)

    def writes(f: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: vmap(lambda row, old: old.add_(f(row)))(x, outside)

    with pytest.raises(
        TraceError, match=r"forward changes a tensor \(add_\) at .*neither a parameter nor a buffer"
    ):
        hetspmd.compile(Transformed(writes).double(), (X,), CLUSTER)
