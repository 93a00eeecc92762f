"""The plan is the same byte for byte in every process, whatever the hash seed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hetspmd.optimize.compiler import compile

PROGRAM = """
import sys, warnings
import torch
torch.set_num_threads(1)
sys.path[:0] = [{tests!r}, {run!r}]
from small_models import MLP, Attention, ConvNet
import zoo
from workbench import cluster
from hetspmd.optimize.compiler import compile
labels = torch.zeros(9, dtype=torch.long)
ids = torch.zeros(4, 5, dtype=torch.long)
entries = [(MLP(), {{"x": torch.randn(9, 6), "labels": labels}}, None),
           (ConvNet(), {{"image": torch.randn(5, 3, 6, 6), "labels": labels[:5]}}, None),
           (Attention(), {{"ids": ids, "labels": ids}}, None),
           zoo.build("gpt2")]
for model, example, loss in entries:
    plan = compile(model, example, cluster(4, 2, 1, 1), loss=loss)
    sys.stdout.write(plan.to_json() + "\\n" + str(plan.graph) + "\\n" + plan.digest + "\\n")
"""


def plans(hash_seed: str) -> str:
    tests = Path(__file__).parent
    code = PROGRAM.format(tests=str(tests), run=str(tests / "run"))
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_plans_do_not_depend_on_the_hash_seed() -> None:
    first = plans("1")
    assert len(first) > 100_000
    assert plans("4242") == first


@pytest.mark.parametrize(
    ("one", "other"), [("MLP", "ConvNet"), pytest.param("llama", "vit", marks=pytest.mark.slow)]
)
def test_plans_do_not_depend_on_what_was_compiled_before(one: str, other: str) -> None:
    import workbench

    def made(name: str) -> tuple[nn.Module, Any]:
        import small_models

        labels = torch.zeros(9, dtype=torch.long)
        if name == "MLP":
            return small_models.MLP(), {"x": torch.randn(9, 6), "labels": labels}
        if name == "ConvNet":
            return small_models.ConvNet(), {"image": torch.randn(5, 3, 6, 6), "labels": labels[:5]}
        entry = workbench.traced(name)
        return entry.model, entry.example

    first = compile(*made(one), workbench.cluster(2, 1)).to_json()
    compile(*made(other), workbench.cluster(4, 2, 1))
    assert compile(*made(one), workbench.cluster(2, 1)).to_json() == first
