"""Verification of models that draw random numbers: on one device and on ranks the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_plans import cluster
from torch import nn
from torch.nn import functional as F

from hetspmd.program import noise
from hetspmd.trace.trace import trace
from hetspmd.verify.comparison import verify
from nets import Net

X = torch.randn(16, 12, generator=torch.Generator().manual_seed(3))
DEVICES = cluster(4, 2, 1, 1)
Body = Callable[..., Any]


def net(body: Body, **parts: Any) -> Net:
    torch.manual_seed(1)
    return Net(body, a=nn.Linear(12, 24), b=nn.Linear(24, 12), **parts)


def scaled(draw: Callable[[torch.Tensor], torch.Tensor]) -> Body:
    return lambda s, x: (s.a(x) * draw(s.a(x))).square().mean()


DRAWS: dict[str, Body] = {
    "randint": scaled(lambda y: torch.randint(0, 3, (16, 1))),
    "randint in float": scaled(lambda y: torch.randint(1, 5, (16, 24), dtype=torch.float32)),
    "randint_like": scaled(lambda y: torch.randint_like(y, 3)),
    "exponential": scaled(lambda y: torch.empty_like(y).exponential_(2.0)),
    "gumbel softmax": lambda s, x: (F.gumbel_softmax(s.a(x)) * torch.arange(24.0)).sum(1).mean(),
    "normal": scaled(lambda y: torch.normal(y.detach(), 0.1)),
    "normal of two tensors": scaled(lambda y: torch.normal(y.detach(), y.detach().abs() + 0.1)),
    "normal of numbers": scaled(lambda y: torch.normal(1.0, 0.5, (16, 1))),
    "normal_": scaled(lambda y: torch.empty(16, 24).normal_(1.0, 0.5)),
    "uniform_": scaled(lambda y: torch.empty(16, 24).uniform_(1.0, 2.5)),
    "poisson": scaled(lambda y: torch.poisson(y.detach().abs() * 3)),
    "bernoulli": scaled(lambda y: torch.bernoulli(torch.sigmoid(y.detach()))),
    "geometric": scaled(lambda y: torch.empty_like(y).geometric_(0.4)),
    "cauchy": scaled(lambda y: torch.empty_like(y).cauchy_().clamp(-3, 3)),
    "log_normal": scaled(lambda y: torch.empty_like(y).log_normal_(0.0, 0.3)),
    "binomial": scaled(lambda y: torch.binomial(torch.full_like(y, 5.0), torch.sigmoid(y.detach()))),
    "multinomial": lambda s, x: (
        s.a(x).gather(1, torch.multinomial(s.a(x).softmax(1).detach(), 3)).square().mean()
    ),
    "multinomial again": lambda s, x: (
        s.a(x).gather(1, torch.multinomial(s.a(x).softmax(1).detach(), 30, True)).square().mean()
    ),
    "randperm": lambda s, x: (s.a(x)[torch.randperm(16)] * s.a(x)).mean(),
    "rrelu": lambda s, x: F.rrelu(s.a(x), training=True).square().mean(),
    "alpha dropout": lambda s, x: F.alpha_dropout(s.a(x), 0.3, training=True).square().mean(),
    "feature dropout": lambda s, x: F.dropout1d(s.a(x)[None], 0.3, training=True).square().mean(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws(name: str) -> None:
    report = verify(net(DRAWS[name]), (X,), DEVICES, optimizers=("sgd",))
    assert report.ok, report.text
    assert report.random
    assert report.text.startswith("equal to its reference graph"), report.text


def test_ranks_that_draw_otherwise_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slices of an exponential that are no slices of what one device draws."""
    right = noise.NOISE["aten.exponential.default"]

    def wrong(flat: torch.Tensor, generator: torch.Generator, *args: Any, **kwargs: Any) -> object:
        right.fill(flat, generator, *args, **kwargs)
        return flat.mul_(float(torch.rand((), generator=torch.Generator().manual_seed(len(calls)))) + 0.5)

    calls: list[int] = []

    def fill(flat: torch.Tensor, generator: torch.Generator, *args: Any, **kwargs: Any) -> object:
        calls.append(0)
        return wrong(flat, generator, *args, **kwargs)

    monkeypatch.setitem(
        noise.NOISE, "aten.exponential.default", noise.Noise(fill, right.finish, of_slices=True)
    )
    assert not verify(net(DRAWS["exponential"]), (X,), DEVICES, optimizers=("sgd",)).ok


class Normed(nn.Module):
    """Batch norm and dropout: what eager PyTorch computes in training mode shows only with dropout off."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.norm, self.b = nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Linear(24, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.b(F.dropout(self.norm(self.a(x)), 0.4, self.training)), x)


def test_training_without_dropout_is_compared_with_eager_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    report = verify(Normed(), (X,), DEVICES)
    assert report.ok, report.text
    assert report.random
    assert not report.notes
    from hetspmd.verify import quiet

    found = quiet.run_reference

    def wrong(theory: Any, *args: Any, **kwargs: Any) -> Any:
        result = found(theory, *args, **kwargs)
        if theory.graph.training:
            result.gradients["norm.weight"] *= 1.01
        return result

    monkeypatch.setattr(quiet, "run_reference", wrong)
    report = verify(Normed(), (X,), DEVICES)
    assert not report.ok
    assert report.worst["gradients"] == "norm.weight (with dropout off)"


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.TransformerDecoderLayer(12, 2, 24, dropout=0.3, batch_first=True),
        lambda: nn.TransformerEncoderLayer(12, 2, 24, dropout=0.3, batch_first=True),
    ],
    ids=["decoder", "encoder"],
)
def test_layers_that_drop(layer: Callable[[], nn.Module]) -> None:
    def body(s: Any, x: torch.Tensor) -> torch.Tensor:
        y = s.layer(x) if isinstance(s.layer, nn.TransformerEncoderLayer) else s.layer(x, x)
        return F.mse_loss(s.b(s.a(y)), x)

    report = verify(net(body, layer=layer()), (X.view(4, 4, 12),), DEVICES, optimizers=("sgd",))
    assert report.ok, report.text
    assert report.random
    assert not report.notes, report.notes


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("both", [False, True])
def test_dropout_between_recurrent_layers(kind: Any, both: bool) -> None:
    layer = kind(12, 6, num_layers=3, dropout=0.5, bidirectional=both, batch_first=True)
    model = Net(lambda s, x: s.layer(x)[0].square().mean(), layer=layer)

    def drops() -> int:
        graph = trace(model, (X.view(8, 2, 12),), {})
        return sum(i.op == "aten.native_dropout.default" for i in graph.instructions)

    assert drops() == 2
    layer.dropout = 0.0
    assert drops() == 0
    layer.dropout = 0.5
    model.eval()
    assert drops() == 0


def test_recurrent_layers_with_dropout() -> None:
    layer = nn.LSTM(12, 6, num_layers=2, dropout=0.5, batch_first=True)
    model = Net(lambda s, x: s.layer(x)[0].square().mean(), layer=layer)
    report = verify(model, (X.view(8, 2, 12),), DEVICES, optimizers=("sgd",))
    assert report.ok, report.text
    assert report.random
    assert not report.notes
