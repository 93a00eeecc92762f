"""Poplar's evaluation: clusters and models are the paper's, turns the fewest that fit, the table what arms do."""

from __future__ import annotations

from pathlib import Path

import pytest

import poplar
import poplar_testbed as bed
from hetspmd.cost.model import CostModel
from poplar import Arm
from reproduction import replaced

A, B, C = bed.TESTBEDS


def test_the_clusters_are_those_of_table_1() -> None:
    found = {t.name: [(g.name, n, g.memory) for g, n in t.gpus] for t in bed.TESTBEDS}
    assert found == {
        "A": [("A100-80", 4, 80), ("A100-40", 4, 40)],
        "B": [("V100", 2, 16), ("T4", 2, 16)],
        "C": [("A800", 4, 80), ("V100S", 4, 32)],
    }
    assert [len(t.each) for t in bed.TESTBEDS] == [8, 4, 8]


@pytest.mark.parametrize("workload", bed.WORKLOADS, ids=lambda w: w.name)
def test_the_models_have_the_papers_sizes(workload: bed.Workload) -> None:
    size = float(workload.name.split()[1].removesuffix("B"))
    assert bed.parameters(workload) / 1e9 == pytest.approx(size, rel=0.05)
    assert workload.rows * workload.tokens == bed.TOKENS


def test_a_last_wave_leaves_multiprocessors_idle() -> None:
    assert bed.idle_in_waves(108, 108) == 0
    assert bed.idle_in_waves(109, 108) == pytest.approx(216 / 109 - 1)
    assert bed.idle_in_waves(27, 108) == 3


def test_shares_of_the_baselines() -> None:
    assert poplar.even(B) == (0.25,) * 4
    assert sum(poplar.by_flops(C)) == pytest.approx(1)
    assert poplar.by_flops(C)[0] / poplar.by_flops(C)[-1] == pytest.approx(19.5 / 16.4)
    assert len(set(poplar.by_flops(A))) == 1


def test_the_table_has_every_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    def arms(_workload: bed.Workload, _testbed: bed.Testbed, level: int) -> dict[str, Arm | None]:
        slow = None if level == 0 else Arm(4.0 - level, f"{level} x 8")
        return {"even": slow, "by FLOP/s": Arm(2.0, "4 x 4"), "hetspmd": Arm(1.0, "2 x 8 + 1 x 4")}

    monkeypatch.setattr(poplar, "arms", arms)
    monkeypatch.setattr(poplar, "free", lambda _workload, _testbed: Arm(0.5, "1 x 8"))
    monkeypatch.setattr(bed, "model_flops", lambda _workload: 1e14)
    lines = list(poplar.table(bed.WORKLOADS[:1], [A]))
    assert {line.count("|") for line in lines} == {lines[0].count("|")}
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    assert rows[0][:8] == [
        "Llama 0.5B", "A", "0", poplar.NONE, "50 (4 x 4)", "100 (2 x 8 + 1 x 4)", "-", "2.00x",
    ]  # fmt: skip
    assert rows[3][3:8] == ["100 (3 x 8)", "50 (4 x 4)", "100 (2 x 8 + 1 x 4)", "1.00x", "2.00x"]
    assert [row[8] for row in rows] == [poplar.SAID["Llama 0.5B", "A"], "", "", "", ""]
    assert rows[4][2:8] == ["free", "100 (3 x 8)", "50 (4 x 4)", "200 (1 x 8)", "2.00x", "4.00x"]


def test_the_document_has_the_tables() -> None:
    text = (Path(poplar.__file__).parents[1] / "docs/reproduction.md").read_text(encoding="utf-8")
    for name in poplar.TABLES:
        assert replaced(text, name, []) != text, f"{name} has no table"


@pytest.mark.slow
def test_more_rows_use_a_gpu_better_and_the_cluster_knows_it() -> None:
    speeds = [p.rows / p.seconds for p in bed.curve_of(bed.SMALL, bed.A800)]
    assert speeds == sorted(speeds)
    assert speeds[0] < 0.8 * speeds[-1]
    cluster, theory = bed.cluster_of(C, bed.SMALL, 0), bed.theory_of(bed.SMALL, bed.SMALL.rows)
    measured = CostModel(theory, cluster).measured
    assert measured is not None
    assert all(pace >= 1 - 1e-3 for pace in measured.pace)
    assert all(room == d.memory for room, d in zip(measured.capacity, cluster.devices, strict=True))
    slow = bed.cluster_of(C, bed.SMALL, 0, [1] * 8)
    at_one = CostModel(theory, slow).measured
    assert at_one is not None
    first = bed.steps_alone(bed.SMALL, bed.A800)[0]
    assert at_one.pace[0] == pytest.approx(first[1] / first[0], rel=0.01)
    assert at_one.pace[0] > measured.pace[0]
    whole, shards = (bed.cluster_of(C, bed.SMALL, level).devices[0].memory for level in (0, 3))
    assert shards - whole == pytest.approx(7 / 8 * bed.MASTER * bed.parameters(bed.SMALL), abs=2)


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 3])
def test_a_small_row(level: int) -> None:
    cluster, theory = bed.cluster_of(B, bed.SMALL, level), bed.theory_of(bed.SMALL, bed.SMALL.rows)
    by = poplar.InTurns(theory, cluster, level, poplar.by_flops(B))
    count = by.fewest(bed.SMALL.rows)
    assert count is not None
    assert by.at(count).fits
    assert not by.at(count - 1).fits
    arms = poplar.arms(bed.SMALL, B, level)
    seconds = {name: arm.seconds for name, arm in arms.items() if arm is not None}
    assert seconds["hetspmd"] < seconds["by FLOP/s"] < seconds["even"]
    assert arms["even"] is not None
    assert arms["even"].turns.split(" + ")[0] == arms["even"].turns.split(" + ")[1]
