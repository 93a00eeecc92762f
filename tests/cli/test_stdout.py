"""What is asked for as JSON on standard output comes alone, whoever else writes there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

NOISY = """\
import ctypes, os
from torch import nn
import torch

def build():
    print("printed by the target")
    os.write(1, b"written to the descriptor\\n")
    ctypes.CDLL(None).printf(b"printed by compiled code\\n")
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return Loss(model), {"x": torch.randn(12, 8)}

class Loss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).square().mean()
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["compile", "verify"])
def test_json_alone(name: str, cluster: Path, tmp_path: Path) -> None:
    target = tmp_path / "noisy.py"
    target.write_text(NOISY)
    command = [
        sys.executable,
        "-m",
        "hetspmd.cli.main",
        name,
        str(target),
        "--cluster",
        str(cluster),
        "--json",
        "-",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    for text in ("printed by the target", "written to the descriptor", "printed by compiled code"):
        assert text in done.stderr


def test_in_the_same_process(command, cluster, targets) -> None:
    outcome = command("compile", targets, "--cluster", cluster, "--json", "-")
    assert outcome.status == 0
    assert json.loads(outcome.out)["graph"]
    outcome = command("compile", targets, "--cluster", cluster, "--json", "-", "--constraints", "/no/such")
    assert outcome.status == 2
    assert outcome.out == ""


def test_a_solver_that_logs_nowhere(capfd: pytest.CaptureFixture[str]) -> None:
    import numpy as np

    from hetspmd.search.highs import quiet_highs

    for options in ({}, {"solver": "ipm"}, {"threads": 1, "random_seed": 0, "solver": "simplex"}):
        solver = quiet_highs(**options)
        solver.addVars(2, np.zeros(2), np.ones(2))
        solver.changeColCost(0, -1.0)
        solver.run()
        assert solver.getSolution().col_value[0] == pytest.approx(1.0)
    assert capfd.readouterr() == ("", "")
