"""HAP with activations that are computed again: the training loop of a user, equal to one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from evaluations import ask, evaluated
from small_plans import cluster
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hetspmd
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import OptionError, PlanMismatchError
from hetspmd.placement import shard
from hetspmd.plan.plan import Plan
from hetspmd.run.module import HAP
from recomputing import Blocks, batch

DEVICES = cluster(4, 2, 1)
pytestmark = pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad:UserWarning"
)  # evaluated
OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


class Checkpointed(Blocks):
    """The blocks under the user's own checkpoints, one of them reentrant."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        for index, block in enumerate(self.h):
            h = checkpoint(block, h, use_reentrant=index == 1)
        return F.cross_entropy(self.head(h), labels)


def trained(kind: str) -> Any:
    """What steps of batches of two sizes leave, an evaluation between them."""

    def body(run: Any) -> list[torch.Tensor]:
        optimizer = OPTIMIZERS[kind](run.parameters(), lr=1e-2)
        results: list[torch.Tensor] = []
        for step, rows in enumerate((6, 6, 3, 6)):
            optimizer.zero_grad()
            loss = run(**batch(rows, step))
            (2 * loss).backward()
            results.append(loss.detach())
            optimizer.step()
            if step == 1:
                results += evaluated(run, batch(5, 7))
        full = run.full_state_dict() if isinstance(run, HAP) else run.state_dict()
        return results + [full[name].clone() for name in sorted(full)]

    return body


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(
    ("model", "options"),
    [
        (Blocks, {"recompute": "all"}),
        (Blocks, {"recompute": "h.*", "micro_batches": 2}),
        (Blocks, {"recompute": ["h.1"], "micro_batches": 3}),
        (Checkpointed, {}),
        (Checkpointed, {"recompute": "none"}),
        (Checkpointed, {"micro_batches": 2}),
    ],
)
def test_a_training_loop(model: type[Blocks], options: dict[str, Any], kind: str) -> None:
    asked = ask(model(), trained(kind), cluster=DEVICES, example=batch(), **options)
    assert asked.error() < 1e-9
    training = [plan for plan in asked.plans if plan.program.gradients]
    assert len(training) >= 2, "of two sizes"
    wanted = {"none": 0, "all": 3, "h.*": 3}.get(
        str(options.get("recompute")), 1 if "recompute" in options else 3
    )
    assert all(len(plan.graph.recomputed) == wanted for plan in training)


@pytest.mark.parametrize("dim", [0, 1])
def test_parameters_in_shards(dim: int) -> None:
    forms = {
        f"h.{i}.{name}.weight": shard(dim if name == "up" else 1 - dim)
        for i in range(3)
        for name in ("up", "down")
    }
    asked = ask(
        Blocks(), trained("adamw"), cluster=DEVICES, example=batch(), recompute="all", constraints=forms
    )
    assert asked.error() < 1e-9


def test_running_statistics_are_updated_once() -> None:
    """Of a block that is computed again; the user's own region updates them twice, as on one device."""
    asked = ask(Blocks(statistics=True), trained("sgd"), cluster=DEVICES, example=batch(), recompute="h.*")
    assert asked.error() < 1e-9


def test_dropout_is_that_of_one_device() -> None:
    for options in ({"recompute": "all"}, {"recompute": "all", "micro_batches": 3}):
        report = hetspmd.verify(Blocks(dropout=0.4), batch(), DEVICES, **options)  # type: ignore[arg-type]  # two types
        report.require()
        assert report.random


def on_ranks(body: Any, **options: Any) -> list[Any]:
    torch.manual_seed(5)  # from which ranks take theirs
    models = [Blocks(dropout=0.5) for _ in range(DEVICES.ranks)]

    def rank(communicator: Any) -> Any:
        hap = HAP(models[communicator.rank], DEVICES, process_group=communicator, example=batch(), **options)
        return body(hap)

    return run_ranks(DEVICES.ranks, rank)


