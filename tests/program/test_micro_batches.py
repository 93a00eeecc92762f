"""A step in micro-batches computes what the whole batch computes, and what cannot be split is named."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from in_turns import run_in_turns
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import zoo
from hetspmd.errors import MicroBatchError, ProofError
from hetspmd.program.lengths import lengths_for
from hetspmd.program.micro_batch_check import check_loop
from hetspmd.program.program import Result
from hetspmd.program.time_split import Loop, split_in_time
from hetspmd.rules.nested import runs_whole
from hetspmd.rules.theory import Theory, derive
from hetspmd.trace.trace import split_example, trace
from hetspmd.verify.comparison import largest_error
from hetspmd.verify.reference import ReferenceResult
from workbench import Traced, single_device, traced

TURNS = ((1.0,), (0.5, 0.5), (0.5, 0.34, 0.16), (0.0, 0.7, 0.3), (1 / 3, 1 / 3, 1 / 3))
"""The part of the samples of each micro-batch: one of all, even ones, uneven ones, and an empty one."""

BATCH_NORM = "needs div of the whole batch .*known only when all micro-batches have run"
UNSPLIT = {
    **dict.fromkeys(
        (
            "resnet50", "mobilenet-v2", "segformer", "efficientnet-b0", "densenet121", "shufflenet", "regnet",
            "mnasnet", "googlenet",
        ),
        BATCH_NORM,
    ),
    "clip": "mm.default in the model needs div_1 of the whole batch",
    "dlrm": "_embedding_bag_backward.default in tables.2 has no triple along the samples",
}  # fmt: skip
"""Models of the zoo that cannot be split exactly, and what the error says."""

QUICK = {"bert", "gpt2", "llama", "vit", "unet"}


def inputs_of(theory: Theory, example: Any) -> list[torch.Tensor]:
    """The batch's tensors in the graph's order."""
    leaves = pytree.tree_leaves(split_example(example))
    return [leaves[i.leaf] for i in theory.graph.inputs]


def flat(result: ReferenceResult) -> dict[str, torch.Tensor]:
    values = {f"output {t}": value for t, value in result.outputs.items()}
    if result.loss is not None:
        values["loss"] = result.loss
    for kind, of in (
        ("gradient", result.gradients),
        ("buffer", result.buffers),
        ("parameter", result.parameters),
    ):
        values |= {f"{kind} {name}": value for name, value in of.items()}
    return values


def error(
    theory: Theory, loop: Loop, model: nn.Module, inputs: Sequence[torch.Tensor], parts: Sequence[float]
) -> float:
    want = flat(single_device(theory, model, inputs))
    turns = lengths_for(theory.axes, parts)
    got = flat(run_in_turns(theory, loop, turns, model, inputs))
    assert {n: t.dtype for n, t in got.items()} == {n: t.dtype for n, t in want.items()}
    peak = {"peak": max(t.abs().max() for t in want.values())}  # the scale of the step's noise
    return largest_error({**got, **peak}, {**want, **peak}, 1e-9)[0]


def tokens_of(t: Traced) -> list[torch.Tensor]:
    return inputs_of(t.theory, t.example)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in zoo.ZOO]
)
def test_models_of_the_zoo(name: str) -> None:
    t = traced(name)
    if name in UNSPLIT:
        with pytest.raises(MicroBatchError, match=UNSPLIT[name]):
            split_in_time(t.theory)
        return
    loop = split_in_time(t.theory)
    check_loop(t.theory, loop)
    float32 = any(tensor.dtype == "float32" for tensor in t.theory.graph.tensors)  # losses of some models
    for parts in TURNS:
        assert error(t.theory, loop, t.model, tokens_of(t), parts) < (1e-6 if float32 else 1e-9)


class Model(nn.Module):
    """Two layers and a loss that a case gives."""

    def __init__(self, loss: Any, dropout: float = 0.0, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 4)
        self.norm = norm or nn.LayerNorm(8)
        self.dropout, self.loss = dropout, loss

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        h = F.dropout(self.norm(self.first(x)).tanh(), self.dropout, self.training)
        return self.loss(self.last(h), y)


class Features(nn.LayerNorm):
    """Drops whole features of a sample."""

    def __init__(self) -> None:
        super().__init__(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout1d(super().forward(x).unsqueeze(-1), 0.3, self.training).squeeze(-1)


def weighted(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(z, y, weight=torch.arange(1.0, 5, dtype=z.dtype), ignore_index=2)


def smoothed(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(z, y, label_smoothing=0.1, ignore_index=0)


def masked(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    counts = (y > 0).to(z.dtype)
    return ((z - 1).square().mean(-1) * counts).sum() / counts.sum().clamp(min=1)


def several(z: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return z.square().mean() + F.nll_loss(z.log_softmax(-1), y, reduction="sum"), {"z": z, "worst": z.sum()}


def after_a_root(z: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return F.mse_loss(z, torch.ones_like(z)), z.detach().square().sum().sqrt()


def penalised(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The critic of a Wasserstein GAN, with the seed of a gradient that is computed inside."""
    x = z.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(x.tanh().square().sum(), x, create_graph=True)
    return z.mean() + (gradient.norm(dim=1) * z[:, 0] - 1).square().mean()


