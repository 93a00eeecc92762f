"""Functions of torch that look into their tensors are refused with what to write, which computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from hetspmd.errors import TraceError
from hetspmd.rules.theory import derive
from hetspmd.trace.trace import trace
from nets import Net
from workbench import single_device

LENGTHS = torch.tensor([3, 5, 1, 2])


def packed(net: Any, x: torch.Tensor) -> torch.Tensor:
    given = pack_padded_sequence(x, LENGTHS, batch_first=True, enforce_sorted=False)
    last: torch.Tensor = net.layer(given)[1][-1]
    return last.square().mean()


def padded(net: Any, x: torch.Tensor) -> Any:
    out = net.layer(x)[0]
    return out[torch.arange(len(LENGTHS)), LENGTHS - 1].square().mean()


def likely(net: Any, x: torch.Tensor) -> torch.Tensor:
    mean, variance = net.layer(x)[0].chunk(2, -1)
    return F.gaussian_nll_loss(mean, x[..., :2], variance.exp())


def likely_by_a_module(net: Any, x: torch.Tensor) -> torch.Tensor:
    mean, variance = net.layer(x)[0].chunk(2, -1)
    loss: torch.Tensor = net.loss(mean, x[..., :2], variance.exp())
    return loss


def likely_written_out(net: Any, x: torch.Tensor) -> Any:
    mean, variance = net.layer(x)[0].chunk(2, -1)
    target, v = x[..., :2], variance.exp().clamp(min=1e-6)
    return 0.5 * (v.log() + (mean - target).square() / v).mean()


def covariance(net: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cov(net.layer(x)[0].flatten(1)).square().sum()


def covariance_written_out(net: Any, x: torch.Tensor) -> Any:
    rows = net.layer(x)[0].flatten(1)
    c = rows - rows.mean(1, keepdim=True)
    return (c @ c.T / (rows.shape[1] - 1)).square().sum()


Forward = Callable[..., Any]
CASES: dict[str, tuple[Forward, Forward, str]] = {
    "packed": (packed, padded, r"run the recurrent layer over the padded batch"),
    "likelihood": (likely, likely_written_out, r"v\.log\(\) \+ \(mean - target\)"),
    "a module": (likely_by_a_module, likely_written_out, r"v\.log\(\) \+ \(mean - target\)"),
    "covariance": (covariance, covariance_written_out, r"c @ c\.T / "),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_advised_computes_the_same(name: str) -> None:
    torch.manual_seed(0)
    refused, advised, text = CASES[name]
    layer, x = nn.GRU(6, 4, batch_first=True).double(), torch.randn(4, 5, 6, dtype=torch.float64)
    with pytest.raises(TraceError, match=rf"Here: .*{text}"):
        trace(Net(refused, layer=layer, loss=nn.GaussianNLLLoss()), (x,), {})
    model = Net(advised, layer=layer)
    got = single_device(derive(trace(model, (x,), {})), model, [x]).loss
    torch.testing.assert_close(got, Net(refused, layer=layer, loss=nn.GaussianNLLLoss())(x).detach())
