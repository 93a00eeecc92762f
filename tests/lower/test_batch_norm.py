"""Batch norms are torch's own calls where a rank has the whole batch; elsewhere their pieces stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from program_builder import build, data_parallel, random_program, uneven
from small_models import Case
from test_fuse import Written, calls
from test_lower import compare, distributed
from torch import fx, nn

from hetspmd.rules.theory import derive
from hetspmd.trace.trace import trace

aten = torch.ops.aten
FORWARD = aten._native_batch_norm_legit_functional.default
BACKWARD = aten.native_batch_norm_backward.default
CHANNELS = 6


class Normed(nn.Module):
    """A norm between two layers, and a residual sum of what is normed."""

    def __init__(self, norm: nn.Module, dims: int) -> None:
        super().__init__()
        make = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims]
        more = {} if dims == 0 else {"kernel_size": 1}
        self.first, self.second = make(3, CHANNELS, **more), make(CHANNELS, 2, **more)
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        found: torch.Tensor = self.second(torch.tanh(self.norm(x)) + x)
        return found.pow(2).mean()


def normed(norm: nn.Module, dims: int) -> Case:
    torch.manual_seed(1)
    model = Normed(norm, dims).double()
    for name, value in model.norm.named_parameters():
        with torch.no_grad():
            value.copy_(torch.rand_like(value) + (name == "weight"))
    batch = {"x": torch.randn(5, 3, *(4, 3, 2)[:dims], dtype=torch.float64)}
    return Case(model, batch, derive(trace(model, (), batch)))


def counts(c: Case, world: int, *, whole: bool = False) -> list[tuple[int, int]]:
    """Calls of torch's batch norm and of its backward, on every rank."""
    if whole:
        program = build(c.theory, lambda _, rows: rows[0])
    else:
        program = data_parallel(c.theory, c.theory.graph.inputs[0].tensor)
    lengths = uneven(c.theory, world, 1)
    compare(c, program, lengths)
    ranks = distributed(c, program, lengths)
    targets = [[n.target for n in calls(r[0].forward, r[0].backward)] for r in ranks]
    return [(found.count(FORWARD), found.count(BACKWARD)) for found in targets]


def frozen() -> nn.Module:
    norm = nn.BatchNorm2d(CHANNELS)
    norm.bias.requires_grad_(False)
    return norm


@pytest.mark.parametrize(
    ("norm", "dims"),
    [
        (nn.BatchNorm1d(CHANNELS), 0), (nn.BatchNorm1d(CHANNELS), 1), (nn.BatchNorm2d(CHANNELS), 2),
        (nn.BatchNorm3d(CHANNELS), 3), (nn.BatchNorm2d(CHANNELS, affine=False), 2),
        (nn.BatchNorm2d(CHANNELS, track_running_stats=False), 2), (nn.BatchNorm2d(CHANNELS, eps=1e-2), 2),
        (nn.BatchNorm2d(CHANNELS, momentum=0.7), 2), (frozen(), 2),
    ],
    ids=["2-D", "3-D", "4-D", "5-D", "plain", "untracked", "eps", "momentum", "frozen"],
)  # fmt: skip
def test_where_a_rank_has_the_whole_batch(norm: nn.Module, dims: int) -> None:
    c = normed(norm, dims)
    assert counts(c, 1) == [(1, 1)]
    assert counts(c, 3, whole=True) == [(1, 1)] * 3
    assert counts(c, 3) == [(0, 0)] * 3, "statistics are of the rows of all ranks"


def test_norms_that_take_no_statistics_are_left() -> None:
    c = normed(nn.BatchNorm2d(CHANNELS).eval(), 2)
    c.model.norm.eval()
    c = Case(c.model, c.batch, derive(trace(c.model, (), c.batch)))
    assert counts(c, 1) == [(0, 0)]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_random_programs_equal_the_single_device(world: int, seed: int) -> None:
    """Batches in parts, channels in parts, empty parts."""
    c = normed(nn.BatchNorm2d(CHANNELS), 2)
    compare(c, random_program(c.theory, seed), uneven(c.theory, world, seed))


# graphs written by hand -----------------------------------------------------------------------------------------

X, ROW, ONE = (3, 2, 4), (1, 2, 1), (2,)
HERE = 12


