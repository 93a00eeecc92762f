"""Where a model flattens tokens before samples, the graph flattens samples before tokens, and computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from in_turns import run_in_turns
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hetspmd.optimize.compiler import plan_for
from hetspmd.program.lengths import lengths_for
from hetspmd.program.micro_batch_check import check_loop
from hetspmd.program.program import Compute
from hetspmd.program.time_split import split_in_time
from hetspmd.rules.theory import Theory, derive
from hetspmd.search import constraints as known
from hetspmd.trace.trace import trace
from hetspmd.verify.comparison import largest_error, verify
from nets import Net
from workbench import cluster, single_device

SAMPLES, TOKENS, WIDTH = 6, 5, 8


def attention(model: Any, x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    y, weights = model.layer(x, x, x, attn_mask=mask, average_attn_weights=False)
    return (y.square().mean() + weights.amax(-1).sum()) / 3


def tokens_first(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.layer(x.transpose(0, 1)).square().mean()


def flat_loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    """A language model's loss, over rows that are flattened with the tokens first."""
    tokens = (x.detach()[:, :, 0] > 0).long().t()
    z = model.layer(model.table(tokens)).reshape(-1, WIDTH)
    return F.cross_entropy(z, tokens.reshape(-1), ignore_index=1, label_smoothing=0.1)


def flat_rows(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Norm, gates, a table and a view that splits features, of flattened rows."""
    rows = model.norm(x.permute(1, 0, 2).reshape(-1, WIDTH))
    a, b = model.layer(rows).chunk(2, -1)
    table = model.table((rows.detach()[:, 0] > 0).long())
    heads = torch.cat([a.sigmoid() * b, table[:, 4:]], -1).view(TOKENS, SAMPLES * 2, WIDTH // 2)
    positions = torch.arange(1.0, TOKENS + 1, dtype=x.dtype)
    return (heads.transpose(0, 1) * positions[:, None]).square().mean()


def in_checkpoints(model: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(model.layer, x.transpose(0, 1), use_reentrant=False).square().mean()


def three_dims(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Samples between two other dims, and behind them."""
    y = x.view(SAMPLES, TOKENS, 2, 4)
    middle = F.linear(y.permute(1, 0, 2, 3).reshape(-1, 4), model.weight).view(TOKENS, SAMPLES, 2, 3)
    last = F.linear(y.permute(2, 1, 0, 3).reshape(-1, 4), model.weight).relu().view(2, TOKENS, SAMPLES, 3)
    return middle.square().mean() + last.mean()


def layer(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, **options)


CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "attention": (attention, {"layer": nn.MultiheadAttention(WIDTH, 2, batch_first=True)}),
    "tokens first": (tokens_first, {"layer": layer()}),
    "norm first": (tokens_first, {"layer": layer(norm_first=True, activation="gelu")}),
    "loss": (flat_loss, {"layer": layer(), "table": nn.Embedding(2, WIDTH)}),
    "rows": (
        flat_rows,
        {"norm": nn.LayerNorm(WIDTH), "layer": nn.Linear(WIDTH, 8), "table": nn.Embedding(2, 8)},
    ),
    "checkpoint": (in_checkpoints, {"layer": layer()}),
    "three dims": (three_dims, {"weight": nn.Parameter(torch.randn(3, 4))}),
    "recurrent": (
        lambda m, x: m.layer(x)[0].square().mean(),
        {"layer": nn.GRU(WIDTH, 6, 2, batch_first=True)},
    ),
}
PARTS = ((0.5, 0.5), (0.5, 0.34, 0.16), (0.0, 0.7, 0.3))


