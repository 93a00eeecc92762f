"""The file that a profile becomes, its tables and its plot; and bad input."""

from __future__ import annotations

import dataclasses
import os
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from synthetic import rates_of

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.curves import MeasuredFigures, Rate
from hetspmd.cluster.devices import Device
from hetspmd.profile.grouping import Report, devices_of, groups_of
from hetspmd.profile.host import host_identity, usable_memory
from hetspmd.profile.measure import Profile
from hetspmd.profile.plot import profile_svg
from hetspmd.profile.show import profile_text
from hetspmd.profile.svg import LogAxis

SVG = "{http://www.w3.org/2000/svg}"


def test_the_file_reads_back(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(profile.to_text())
    assert Cluster.load(path) == profile.cluster
    loaded = Profile.load(str(path))
    assert loaded.cluster == profile.cluster
    assert [f.curve for f in loaded.measured.fits] == [f.curve for f in profile.measured.fits]
    for mine, theirs in zip(loaded.measured.fits, profile.measured.fits, strict=True):
        assert [(p.skew, p.nbytes, p.shards) for p in mine.points] == [
            (p.skew, p.nbytes, p.shards) for p in theirs.points
        ]
        assert [p.seconds for p in mine.points] == pytest.approx([p.seconds for p in theirs.points], rel=1e-3)
    assert loaded.measured.about == profile.measured.about
    assert Profile.load(str(path)).to_text() == loaded.to_text()


def test_tables(profile: Profile) -> None:
    text = profile_text(profile)
    rows = [line.split() for line in text.splitlines()]
    assert ["0,", "2", "d4", "matmul", "float32", "4", "TFLOP/s", "±", "1.0", "%", "9"] in rows
    assert ["1,", "3", "d1", "launch", "float32", "5", "us", "per", "op", "±", "1.0", "%", "9"] in rows
    for fit in profile.measured.fits:
        assert f"{100 * (fit.error or 0):.1f} %" in text
    all_reduce = next(row for row in rows if row[:2] == ["All-Reduce", "2"])
    assert all_reduce[-2:] == ["6", "6"]  # points, all tight


def test_plot(profile: Profile) -> None:
    root = ElementTree.fromstring(profile_svg(profile))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    points = sum(len(f.points) for f in profile.measured.fits)
    dots = list(root.iter(f"{SVG}circle"))
    assert len(dots) == points
    for dot in dots:
        assert 0 < float(dot.attrib["cx"]) < width
        assert 0 < float(dot.attrib["cy"]) < height
    lines = list(root.iter(f"{SVG}polyline"))
    skews = {(f.curve.kind, f.curve.devices): {p.skew for p in f.points} for f in profile.measured.fits}
    assert len(lines) == sum(map(len, skews.values()))
    texts = [t.text for t in root.iter(f"{SVG}text")]
    assert "All-To-All, 4 devices" in texts
    assert sum(1 for t in texts if t and "FLOP/s" in t) == 6
    assert profile_svg(profile) == profile_svg(profile)


def test_plot_escapes_and_needs_no_collectives() -> None:
    devices = devices_of([Report("<&>", "h", 2.0**30, rates_of(0, 1e12))])
    alone = Profile(Cluster(devices), MeasuredFigures((), rates_of(0, 1e12)))
    root = ElementTree.fromstring(profile_svg(alone))
    assert "<&> (0)" in [t.text for t in root.iter(f"{SVG}text")]
    assert "Cluster of 1 device\n" in profile_text(alone)


def test_log_axis() -> None:
    axis = LogAxis(2e-3, 0.5, 100.0, 0.0)
    assert axis.ticks() == pytest.approx([1e-3, 1e-2, 0.1, 1.0])
    assert [axis.at(t) for t in axis.ticks()] == pytest.approx([100.0, 200 / 3, 100 / 3, 0.0])
    assert len(LogAxis(1.0, 1.0, 0.0, 1.0).ticks()) == 2


def test_show(profile: Profile, command: Any, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(profile.to_text())
    outcome = command("profile", "--show", path)
    assert (outcome.status, outcome.err) == (0, "")
    assert "Grouped-Broadcast" in outcome.out
    assert f"Plotted in {tmp_path / 'c.svg'}" in outcome.out
    ElementTree.fromstring((tmp_path / "c.svg").read_text())
    other = tmp_path / "other.svg"
    assert command("profile", "--show", path, "--svg", other).status == 0
    assert other.read_text() == (tmp_path / "c.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name --out FILE for the cluster file that is measured, or --show FILE"),
        (("--out", "x", "--show", "y"), "not allowed with argument"),
        (("--out", "nowhere/c.yaml"), "there is no folder"),
        (("--out", "c.yaml", "--budget", "soon"), "'soon' is no time; write it as 60s or 2min"),
        (("--out", "c.yaml", "--budget", "0s"), "'0s' is no time"),
        (("--out", "c.yaml", "--tolerance", "200%"), "'200%' is no part of a whole; write it as 5% or 0.05"),
        (("--out", "c.yaml", "--device", "tpu"), "--device tpu: write auto, cpu, cuda or cuda:N"),
        (("--out", "c.yaml", "--device", "cuda:999"), "GPU 999 was asked for"),
        (("--out", "c.yaml", "--svg", "c.svg"), "--svg goes with --show FILE"),
        (("--show", "none.yaml"), "cannot read the cluster file none.yaml"),
        (("--show", "plain.yaml"), "plain.yaml has no part measured"),
        (("--show", "future.yaml"), "the part measured is of version 7; this release reads 1: profile again"),
    ],
)
def test_bad_input(
    command: Any, arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "plain.yaml").write_text("devices: [{flops: 1}]")
    (tmp_path / "future.yaml").write_text("devices: [{flops: 1}]\nmeasured: {version: 7}")
    outcome = command("profile", *arguments)
    assert outcome.status == 2
    assert message in outcome.err
    assert len(outcome.err.splitlines()) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["future.yaml", "plain.yaml"]