def test_two_forwards_before_their_backwards() -> None:
    """Each backward reads the masks of its own forward: gradients are those of the two, one after the other."""

    def gradients(hap: HAP, *, apart: bool) -> dict[str, torch.Tensor]:
        losses = []
        for seed in (0, 1):
            losses.append(hap(**batch(6, seed)))
            if apart:
                losses.pop().backward()
        for loss in losses:
            loss.backward()
        return hap.full_gradients()

    together = on_ranks(lambda hap: gradients(hap, apart=False), recompute="all")
    apart = on_ranks(lambda hap: gradients(hap, apart=True), recompute="all")
    for name, value in apart[0].items():
        torch.testing.assert_close(together[0][name], value, rtol=1e-9, atol=1e-12)


def test_a_plan_file_says_what_is_computed_again(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    hetspmd.compile(Blocks(), batch(), DEVICES, recompute="h.*").save(path)
    plan = Plan.load(path)
    assert [block.block for block in plan.graph.recomputed] == ["h.0", "h.1", "h.2"]
    asked = ask(Blocks(), trained("sgd"), cluster=DEVICES, plan=plan)
    assert asked.error() < 1e-9

    def given(communicator: Any) -> Any:
        return HAP(Blocks(), DEVICES, plan=path, recompute="none", process_group=communicator)

    with pytest.raises(OptionError, match="recompute='none' with a plan, which says what is computed again"):
        run_ranks(DEVICES.ranks, given)


def test_a_plan_of_another_model_is_refused() -> None:
    plan = hetspmd.compile(Blocks(), batch(), DEVICES, recompute="h.*")

    class Other(Blocks):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return super().forward(2 * x, labels)

    with pytest.raises(PlanMismatchError):
        ask(Other(), trained("sgd"), cluster=DEVICES, plan=plan)


def test_machines_of_several_accelerators() -> None:
    entries = [
        {"name": "a", "accelerators": 2, "flops": 2e6, "inside": {"bandwidth": "40GB/s", "latency": "1us"}},
        {"name": "b", "flops": 1e6},
    ]
    machines = {"devices": entries, "network": {"bandwidth": "1TB/s", "latency": "1ns"}}
    report = hetspmd.verify(Blocks(dropout=0.3), batch(), machines, machines="virtual", recompute="all")
    report.require()


def test_segments_with_ratios_of_their_own() -> None:
    report = hetspmd.verify(Blocks(dropout=0.3), batch(), DEVICES, segments=2, recompute="all")
    report.require()


def test_under_bfloat16_autocast() -> None:
    """Casts of parameters are made again for the copies: with autocast, losses stay those of one device."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.h = Blocks().float().h

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.h:
                x = block(x)
            return x.square().mean()

    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plan = hetspmd.compile(Net(), (x,), DEVICES, recompute="all")
        wanted = Net()(x).item()
    assert plan.graph.recomputed

    models = [Net() for _ in range(DEVICES.ranks)]  # threads would draw from one generator

    def loss(communicator: Any) -> float:
        hap = HAP(models[communicator.rank], DEVICES, plan=plan, process_group=communicator)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = hap(x)
        found.backward()
        return float(found.detach())

    assert run_ranks(DEVICES.ranks, loss) == pytest.approx([wanted] * 3, rel=2e-2)


@pytest.mark.parametrize(
    ("model", "options", "itself"),
    [
        (Blocks, {"recompute": "all"}, False),
        (Checkpointed, {}, True),
        (Checkpointed, {"recompute": "all"}, True),
    ],
)
def test_one_device(model: type[Blocks], options: dict[str, Any], itself: bool) -> None:
    """The model itself runs only where its own regions are all that is computed again."""
    asked = ask(model(), trained("adamw"), cluster=cluster(1), example=batch(), **options)
    assert asked.error() < 1e-9

    def runs(communicator: Any) -> bool:
        hap = HAP(model(), cluster(1), process_group=communicator, example=batch(), **options)
        return hap._plans.entries[0].model

    assert run_ranks(1, runs) == [itself]
