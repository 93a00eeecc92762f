"""The survey of foreign models: its runner calls each outcome by its name."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from foreign import report
from foreign.judge import BROKEN, CRASHED, EQUAL, HUNG, REFUSED, WRONG, Outcome, judge
from foreign.registry import Case, Sample
from foreign.run import Run
from foreign.runner import run


def one_step(run: Run, sample: Sample) -> dict[str, Any]:
    """A step, and the state after it."""
    wrapped = run.wrap(sample.model, sample.batches[0], loss=sample.loss)
    loss = wrapped(*sample.batches[0])
    loss.backward()
    with torch.no_grad():
        for p in wrapped.parameters():
            p.sub_(0.1 * p.grad)
    return {"losses": [loss.detach().clone()], "state": run.state(wrapped)}


def small(model: nn.Module | None = None, **facts: Any) -> Sample:
    network = model or nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    return Sample(network, [(torch.randn(8, 6),)], lambda m, x: m(x).square().mean(), **facts)


class Data(nn.Module):
    """A number of the batch decides what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x) * (2.0 if x.sum() > 0 else 3.0)
        return out


def other_on_ranks(run: Run, sample: Sample) -> dict[str, Any]:
    """A loop that on ranks does something else."""
    found = one_step(run, sample)
    if not run.alone:
        found["losses"][0] += 1e-6
    return found


def wrong_on_one_rank(run: Run, sample: Sample) -> dict[str, Any]:
    """An error of Python's on ranks alone."""
    if not run.alone:
        raise KeyError("lost")
    return one_step(run, sample)


def broken(run: Run, sample: Sample) -> dict[str, Any]:
    raise ValueError("one device cannot run it either")


def case(name: str, play: Any = one_step, make: Any = small) -> Case:
    return Case(name, "torch", "loop", make, play)


def test_equal_refused_wrong_crashed_and_broken() -> None:
    found = {
        c.name: judge(c)
        for c in (
            case("equal"), case("refused", make=lambda: small(Data())), case("wrong", other_on_ranks),
            case("crashed", wrong_on_one_rank), case("broken", broken),
        )
    }  # fmt: skip
    assert {n: o.outcome for n, o in found.items()} == {
        "equal": EQUAL, "refused": REFUSED, "wrong": WRONG, "crashed": CRASHED, "broken": BROKEN
    }  # fmt: skip
    assert found["equal"].divided is not None
    assert found["equal"].divided > 0.5
    assert found["refused"].detail.startswith("TraceError: ")
    assert "test_foreign_survey.py" in found["refused"].detail
    assert "losses.0 is off by" in found["wrong"].detail
    assert found["crashed"].detail == "KeyError: 'lost'"


def test_a_process_that_sleeps_is_hung_and_one_that_dies_has_crashed(tmp_path: Path) -> None:
    def dies(case: Case) -> Outcome:
        if case.name == "sleeps":
            time.sleep(60)
        raise SystemExit(3)

    found = list(run([case("sleeps"), case("dies")], timeout=1.0, jobs=2, logs=tmp_path, by=dies))
    assert {o.name: o.outcome for o in found} == {"sleeps": HUNG, "dies": CRASHED}
    assert {o.name: o.detail for o in found}["dies"] == "the process ended with status 3"


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, "/data/packages/"])
    page = tmp_path / "page.md"
    page.write_text("Before\n<!-- results -->\nold\n<!-- end of results -->\nafter\n", encoding="utf-8")
    outcomes = [
        Outcome("a", "torch", "model", EQUAL, divided=0.5),
        Outcome("b", "torch", "model", REFUSED, "TraceError: at /home/x/site-packages/m/n.py:3: a | b"),
        Outcome("c", "torch", "loop", WRONG, "losses.0 is off"),
        Outcome("d", "torch", "loop", REFUSED, "TraceError: at /data/packages/m/n.py:3 and /data/o.py:1"),
    ]
    report.write(page, outcomes, ["nowhere"], "the command", ["later"])
    text = page.read_text(encoding="utf-8")
    assert "2 models: 1 equal, 1 refused, 0 wrong, 0 crashed, 0 hung." in text
    assert "2 loops: 0 equal, 1 refused, 1 wrong, 0 crashed, 0 hung." in text
    assert "| a | torch | equal | 50% |  |" in text
    assert "at m/n.py:3: a \\| b |" in text
    assert "TraceError: at m/n.py:3 and /data/o.py:1 |" in text
    assert "Left out, because not installed: nowhere." in text
    assert "without an outcome yet: later." in text
    assert "old" not in text
    assert text.startswith("Before\n")
    page.write_text("no marks", encoding="utf-8")
    with pytest.raises(ValueError, match="no marks"):
        report.write(page, outcomes, [], "the command")
