"""``hetspmd compile --problem`` and ``hetspmd solve`` agree, and refuse what is no problem."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetspmd.cli.main import main

TARGET = Path(__file__).parent / "targets.py"
CLUSTER = Path(__file__).parent.parent.parent / "examples/clusters/four-unlike.yaml"


def test_a_problem_file_is_solved_to_the_plan_s_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problem, plan, solution = tmp_path / "problem.json", tmp_path / "plan.json", tmp_path / "solution.json"
    arguments = ["compile", str(TARGET), "--cluster", str(CLUSTER)]
    assert main([*arguments, "--problem", str(problem), "--json", str(plan)]) == 0
    assert main(["solve", str(problem), "--json", str(solution), "--progress"]) == 0
    found = json.loads(solution.read_text())
    assert found["stop_reason"] == "optimal"
    assert found["cost"] == found["lower_bound"]
    assert found["cost"] / 1e12 <= json.loads(plan.read_text())["search"]["cost"] * (1 + 1e-9)
    assert "lower bound" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "{}", "[1, 2]", '{"version": 7}'])
def test_bad_problem_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text(text)
    assert main(["solve", str(bad)]) == 2
    assert "is no problem file" in capsys.readouterr().err
    assert main(["solve", str(tmp_path / "missing.json")]) == 2