def made(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(3)
    forward, members = CASES[name]
    return Net(forward, **members).double(), torch.randn(SAMPLES, TOKENS, WIDTH, dtype=torch.float64)


def products(theory: Theory) -> list[int]:
    """The matrix products of a step, all of which have activations."""
    return [i.id for i in theory.graph.instructions if i.op in ("aten.mm.default", "aten.addmm.default")]


@pytest.mark.parametrize("name", CASES)
def test_the_step_is_that_of_the_model(name: str) -> None:
    model, x = made(name)
    theory = derive(trace(model, (x,), {}))
    got = single_device(theory, model, [x])
    loss = model(x)
    loss.backward()
    assert got.loss is not None
    want = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert largest_error({**got.gradients, "loss": got.loss}, {**want, "loss": loss.detach()}, 1e-9)[0] < 1e-9


@pytest.mark.parametrize("name", CASES)
def test_micro_batches_divide_the_samples(name: str) -> None:
    model, x = made(name)
    theory = derive(trace(model, (x,), {}))
    loop = split_in_time(theory)
    check_loop(theory, loop)
    assert {loop.phases[i] for i in products(theory)} == {"in"}
    want = single_device(theory, model, [x])
    assert want.loss is not None
    for parts in PARTS:
        got = run_in_turns(theory, loop, lengths_for(theory.axes, parts), model, [x])
        assert got.loss is not None
        error = largest_error(
            {**got.gradients, "loss": got.loss}, {**want.gradients, "loss": want.loss}, 1e-9
        )
        assert error[0] < 1e-9


@pytest.mark.parametrize("name", ["attention", "loss", "rows", "three dims", "recurrent"])
def test_devices_divide_the_samples(name: str) -> None:
    model, x = made(name)
    theory = derive(trace(model, (x,), {}))
    plan = plan_for(theory, cluster(5, 1, 3), known.data_parallel(theory), (0.5, 0.2, 0.3))
    rows = {s.instruction: s.row for s in plan.program.steps if isinstance(s, Compute)}
    for product in products(theory):
        axes = dict(zip(theory.rows[product], theory.row_axes[product], strict=True))
        assert axes[rows[product]] in theory.batch_axes
    verify(model, (x,), cluster(5, 1, 3), plan=plan, tolerance=1e-9, optimizers=("sgd",)).require()


def refused_by_dropout(model: Any, x: torch.Tensor) -> torch.Tensor:
    rows = F.dropout(x.transpose(0, 1).reshape(-1, WIDTH), 0.5)
    return F.linear(rows, model.weight).square().mean()


def refused_as_a_result(model: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = F.linear(x.transpose(0, 1).reshape(-1, WIDTH), model.weight)
    return rows.square().mean(), rows


def refused_by_a_sum_along_the_rows(model: Any, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x.transpose(0, 1).reshape(-1, WIDTH), model.weight).cumsum(0).square().mean()


def refused_by_another_view(model: Any, x: torch.Tensor) -> torch.Tensor:
    rows = F.linear(x.transpose(0, 1).reshape(-1, WIDTH), model.weight)
    return rows.view(SAMPLES, TOKENS, WIDTH).sum(1).square().mean()


@pytest.mark.parametrize(
    "forward",
    [refused_by_dropout, refused_as_a_result, refused_by_a_sum_along_the_rows, refused_by_another_view],
)
def test_where_the_order_matters_it_stays(forward: Callable[..., Any]) -> None:
    torch.manual_seed(3)
    model = Net(forward, weight=nn.Parameter(torch.randn(WIDTH, WIDTH))).double()
    x = torch.randn(SAMPLES, TOKENS, WIDTH, dtype=torch.float64)
    theory = derive(trace(model, (x,), {}))
    assert not any("samples first" in t.name for t in theory.graph.tensors)
    got, loss = single_device(theory, model, [x]).loss, model(x)
    assert got is not None
    if forward is not refused_by_dropout:
        torch.testing.assert_close(got, (loss if isinstance(loss, torch.Tensor) else loss[0]).detach())


def test_a_free_view_takes_the_place_of_a_transposed_copy() -> None:
    model, x = made("attention")
    graph = trace(model, (x,), {})
    (given,) = graph.inputs
    readers = [graph.instructions[i] for i in graph.consumers[given.tensor]]
    assert [i.op for i in readers] == ["aten._unsafe_view.default"]
