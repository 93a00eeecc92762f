"""What the trust bench makes of its points; models, plans and files without an emulated cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import yaml

import hetspmd
from emulated.spec import EmulationError
from hetspmd.cluster.curves import MeasuredFigures
from hetspmd.profile.measure import Profile
from trust import command, rank, report, results, statistics
from trust.models import MODELS, build
from trust.points import CLUSTERS, KINDS, plans
from trust.points import MODELS as CHOSEN

PAIR = hetspmd.Cluster.load(
    {
        "devices": [
            {"name": "fast", "flops": 5e10, "memory_bandwidth": 1e10, "launch": 2e-6},
            {"name": "slow", "flops": 2e10, "memory_bandwidth": 5e9, "launch": 5e-6},
        ],
        "network": {"bandwidth": 5e7, "latency": 1e-3},
    }
)


def made(
    predicted: float, measured: float, plan: str = "p", model: str = "BERT", memory: Any = (100, 0)
) -> Any:
    """A point with a given prediction."""
    p = results.Point(
        "2:1", model, plan, (measured - 0.1, measured, measured + 0.2), (1.0, 0.5), (100, 2), (200, 100),
        (0.1, 0.1), (0.0, 0.0), "file",
    )  # fmt: skip
    p.__dict__["cost"] = SimpleNamespace(step_seconds=predicted, memory_bytes=memory)
    return p


def test_errors_and_regret() -> None:
    good, bad = made(1.0, 2.0, "good"), made(1.5, 1.5, "bad", memory=(90, 2))
    assert good.measured == 2.0
    assert good.error == pytest.approx(-0.5)
    assert good.memory_errors == (0.0,), "an idle rank has no error"
    assert bad.memory_errors == pytest.approx((-0.1, 0.0))
    assert statistics.regret([good, bad]) == pytest.approx(2.0 / 1.5 - 1)
    assert statistics.regret([bad, made(1.6, 3.0)]) == 0.0
    assert statistics.pearson([made(1.0, 3.0), made(2.0, 5.0), made(3.0, 7.0)]) == pytest.approx(1.0)
    assert statistics.groups([good, made(1, 1, model="ViT"), bad]) == {
        ("2:1", "BERT"): [good, bad], ("2:1", "ViT"): [made(1, 1, model="ViT")]
    }  # fmt: skip


def test_the_page_and_the_plot(tmp_path: Path) -> None:
    points = [made(1.0, 1.1, "one"), made(2.0, 1.9, "two"), made(0.5, 0.4, "three", "ViT")]
    page = tmp_path / "trust.md"
    page.write_text(f"before\n{report.MARKS[0]}old\n{report.MARKS[1]}\nafter\n", encoding="utf-8")
    report.write(page, points)
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "3 points, 2 pairs of a model and a cluster" in text
    assert "| 2:1 | BERT | two | 2.000 | 1.900 | 1.800 to 2.100 | +5.3% |" in text
    plot = page.with_suffix(".svg").read_text(encoding="utf-8")
    assert plot.count("<circle") == 3 + 2, "the points and the legend"
    assert "ViT on 2:1, three: 0.500 s predicted, 0.400 s measured" in plot
    page.write_text("no marks", encoding="utf-8")
    with pytest.raises(ValueError, match="lacks the marks"):
        report.write(page, points)


def test_points_are_kept_and_half_a_line_is_not(tmp_path: Path) -> None:
    file = tmp_path / "2-1" / "BERT - p.json"
    stamps = [
        [[0.0, 1.0, 2.0, 4.0], [10.0, 11.0, 12.5, 13.0]],
        [[0.1, 1.5, 2.5, 3.0], [10.0, 11.0, 12.0, 13.5]],
    ]
    ranks = [
        {
            "stamps": s, "losses": [2.0, 1.0], "peak_bytes": 10 + i, "resident_bytes": 20, "main": [0.3, 0.1, 0.2],
            "other": [0.0, 0.0, 0.1],
        }
        for i, s in enumerate(stamps)
    ]  # fmt: skip
    found = results.point("2:1", "BERT", "p", file, ranks)
    assert found.seconds == pytest.approx((1.0, 1.5, 1.5, 1.0)), (
        "from last end to last end, the first step left out"
    )
    assert found.peak_bytes == (10, 11)
    assert found.main == (0.2, 0.2)
    assert results.load(tmp_path) == []
    results.append(tmp_path, [found])
    with (tmp_path / "points.jsonl").open("a", encoding="utf-8") as out:
        out.write('{"cluster": "2:1", "mod')
    assert results.load(tmp_path) == [found]


def test_losses_must_agree() -> None:
    same, other = made(1, 1), made(1, 1, "other")
    command._check_losses([same, other])
    wrong = replace(other, losses=(1.0, 0.6))
    with pytest.raises(EmulationError, match=r"step 1: the loss is 0\.5 with 'p' and 0\.6 with 'other'"):
        command._check_losses([same, wrong])


def test_names_choose() -> None:
    assert command._wanted("2:1", "BERT", None)
    assert command._wanted("2:1", "BERT", ["2:1"])
    assert command._wanted("2:1", "BERT", ["BERT", "ViT"])
    assert not command._wanted("2:1", "BERT", ["2:1", "ViT"])
    assert not command._wanted("2:1", "BERT", ["1:1:1", "BERT"])


def test_the_product_is_large_enough() -> None:
    assert set(CHOSEN) == set(CLUSTERS)
    assert {m for of in CHOSEN.values() for m in of} == set(MODELS)
    assert len(MODELS) == 7
    # Of the six plans of a model at least five are different.
    assert sum(len(of) for of in CHOSEN.values()) * 5 >= 30
    for spec in CLUSTERS.values():
        assert spec.cores < 2


@pytest.mark.slow
def test_plans_of_a_small_model_are_different_programs() -> None:
    torch.manual_seed(0)
    model, batch = MODELS["VGG19"](batch=4, size=32)
    found = dict(plans(model, batch, PAIR))
    assert list(found) == [k for k in KINDS if k in found]
    assert len(found) >= 4
    programs = [(p.program, p.lengths, p.active) for p in found.values()]
    assert all(a != b for i, a in enumerate(programs) for b in programs[:i])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_give_a_loss(name: str) -> None:
    model, batch = build(name)
    loss = model(**batch)
    assert loss.shape == ()
    assert loss.isfinite()
    again, _ = build(name)
    assert torch.equal(again(**batch), loss), "seeded"


@pytest.mark.parametrize("memory", [None, 5e9])
def test_devices_have_the_memory_that_is_given(monkeypatch: pytest.MonkeyPatch, memory: float | None) -> None:
    """Otherwise what the machine has left beside what its processes hold."""
    found = Profile(PAIR, MeasuredFigures())
    monkeypatch.setattr(rank, "ProcessGroupCommunicator", MagicMock())
    monkeypatch.setattr(rank, "Session", MagicMock())
    monkeypatch.setattr(rank, "measure", lambda *_: found)
    text = rank.profile(MagicMock(), budget=1.0, memory=memory)
    devices = hetspmd.Cluster.load(yaml.safe_load(text)).devices
    assert [d.memory for d in devices] == [memory or PAIR.devices[0].memory] * 2
