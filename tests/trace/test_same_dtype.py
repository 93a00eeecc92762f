"""What the trace takes apart computes what eager PyTorch computes, in the same dtype: kinks, ends of ranges and
overflow included."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hetspmd.rules.theory import derive
from hetspmd.run.guard import expected, match
from hetspmd.trace.losses import find_loss
from hetspmd.trace.trace import trace
from hetspmd.verify.difference import largest_error
from hetspmd.verify.reference import run_reference
from nets import Net
from workbench import randomness

KINKS = torch.tensor(
    [-4.0, -3.0, -2.999999, -1.0, -0.5, -0.0, 0.0, 0.25, 0.5, 1.0, 2.0, 2.5, 2.999999, 3.0, 3.5, 6.0]
)
"""Where activations and losses change their formula."""

Body = Callable[..., Any]


def activation(function: Callable[[torch.Tensor], torch.Tensor]) -> Body:
    return lambda s, x: (function(s.w) * x).sum()


def loss(
    function: Callable[..., torch.Tensor], target: Callable[[torch.Tensor], torch.Tensor], **options: Any
) -> Body:
    return lambda s, x: function(s.w, target(x), **options)


def labels(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(16) % 7


def signs(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, 1.0, -1.0).to(x.dtype)


def unit(x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x)


BODIES: dict[str, Body] = {
    **{
        name: activation(function)
        for name, function in {
            "hardswish": F.hardswish, "hardsigmoid": F.hardsigmoid, "relu6": F.relu6, "hardtanh": F.hardtanh,
            "hardshrink": F.hardshrink, "softshrink": F.softshrink, "elu": F.elu, "selu": F.selu, "gelu": F.gelu,
            "gelu tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu, "mish": F.mish,
            "softplus": F.softplus, "logsigmoid": F.logsigmoid, "leaky_relu": F.leaky_relu, "celu": F.celu,
            "threshold": lambda x: F.threshold(x, 0.5, 0.1), "rrelu": F.rrelu,
            "glu": lambda x: F.glu(x).repeat(1, 2),
            "softsign": F.softsign, "mean": lambda x: x.mean(0, keepdim=True), "mean of all": lambda x: x.mean(),
            "var": lambda x: x.var(0), "var of the population": lambda x: x.var(0, unbiased=False),
            "std": lambda x: x.std(1, keepdim=True), "var_mean": lambda x: torch.var_mean(x, 1)[0] + x.mean(1),
            "std_mean": lambda x: sum(torch.std_mean(x, 0)), "var of all": lambda x: x.var() * x,
            "new_zeros": lambda x: x + x.new_zeros(16, 16), "new_ones": lambda x: x * x.new_ones(16, 16),
            "new_full": lambda x: x * x.new_full((16, 16), 0.3),
        }.items()
    },
    **{
        f"{name} {reduction}": loss(function, target, reduction=reduction, **options)
        for name, function, target, options in (
            ("mse", F.mse_loss, lambda x: x, {}),
            ("l1", F.l1_loss, lambda x: x, {}),
            ("smooth_l1", F.smooth_l1_loss, lambda x: x, {"beta": 0.5}),
            ("huber", F.huber_loss, lambda x: x, {"delta": 0.5}),
            ("soft margin", F.soft_margin_loss, signs, {}),
            ("nll", lambda w, y, reduction: F.nll_loss(F.log_softmax(w, 1), y, reduction=reduction), labels, {}),
            ("cross entropy", F.cross_entropy, labels, {"label_smoothing": 0.1, "ignore_index": 3}),
            ("bce with logits", F.binary_cross_entropy_with_logits, unit, {}),
            ("bce", lambda w, y, reduction: F.binary_cross_entropy(w.sigmoid(), y, reduction=reduction), unit, {}),
            ("multi margin", F.multi_margin_loss, labels, {}),
            ("multilabel margin", F.multilabel_margin_loss, lambda x: (torch.arange(256) % 5 - 1).view(16, 16), {}),
            ("kl", F.kl_div, lambda x: x.softmax(1), {}),
            ("poisson", F.poisson_nll_loss, unit, {}),
        )
        for reduction in ("mean", "sum")
    },
    "bce weighted": lambda s, x: F.binary_cross_entropy_with_logits(
        s.w, x.sigmoid(), x.abs(), pos_weight=x[0].abs()
    ),
    "nll of images": lambda s, x: F.cross_entropy(s.w.view(4, 4, 4, 4), torch.arange(64).view(4, 4, 4) % 4),
    "nll of classes with weights": lambda s, x: F.cross_entropy(s.w, torch.arange(16) % 7, x[0].abs()),
}  # fmt: skip

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(16),
    "batch norm without statistics": lambda: nn.BatchNorm1d(16, track_running_stats=False),
    "batch norm without weights": lambda: nn.BatchNorm1d(16, affine=False),
    "batch norm in evaluation mode": lambda: nn.BatchNorm1d(16).eval(),
    "layer norm": lambda: nn.LayerNorm(16),
    "group norm": lambda: nn.GroupNorm(4, 16),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (4, 4)), nn.InstanceNorm1d(4, affine=True), nn.Flatten()
    ),
    "lstm": lambda: nn.LSTM(16, 16, num_layers=2, bidirectional=True),
    "gru": lambda: nn.GRU(16, 16),
    "rnn": lambda: nn.RNN(16, 16, nonlinearity="relu"),
    "rnn of tanh": lambda: nn.RNN(16, 16),
    "lstm cell": lambda: nn.LSTMCell(16, 16),
    "gru cell": lambda: nn.GRUCell(16, 16),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (4, 4)), nn.Conv1d(4, 4, 3, padding=1), nn.Flatten()
    ),
    "transposed convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (4, 4)), nn.ConvTranspose1d(4, 4, 3, padding=1), nn.Flatten()
    ),
}

EPS = {torch.float64: 1e-13, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}
"""What rounding may change, relative to the largest element."""


def run_layer(s: Any, x: torch.Tensor) -> torch.Tensor:
    out = s.layer(s.w)
    while isinstance(out, tuple):
        out = out[0]
    return (out * x.repeat(1, out.shape[1] // 16)).sum()


def compared(body: Body, dtype: torch.dtype, **parts: Any) -> dict[str, float]:
    """The errors of the graph's interpreter against eager PyTorch, by kind."""
    torch.manual_seed(0)
    w = KINKS.repeat(16, 1)
    w[1:] += torch.randn(15, 16).round(decimals=2)
    x = torch.randn(16, 16).to(dtype)
    x[:2] = w[:2].to(dtype)
    x[:2, ::2] += 0.5
    model = Net(body, w=nn.Parameter(w), **parts).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager = copy.deepcopy(model)
        value = find_loss(eager(x))
        assert value is not None
        value.backward()
        graph = trace(model, (x,), {})
        inputs, _ = match(expected(graph), (x,), {})
        assert inputs is not None
        got = run_reference(
            derive(graph, quiet=True), dict(model.named_parameters()), dict(model.named_buffers()), inputs,
            randomness=randomness(),
        )  # fmt: skip
    assert got.loss is not None
    after = dict(eager.named_buffers())
    wanted = {n: p.grad for n, p in eager.named_parameters() if p.grad is not None}
    return {
        "loss": largest_error({"loss": got.loss}, {"loss": value})[0],
        "gradients": largest_error(got.gradients, wanted, EPS[dtype])[0],
        "buffers": largest_error(got.buffers, {n: after[n] for n in got.buffers})[0],
    }


@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize("name", BODIES)
def test_functions(name: str, dtype: torch.dtype) -> None:
    if name.startswith("multi") and dtype in (torch.bfloat16, torch.float16):
        pytest.skip("which margins are violated is decided by rounding")
    errors = compared(BODIES[name], dtype)
    assert max(errors.values()) <= EPS[dtype], errors


UNROLLED = {"lstm", "gru", "rnn of tanh"}
"""They are many instructions, and are slow."""


@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in UNROLLED else ()) for n in LAYERS]
)
def test_layers(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    errors = compared(run_layer, dtype, layer=LAYERS[name]())
    assert max(errors.values()) <= EPS[dtype], errors