def forward(w: Written, change: str) -> list[fx.Node]:
    x, weight, bias = (w.nodes[n] for n in ("x", "weight", "bias"))
    over = [0, 1] if change == "over another dim" else [0, 2]
    row = (1, 1, 4) if change == "over another dim" else ROW
    count = 24 if change == "of a larger batch" else HERE
    early = w.call(aten.sin.default, bias, shape=ONE) if change == "bias early" else bias
    mean = w.call(aten.div.Tensor, w.call(aten.sum.dim_IntList, x, over, True, shape=row), count, shape=row)
    centred = w.call(aten.sub.Tensor, x, mean, shape=X)
    squares = w.call(aten.mul.Tensor, centred, centred, shape=X)
    total = w.call(aten.sum.dim_IntList, squares, over, True, shape=row)
    var = w.call(aten.div.Tensor, total, count, shape=row)
    rstd = w.call(aten.rsqrt.default, w.call(aten.add.Tensor, var, 1e-5, shape=row), shape=row)
    extra = [w.call(aten.neg.default, mean, shape=row), w.call(aten.neg.default, var, shape=row)]
    if change == "bias late":
        early = w.call(aten.sin.default, bias, shape=ONE)
    out = w.call(aten.mul.Tensor, centred, rstd, shape=X)
    shaped = w.call(aten.reshape.default, weight, [2, 1], shape=(2, 1))
    out = w.call(aten.mul.Tensor, out, shaped, shape=X)
    extra += {"normed read": [out.args[0]], "centred read": [centred], "squares read": [squares]}.get(
        change, []
    )
    out = w.call(aten.add.Tensor, out, w.call(aten.reshape.default, early, [2, 1], shape=(2, 1)), shape=X)
    return [out, *extra, rstd]


@pytest.mark.parametrize(
    ("change", "joined"),
    [
        ("none", True), ("bias early", True), ("bias late", False), ("over another dim", False),
        ("of a larger batch", False), ("centred read", False), ("squares read", False),
    ],
)  # fmt: skip
def test_pieces_of_the_forward(change: str, joined: bool) -> None:
    w = Written(x=X, weight=ONE, bias=ONE)
    targets = w.fused(*forward(w, change))
    assert targets.count(FORWARD) == joined
    assert (aten.rsqrt.default in targets) != joined


def test_what_is_read_before_the_weight_is_weighted_apart() -> None:
    """It is normed by torch's call all the same."""
    w = Written(x=X, weight=ONE, bias=ONE)
    targets = w.fused(*forward(w, "normed read"))
    assert FORWARD in targets
    assert {aten.mul.Tensor, aten.mul_.Tensor} & set(targets)


def backward(w: Written, change: str) -> list[fx.Node]:
    g, x, weight, mean, rstd = (w.nodes[n] for n in ("g", "x", "weight", "mean", "rstd"))

    def shaped(node: fx.Node) -> fx.Node:
        return w.call(aten.reshape.default, node, list(ROW), shape=ROW)

    def times(a: Any, b: Any, shape: tuple[int, ...] = ONE) -> fx.Node:
        return w.call(aten.mul.Tensor, a, b, shape=shape)

    part = 1 / 24 if change == "of a larger batch" else 1 / HERE
    total = w.call(aten.sum.dim_IntList, g, [0, 2], shape=ONE)
    centred = w.call(aten.sub.Tensor, x, shaped(mean), shape=X)
    both = times(g, centred, X)
    dot = w.call(aten.sum.dim_IntList, both, [0, 2], shape=ONE)
    average = shaped(times(total, part))
    squared = times(rstd, weight if change == "another slope" else rstd)
    slope = shaped(times(times(dot, part), squared))
    scale = times(shaped(rstd), 1.0, ROW) if change == "no weight" else shaped(times(rstd, weight))
    other = w.nodes["x"] if change == "another gradient" else g
    grad = w.call(aten.sub.Tensor, other, times(centred, slope, X), shape=X)
    grad = times(w.call(aten.sub.Tensor, grad, average, shape=X), scale, X)
    results = [grad] if change == "frozen" else [grad, total]
    if change not in ("no weight", "frozen"):
        results.append(times(dot, weight if change == "another slope read" else rstd))
    return [*results, *{"centred read": [centred], "sum read twice": [total]}.get(change, [])]


@pytest.mark.parametrize(
    ("change", "joined"),
    [
        ("none", True), ("no weight", True), ("frozen", True), ("sum read twice", True),
        ("of a larger batch", False), ("another slope", False), ("another slope read", False),
        ("another gradient", False), ("centred read", False),
    ],
)  # fmt: skip
def test_pieces_of_the_backward(change: str, joined: bool) -> None:
    w = Written(g=X, x=X, weight=ONE, mean=ONE, rstd=ONE)
    targets = w.fused(*backward(w, change))
    assert targets.count(BACKWARD) == joined
    assert (aten.sum.dim_IntList in targets) != joined


def test_autocast_leaves_pieces_of_two_dtypes() -> None:
    w = Written(x=X, weight=ONE, bias=ONE)
    results = forward(w, "none")
    w.nodes["x"].meta["dtype"] = "bfloat16"
    assert FORWARD not in w.fused(*results)