def test_written_whole_or_not_at_all(
    command: Any, profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("hetspmd.profile.measure.measure", lambda session, options, tick: profile)
    path = tmp_path / "c.yaml"
    assert command("profile", "--out", path, "--device", "cpu").status == 0
    assert Cluster.load(path) == profile.cluster
    path.write_text("before")

    def full(*names: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    outcome = command("profile", "--out", path, "--device", "cpu")
    assert outcome.status == 2
    assert "No space left on device; name another file" in outcome.err
    assert path.read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["c.yaml"]
    outcome = command("profile", "--out", "-", "--device", "cpu")
    assert Cluster.from_text(outcome.out) == profile.cluster


def report(rank: int, speed: float, memory: float = 2.0**33, name: str = "gpu", **noise: float) -> Report:
    return Report(name, "host", memory, rates_of(rank, speed, **noise))


def test_alike_devices_become_equal() -> None:
    found = devices_of(
        [
            report(0, 4e12),
            report(1, 1e12),
            report(2, 4e12, jitter=1.04),
            report(3, 1e12, jitter=0.95, memory=8e9),
        ]
    )
    assert found[0] == found[2]
    assert found[1] == found[3]
    assert [d.name for d in found] == ["gpu-a", "gpu-b", "gpu-a", "gpu-b"]
    assert found[0].rate("float32") == pytest.approx(4e12 / 1.02, rel=1e-2)
    assert found[1].memory == 8e9 // 2**20 * 2**20  # the least of the kind
    assert found[0].launch == pytest.approx(5e-6 * 1.02, rel=1e-2)
    assert devices_of([report(0, 4e12)], "convolution")[0].flops == {"float32": 2e12}


def distinct(devices: tuple[Device, ...]) -> list[Device]:
    return [d for i, d in enumerate(devices) if d not in devices[:i]]


def test_unlike_devices_stay_unlike() -> None:
    assert len(distinct(devices_of([report(0, 1e12), report(1, 1e12, jitter=1.2)]))) == 2
    assert len(distinct(devices_of([report(0, 1e12), report(1, 1e12, jitter=1.2, interval=0.2)]))) == 1
    assert len(distinct(devices_of([report(0, 1e12), report(1, 1e12, memory=2.0**34)]))) == 2
    for amount, kinds in ((1.0, 2), (0.25, 1)):
        smaller = tuple(
            dataclasses.replace(
                r, amount=amount * r.amount, seconds=1.5 * amount * r.seconds, low=1.5 * amount * r.low,
                high=1.5 * amount * r.high,
            )
            if r.what == "convolution"
            else r
            for r in rates_of(1, 1e12)
        )  # fmt: skip
        found = devices_of([report(0, 1e12), dataclasses.replace(report(1, 1e12), rates=smaller)])
        assert len(distinct(found)) == kinds, "convolutions, of one size alone"
    two = devices_of([report(0, 1e12, name="a"), report(1, 1e12, name="b")])
    assert [d.name for d in two] == ["a", "b"]
    fewer = dataclasses.replace(report(1, 1e12), rates=rates_of(1, 1e12)[:-1])
    assert len(distinct(devices_of([report(0, 1e12), fewer]))) == 2


@pytest.mark.parametrize(
    ("slower", "kinds"),
    [
        ({"memory": 1.13, "optimizer": 1.13}, 1),
        ({"matmul": 1.13, "convolution": 1.13, "memory": 1.13, "optimizer": 1.13}, 2),
        ({"matmul": 1 / 1.13, "convolution": 1.13, "memory": 1 / 1.13, "optimizer": 1.13}, 2),
        ({"memory": 1.24}, 1),
        ({"memory": 1.26}, 2),
        ({"launch": 1.45}, 1),
        ({"launch": 1.55}, 2),
    ],
)
def test_noise_of_some_rates_makes_no_kinds(slower: dict[str, float], kinds: int) -> None:
    """On average within a tenth, none farther than a quarter; launches, which are the host's, a half."""

    def scaled(r: Rate) -> Rate:
        by = slower.get(r.what, 1.0)
        return dataclasses.replace(r, seconds=by * r.seconds, low=by * r.low, high=by * r.high)

    optimizer = Rate(0, "optimizer", "float32", 1e8, 1e-3, 0.99e-3, 1.01e-3, 9)
    rates = [r for r in (*rates_of(0, 1e12), optimizer) if r.dtype == "float32"]
    first, other = (Report("gpu", "host", 2.0**33, of) for of in (tuple(rates), tuple(map(scaled, rates))))
    assert len(distinct(devices_of([first, other]))) == kinds


def test_groups_are_the_subsets_that_the_compiler_tries() -> None:
    devices = devices_of([report(r, s) for r, s in enumerate((1e12, 4e12, 2e12, 4e12, 4e12, 1e12))])
    assert groups_of(devices) == ((1, 3, 4, 2, 0, 5), (1, 3, 4, 2), (1, 3, 4), (1, 3))
    assert groups_of(devices[:2]) == ((1, 0),)
    assert groups_of(devices[:1]) == ()
    many = devices_of([report(r, 1e12 * 1.3**r) for r in range(12)])
    assert [len(g) for g in groups_of(many)] == [12, 11, 8, 5, 2]


def test_memory_is_shared_by_the_ranks_of_a_host() -> None:
    cpu = torch.device("cpu")
    one, four = usable_memory(cpu, 1), usable_memory(cpu, 4)
    assert 2**20 < four < one
    assert four == pytest.approx(one / 4, rel=0.1)
    assert host_identity() == host_identity()
