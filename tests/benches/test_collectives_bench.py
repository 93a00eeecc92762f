"""The bench of the collectives: its cases, and what it makes of their seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import collectives as bench
from hetspmd.cluster.collective_kinds import kinds_between
from hetspmd.profile.fit import fit_curves

SCATTERS = set(kinds_between("partial", "shard"))
GATHERS = set(kinds_between("shard", "replicated"))
WORLD = 4
SIZES = [1 << 16, 1 << 20]
BANDWIDTH, LATENCY = 1e8, 1e-4


def test_every_case_has_every_implementation() -> None:
    found = bench.cases(SIZES, WORLD)
    assert len(found) == len(SIZES) * 2 * len(("even", "skewed", "half", "lone"))
    for group, by_kind in found:
        assert by_kind.keys() == (SCATTERS if group == "reduce" else GATHERS | {bench.EXCHANGED})
        assert len({(t.skew, t.nbytes, t.extents) for t in by_kind.values()}) == 1
        assert all(by_kind[kind].kind == kind for kind in bench.GROUPS[group])


def seconds(kind: str, nbytes: int, shards: int, largest: float) -> float:
    """The formulas of the cost model; a ring is twice as fast as what is grouped, an exchange slower than all."""
    if kind in ("all_gather", "reduce_scatter"):
        return LATENCY + (WORLD - 1) * largest * nbytes / BANDWIDTH
    if kind in ("grouped_broadcast", "grouped_reduce"):
        return shards * LATENCY + nbytes / BANDWIDTH
    return nbytes / BANDWIDTH * (0.5 if kind.startswith("ring") else 4.0)


def rounds() -> list[list[float]]:
    """The seconds of three rounds of every case."""
    return [
        [seconds(kind, t.nbytes, t.shards, t.largest)] * 3
        for _, by_kind in bench.cases(SIZES, WORLD)
        for kind, t in by_kind.items()
    ]


def test_the_table() -> None:
    """Rows in the cases' order, ratios to the padded kind; curves see that rings are fast, formulas cannot."""
    _, _, *lines = bench.table(SIZES, rounds(), WORLD)
    rows = [line.strip("| ").split(" | ") for line in lines]
    assert len(rows) == len(SIZES) * 8
    for group, nbytes, skew, padded, grouped, ring, exchange, _, curves in rows:
        assert curves == "ring", (group, nbytes, skew)
        assert float(padded) > 0
        assert float(ring) < float(grouped) < float(exchange) or skew == "even"
    chosen = {(nbytes, skew): formulas for _, nbytes, skew, *_, formulas, _ in rows}
    assert chosen["65536", "even"] == "padded", "one latency, and nothing to pad"
    assert chosen["1048576", "skewed"] == "grouped"


def test_curves_are_of_what_profiles_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    fitted: dict[str, set[str]] = {}

    def fit(kind: Any, world: int, points: Any) -> Any:
        fitted[kind] = {point.skew for point in points}
        return fit_curves(kind, world, points)

    monkeypatch.setattr(bench, "fit_curves", fit)
    bench.table(SIZES, rounds(), WORLD)
    assert {kind for kind, skews in fitted.items() if "lone" not in skews} == {"all_gather", "reduce_scatter"}
    assert fitted.keys() == SCATTERS | GATHERS


@pytest.mark.slow
def test_it_measures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two real processes, where no cluster can be emulated: every call of every case, into a page."""
    monkeypatch.setattr(bench, "unavailable", lambda spec: "no emulation")
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n<!-- results -->\nold\n<!-- end of results -->\n")
    assert (
        bench.main(["--ranks", "2", "--rounds", "1", "--sizes", "4096", "8388608", "--write", str(page)]) == 0
    )
    said = capsys.readouterr()
    assert "no emulation; on the loopback interface instead" in said.err
    text = page.read_text()
    assert "2 ranks on the loopback interface; medians of 1 rounds" in text
    assert text.count("\n| reduce | 4096 |") == text.count("\n| gather | 4096 |") == 3
    assert "old" not in text