LOSSES = (
    F.cross_entropy, weighted, smoothed, masked, several, after_a_root, penalised,
    lambda z, y: z.mean(), lambda z, y: (z * torch.arange(len(z))[:, None]).sum(),  # gradients of no input
    lambda z, y: F.binary_cross_entropy_with_logits(z, F.one_hot(y, 4).to(z.dtype)),
    lambda z, y: F.smooth_l1_loss(z, z.detach().flip(1), beta=0.5) + z.abs().sum() / len(y),
)  # fmt: skip


def small(loss: Any, *, rows: int = 7, **options: Any) -> tuple[nn.Module, Theory, list[torch.Tensor]]:
    torch.manual_seed(1)
    model = Model(loss, **options).double()
    batch = torch.randn(rows, 5, dtype=torch.float64), torch.randint(0, 4, (rows,))
    return model, derive(trace(model, batch, {})), [*batch]


@pytest.mark.parametrize("number", range(len(LOSSES)))
def test_losses_divide_by_what_counts_in_the_whole_batch(number: int) -> None:
    model, theory, batch = small(LOSSES[number])
    loop = split_in_time(theory)
    check_loop(theory, loop)
    for parts in TURNS:
        assert error(theory, loop, model, batch, parts) < 1e-12


def test_what_is_left_of_a_sum_runs_after_the_loop() -> None:
    _, theory, _ = small(after_a_root)
    loop = split_in_time(theory)
    ops = [i.op for i, phase in zip(theory.graph.instructions, loop.phases, strict=True) if phase == "after"]
    assert "aten.sqrt.default" in ops


def test_a_micro_batch_draws_what_the_whole_batch_draws_in_its_rows() -> None:
    model, theory, batch = small(F.cross_entropy, dropout=0.5, norm=Features())
    loop = split_in_time(theory)
    assert any(rule.random for rule in theory.rules.values())
    for parts in TURNS:
        assert error(theory, loop, model, batch, parts) < 1e-12


class ClassSums(nn.Module):
    """Its buffers add up what the samples of each class have."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 3)
        self.register_buffer("sums", torch.ones(4, 3))
        self.register_buffer("counts", torch.ones(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = self.first(x)
        loss = (z - (self.sums / self.counts[:, None])[y]).square().mean()
        with torch.no_grad():
            self.sums = self.sums.index_add(0, y, z)
            self.counts = self.counts.index_add(0, y, torch.ones_like(x[:, 0]))
        return loss


class Attention(nn.Module):
    """Positions and the mask, which have no rows of the batch, are inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position, self.first = nn.Embedding(9, 4), nn.Embedding(5, 4), nn.Linear(4, 12)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h = self.first(self.embed(ids) + self.position(positions))
        q, k, v = h.view(*ids.shape, 3, 2, 2).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        return F.cross_entropy((h @ self.embed.weight.T).flatten(0, 1), ids.flatten(), ignore_index=0)


def whole_models() -> list[tuple[nn.Module, tuple[torch.Tensor, ...]]]:
    torch.manual_seed(1)
    ids = torch.randint(0, 9, (7, 5))
    return [
        (ClassSums(), (torch.randn(7, 5, dtype=torch.float64), torch.randint(0, 4, (7,)))),
        (Attention(), (ids, torch.arange(5), torch.ones(5, 5).tril().bool())),
        (Attention(), (ids[:3], torch.arange(5), torch.ones(5, 5).tril().bool())),
    ]


