"""HAP(..., cuda_graphs=...) over gloo, across machines, with loaders of own rows, and for real models."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from captures import both, compared, equal
from captures_worker import worker
from loader_cases import TRAININGS, WORLD, Rows, loss_of
from machine_plans import machine_plan
from ranks import own_gradient
from small_models import case
from small_plans import cluster
from torch import nn

import hetspmd
import zoo
from hetspmd.dist.random import Randomness
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import HetspmdError
from hetspmd.run.module import HAP
from hetspmd.run.simulated_capture import SimulatedCapturer
from processes import spawn

CPU = torch.device("cpu")


@pytest.mark.slow
def test_processes_over_gloo(tmp_path: Path) -> None:
    spawn(worker, (3, str(tmp_path)), nprocs=3)
    for rank in range(3):
        counts: list[dict[str, int]] = torch.load(tmp_path / f"{rank}.pt")
        assert counts
        assert all(set(steps) == {""} for steps in counts)


@pytest.mark.slow
@pytest.mark.parametrize(("accelerators", "seed"), [((2, 1), 2), ((1, 2), 1), ((2, 2), 3)])
@pytest.mark.parametrize("name", ["mlp", "conv", "attention"])
def test_machines(name: str, accelerators: tuple[int, ...], seed: int) -> None:
    c = case(name, **({"dropout": 0.0} if name == "attention" else {}))
    reports = compared(c, machine_plan(c, accelerators, seed))
    assert all("4 steps by captures" in report for report in reports)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAININGS)
def test_own_rows(name: str) -> None:
    training = TRAININGS[name]()

    def body(communicator: Any, asked: Any) -> Any:
        hap = training.hap(communicator, cuda_graphs=asked)
        hap.use_randomness(Randomness(1, hap.rank, CPU))
        optimizer = torch.optim.AdamW(hap.parameters(), lr=0.01, eps=1e-4)
        loader = hetspmd.loader(
            Rows(**training.rows.columns), hap, batch_size=training.batch_size, shuffle=True, seed=5
        )
        found = []
        for _ in range(3):
            for batch in loader:
                optimizer.zero_grad()
                loss = loss_of(hap(**batch))
                loss.backward()
                found.append([loss.detach().clone(), *(own_gradient(p) for p in hap.parameters())])
                optimizer.step()
        return found, hap.full_tensors()

    got = run_ranks(WORLD, lambda communicator: body(communicator, SimulatedCapturer()))
    equal(got, run_ranks(WORLD, lambda communicator: body(communicator, False)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", zoo.ZOO)
def test_real_models(name: str) -> None:
    """Every stretch of their steps is captured."""
    found = []
    for asked in (False, SimulatedCapturer()):
        model, example, loss = zoo.build(name)
        try:
            hap = HAP(model, cluster(1), example=example, cuda_graphs=asked, loss=loss)
        except HetspmdError as error:
            if asked:
                raise
            pytest.skip(f"refused without captures, too: {error}")
        hap.use_randomness(Randomness(1, 0, CPU))
        hap.run_lowered()
        optimizer, mine = torch.optim.SGD(hap.parameters(), lr=0.01), []
        for _ in range(3):
            optimizer.zero_grad()
            output = hap(**example) if isinstance(example, dict) else hap(*example)
            value = output if isinstance(output, torch.Tensor) else loss_of(output)
            value.backward()
            mine.append([value.detach().clone(), *(p.grad for p in hap.parameters())])
            optimizer.step()
        found.append(mine)
        if asked:
            (report,) = hap.cuda_graphs_report().plans
            assert report.captured == report.stretches > 0
            assert report.refused == ()
            assert report.steps == {"": 3}
    equal(*found)


@pytest.mark.slow
def test_activations_that_are_computed_again() -> None:
    """Random ones, too."""
    c = case("attention")
    both(c, plan=hetspmd.compile(copy.deepcopy(c.model), c.batch, cluster(1), recompute="all"))


class Warm(nn.Module):
    """Its number changes between steps, which makes it an input of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.temperature = nn.Linear(4, 4), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) / self.temperature).softmax(-1).square().sum()


@pytest.mark.slow
def test_a_number_that_changes() -> None:
    torch.manual_seed(0)
    model, x = Warm().double(), torch.randn(5, 4, dtype=torch.float64)
    found, steps = [], 0
    for asked in (SimulatedCapturer(), False):
        hap = HAP(copy.deepcopy(model), cluster(1), example=(x,), cuda_graphs=asked)
        hap.run_lowered()
        optimizer, losses = torch.optim.SGD(hap.parameters(), lr=0.1), []
        for number in range(8):
            hap.module.temperature = 1.0 + number // 2
            optimizer.zero_grad()
            losses.append(hap(x))
            losses[-1].backward()
            optimizer.step()
        found.append([loss.detach() for loss in losses])
        steps += sum(plan.steps[""] for plan in hap.cuda_graphs_report().plans)
    equal(*found)
    assert steps == 8


@pytest.mark.slow
@pytest.mark.parametrize("point", ["BERT, dropout", "BERT, micro-batches"])
def test_the_script_for_a_gpu_on_a_cpu(point: str) -> None:
    script = Path(__file__).parents[2] / "scripts" / "gpu" / "cuda_graphs.py"
    options = [point, "--device", "cpu", "--small", "--rounds", "1"]
    ran = subprocess.run([sys.executable, str(script), *options], capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [line["what"] for line in lines] == [
        "machine", "check", "eager", "without graphs", "with graphs", "end",
    ], ran.stderr  # fmt: skip
    assert ran.returncode == 0
    assert lines[1]["ok"]
    assert lines[1]["exact"]
