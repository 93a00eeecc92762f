"""With a GPU: what a step costs beside eager PyTorch, NCCL with one rank, several ranks on one GPU over gloo.

The last test runs the same worker on CPUs.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import pytest
import torch
from gpu_worker import single, worker
from torch import multiprocessing

import local
from hetspmd.dist.communicator import LoneCommunicator
from hetspmd.profile.session import Session
from hetspmd.profile.step_runs import StepRunner
from hetspmd.profile.whole_steps import measure_curves, step_case
from trust.models import build

SIZES = {
    "BERT": {"batch": 32, "tokens": 128, "layers": 12, "width": 768},
    "GPT-2": {"batch": 8, "tokens": 512, "layers": 12, "width": 768},
    "ViT": {"batch": 64, "layers": 12, "width": 768},
}


@pytest.mark.gpu
@pytest.mark.filterwarnings("default::UserWarning")  # of torch.compile, about this machine's features
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("name", SIZES)
def test_one_gpu_costs_what_torch_costs(name: str, compile: bool) -> None:
    eager, hap = local.seconds(name, 40, compile=compile, device="cuda", dtype=torch.bfloat16, **SIZES[name])
    assert statistics.median(h / e for e, h in zip(eager, hap, strict=True)) <= 1.03


@pytest.mark.gpu
def test_nccl_with_one_rank(tmp_path: Path) -> None:
    multiprocessing.spawn(worker, (1, "nccl", "cuda:0", str(tmp_path)), nprocs=1)


@pytest.mark.gpu
def test_ranks_on_one_gpu_over_gloo(tmp_path: Path) -> None:
    compare(tmp_path, "cuda:0")


@pytest.mark.slow
def test_the_worker_on_cpus(tmp_path: Path) -> None:
    compare(tmp_path, "cpu")


def compare(folder: Path, device: str) -> None:
    multiprocessing.spawn(worker, (3, "gloo", device, str(folder)), nprocs=3)
    want = single()
    for rank in range(3):
        found = torch.load(folder / f"{rank}.pt")
        assert len(found) == len(want) == 6
        for got, of in zip(found, want, strict=True):
            assert got == pytest.approx(of, rel=1e-4)


@pytest.mark.gpu
def test_whole_steps_end_where_memory_does() -> None:
    """On a GPU that is held to some bytes: the limit, and a device that is as before."""
    model, batch = build("BERT", batch=4, tokens=64, layers=2, width=256)
    case = step_case("bert", model, batch)
    device, memory = torch.device("cuda", 0), 2**30
    before = torch.cuda.memory_allocated(device)
    runner = StepRunner(case, device, memory, "adamw", 0.1)
    session = Session(LoneCommunicator(), device, start=time.perf_counter())
    (curve,) = measure_curves(session, [(0,)], [memory], runner.run, 60.0)
    assert curve.over is not None
    assert all(p.peak <= memory for p in curve.points)
    assert torch.cuda.memory_allocated(device) == before
    assert runner.run(1, 0.0).point is not None
