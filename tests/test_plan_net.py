"""A change of structure leaves every plan as it was: what ``plan_net.py`` recorded, compiled again.

Where a plan is meant to change, ``python tests/plan_net.py --write`` records it, and the commit says why.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import plan_net
from plan_net import CLUSTERS, MODELS, SMALL, differences, stored

LONG = {"ResNet-50": ("boards", "machines", "little memory", "three segments")}
"""Models whose plans take minutes, with the clusters that are compared in each run; ``--check`` has all."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "dlrm" else pytest.mark.slow) for n in MODELS]
)
def test_plans_are_as_they_were(name: str) -> None:
    version = stored(name)["torch"]
    if version != torch.__version__:
        pytest.skip(f"recorded with torch {version}; another one traces other ops")
    assert differences(name, LONG.get(name, CLUSTERS)) == []


def test_a_difference_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = stored("dlrm")
    plans["plans"]["two"]["lengths"][0][0] += 1
    monkeypatch.setattr(plan_net, "stored", lambda _: plans)
    assert differences("dlrm", ("one", "two")) == ["lengths of dlrm on two"]


def test_the_net_is_wide() -> None:
    """Plans of every kind are among those that were recorded."""
    plans = [plan for name in MODELS for plan in stored(name)["plans"].values()]
    whole = [plan for plan in plans if "error" not in plan]
    lines = Counter(line.split()[0] for plan in whole for line in plan["program"])
    assert {"compute", "all_reduce", "reduce_scatter", "all_gather", "grouped_reduce"} <= lines.keys()
    assert sum("inside" in plan for plan in whole) >= 8
    assert any(len(plan["active"]) < len(plan["bytes"]) for plan in whole), "an idle device"
    assert any(plan["stop"] == "memory" for plan in whole)
    assert any("one_segment" in plan["baselines"] for plan in whole)
    assert len(SMALL) < len(MODELS)