@pytest.mark.parametrize("number", range(3))
def test_buffers_that_add_up_and_inputs_without_samples(number: int) -> None:
    model, batch = whole_models()[number]
    theory = derive(trace(model.double(), batch, {}))
    loop = split_in_time(theory)
    check_loop(theory, loop)
    assert len(batch[0]) in {theory.axes.axes[axis].units for axis in loop.axes}
    for parts in TURNS:
        assert error(theory, loop, model, [*batch], parts) < 1e-12


def test_batch_norm_in_evaluation_is_split() -> None:
    torch.manual_seed(1)
    model = Model(F.cross_entropy, norm=nn.BatchNorm1d(8)).double().eval()
    batch = torch.randn(7, 5, dtype=torch.float64), torch.randint(0, 4, (7,))
    theory = derive(trace(model, batch, {}))
    for parts in TURNS:
        assert error(theory, split_in_time(theory), model, [*batch], parts) < 1e-12


def contrastive(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(z @ z.T, torch.arange(len(y)))


def over_the_batch(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return z.cumsum(0).square().mean()


def largest(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return z.max()


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        (
            F.cross_entropy,
            {"norm": nn.BatchNorm1d(8)},
            r"in norm needs div of the whole batch \(.* in norm\)",
        ),
        (contrastive, {}, "aten.mm.default in the model needs .* of the whole batch"),
        (over_the_batch, {}, "aten.cumsum.default in the model has no triple along the samples"),
        (largest, {}, "in the model has no triple along the samples"),
        (
            lambda z, y: (z.mean() - z).square().mean(),
            {},
            "aten.sub.Tensor in the model needs div of the whole",
        ),
    ],
)
def test_what_needs_the_whole_batch_is_named(loss: Any, options: dict[str, Any], message: str) -> None:
    _, theory, _ = small(loss, **options)
    with pytest.raises(MicroBatchError, match=f"{message}.*use one micro-batch"):
        split_in_time(theory)


def mutated(theory: Theory, loop: Loop, draw: random.Random) -> Loop:
    """The loop with one thing changed: a phase, a triple, or what leaves it."""
    kind = draw.randrange(5)
    instruction = draw.randrange(len(loop.phases))
    if kind == 0:
        others = [p for p in ("before", "in", "after") if p != loop.phases[instruction]]
        return replace(loop, phases=_with(loop.phases, instruction, draw.choice(others)))
    if kind == 1:
        others = [row for row in theory.rows[instruction] if row != loop.rows[instruction]]
        return replace(loop, rows=_with(loop.rows, instruction, draw.choice(others))) if others else loop
    if kind == 4:
        whole = next(row for row in theory.rows[instruction] if runs_whole(row))
        phases = _with(loop.phases, instruction, draw.choice(("before", "after")))
        return replace(loop, phases=phases, rows=_with(loop.rows, instruction, whole))
    position = draw.randrange(len(loop.leaving))
    if kind == 2:
        return replace(loop, leaving=(*loop.leaving[:position], *loop.leaving[position + 1 :]))
    result = loop.leaving[position]
    form = draw.choice([f for f in (0, 1, 2, 3) if f != result.form])
    return replace(loop, leaving=_with(loop.leaving, position, Result(result.tensor, form)))


def _with(values: tuple[Any, ...], position: int, value: Any) -> tuple[Any, ...]:
    return (*values[:position], value, *values[position + 1 :])


def test_a_changed_loop_is_refused_or_equal() -> None:
    draw, refused, equal = random.Random(3), 0, 0
    cases = [small(loss) for loss in LOSSES[:5]]
    for _ in range(800):
        model, theory, batch = draw.choice(cases)
        changed = mutated(theory, loop := split_in_time(theory), draw)
        if changed == loop:
            continue
        try:
            check_loop(theory, changed)
        except ProofError:
            refused += 1
            continue
        equal += 1
        assert error(theory, changed, model, batch, (0.5, 0.34, 0.16)) < 1e-12
    assert refused > 150
    assert equal
