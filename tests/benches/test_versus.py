"""What the comparison makes of its points, and how it finds them; without an emulated cluster."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest
import torch
from torch import nn

from emulated.accumulation import micro_batches
from emulated.arms import proportional_rows, stepper
from emulated.links import rate_command
from emulated.spec import EmulationError
from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.devices import Device, Network
from versus import command, one_quota, points, report, results, statistics
from versus.models import MODELS, SIZES, size_over, workload
from versus.points import ARMS, CLUSTERS, COMPILED, DDP, DDP_EVEN, FORCED, FSDP, LINKS
from versus.rank import adamw

SECONDS = dict(zip(ARMS, (3.0, 4.0, 2.0, 6.0, 5.0, 2.04, 1.0), strict=True))


def made(model: str = "VGG19", cluster: str = "2:1", link: str = "1Gbit/s", **seconds: float) -> Any:
    """A point; seconds of arms by the first word that names them."""
    of = {**SECONDS, **{arm: seconds[key] for key, arm in NAMES.items() if key in seconds}}
    arms = {
        a: results.Measured((s - 0.1, s, s + 0.2), (2.0, 1.0), 0.9 if a == COMPILED else None)
        for a, s in of.items()
    }
    return results.Point(cluster, model, "small", link, 1.25e8, 0.5, 0.25, arms)


NAMES = {"compiled": COMPILED, "ddp": DDP, "forced": FORCED, "fsdp": FSDP}


def test_ratios_of_a_point() -> None:
    p = made()
    assert statistics.best_incumbent(p) == DDP
    assert statistics.over_best(p) == pytest.approx(2.0)
    assert statistics.over_ddp(p) == pytest.approx(2.0)
    assert statistics.forced_ratio(p) == pytest.approx(1.02)
    assert statistics.best_incumbent(made(fsdp=1.5)) == FSDP
    assert statistics.over_best(made(fsdp=1.5)) == pytest.approx(1.5)
    assert statistics.over_both(p) == pytest.approx(2.0)
    assert statistics.over_both(made(forced=1.4)) == pytest.approx(1.4)
    said = statistics.summary([made(forced=1.4)], 48)
    assert "or forced data parallel over hetspmd: geometric mean 1.40" in said


def test_what_free_links_would_give() -> None:
    """The fastest device alone takes 3 s; with the other it has two thirds of the speed, or a quarter."""
    assert statistics.free_links(made()) == pytest.approx(2.0)
    assert statistics.free_links(made(cluster="equal")) == pytest.approx(0.75)
    said = statistics.summary([made(ddp=5.0, compiled=2.5)], 48)
    assert "proportional DDP over hetspmd: 2.00 (2:1; 2.50 over free links)" in said
    assert "hetspmd over free links: geometric mean 1.25" in said


def test_how_long_steps_take() -> None:
    said = statistics.summary([made(), made("BERT", compiled=2.0)], 48)
    assert "of the fastest device alone takes 3.00 to 3.00 s, of hetspmd 1.00 to 2.00 s" in said


def test_every_check_passes_and_fails() -> None:
    assert [c.holds for c in statistics.checks([])] == [None] * 5
    assert [c.holds for c in statistics.checks([made(ddp=6.0, forced=6.0), made("BERT")])][:3] == [True] * 3
    assert [c.holds for c in statistics.checks([made("BERT")])] == [True, True, None, None, True]
    balanced = [made("BERT", link="balanced"), made("BERT", link="balanced", compiled=1.7)]
    gain = statistics.checks([*balanced, made("BERT", compiled=2.0)])[3]
    assert (gain.holds, gain.value) == (True, pytest.approx((2.0 * 2.0 / 1.7) ** 0.5))
    assert not statistics.checks([made("BERT", link="balanced", compiled=1.7)])[3].holds
    for communicating, holds in ((0.24, None), (0.25, True), (1.0, True), (1.01, None)):
        point = replace(made("BERT", link="balanced"), communicating=communicating)
        assert statistics.checks([point])[3].holds is holds, "half to twice the seconds that it computes"
    slower = made("BERT", compiled=2.07)
    never, mean, vgg, _, forced = statistics.checks([made(ddp=4.9, forced=4.9), slower])
    assert (never.holds, never.value) == (False, pytest.approx(2.07 / 2.0))
    assert (mean.holds, mean.value) == (True, pytest.approx((4.9 * 2.0 / 2.07) ** 0.5))
    assert (vgg.holds, vgg.value) == (False, pytest.approx(4.9))
    assert forced.holds
    assert statistics.checks([made("BERT", compiled=2.06)])[0].holds, "1.03 times is allowed"
    assert not statistics.checks([made("BERT", compiled=1.3)])[1].holds, "2 / 1.3 < 1.6"
    for seconds, holds in ((2.09, True), (2.11, False), (1.0, True)):
        assert statistics.checks([made(forced=seconds)])[4].holds is holds
    two = [made(ddp=6.0), made(ddp=5.5, cluster="equal"), made(ddp=2.0, link="200Mbit/s")]
    assert statistics.checks(two)[2].value == pytest.approx(5.5), "the least of the clusters at 1 Gbit/s"
    assert str(statistics.checks(two)[2]).endswith("pass (5.50)")
    assert str(statistics.checks([])[2]).endswith("not measured")


def test_the_page_and_the_chart(tmp_path: Path) -> None:
    page = tmp_path / "cluster.md"
    page.write_text("before\n<!-- results -->\nstale\n<!-- end of results -->\nafter\n", encoding="utf-8")
    of = [made(ddp=6.0), made("BERT", link="balanced")]
    report.write(page, of, statistics.summary(of, 48))
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "stale" not in text
    assert "](cluster.svg)" in text
    assert "- 2 of 48 points measured; size: small" in text
    assert "proportional DDP over hetspmd: geometric mean 3.46, least 2.00, most 6.00" in text
    assert "forced data parallel beside proportional DDP: median -32.0%, the farthest -66.0%" in text
    assert "VGG19 at 1 Gbit/s, proportional DDP over hetspmd: 6.00 (2:1; 3.00 over free links)" in text
    assert "| BERT | 2:1 | 1 Gbit/s (balanced) | 0.50 | 3.000 | 4.000 | **2.000** | 6.000 | 5.000 |" in text
    assert "| 1.000 | 0.900 to 1.200 | 0.900 | 2.000 | 2.00 | 2.00 | 1.02 |" in text
    assert "longer than proportional DDP at every point: pass (0.02)" in text
    assert "on every cluster: pass (6.00)" in text
    chart = page.with_suffix(".svg").read_text(encoding="utf-8")
    assert chart.count("<rect") == 1 + len(ARMS) * (2 + 1), (
        "the back, a bar per arm and point, and the legend"
    )
    kept = results.load(tmp_path / "none", page.with_suffix(".jsonl"))
    assert kept == [made(ddp=6.0), made("BERT", link="balanced")]
    rows = report.bars([made(cluster=str(i)) for i in range(report.ROW + 1)])
    assert rows.count("s / step") == 2
    assert "height='630'" in rows, "a second row of points"
    page.write_text("no marks", encoding="utf-8")
    with pytest.raises(ValueError, match="lacks the marks"):
        report.write(page, [made()], "")


def test_points_are_kept_and_half_a_line_is_not(tmp_path: Path) -> None:
    assert results.load(tmp_path / "none") == []
    folder = tmp_path / "new"
    results.append(folder, made())
    with (folder / "points.jsonl").open("a", encoding="utf-8") as out:
        out.write('{"cluster": "2:1", "mod')
    assert results.load(folder) == [made()]
    results.append(folder, made("BERT"))
    assert results.load(folder) == [made(), made("BERT")], "the half line does not spoil the next"
    kept = tmp_path / "kept.jsonl"
    kept.write_text(results.text([made(ddp=6.0), made("ViT")]), encoding="utf-8")
    assert results.load(folder, kept) == [made(), made("BERT"), made("ViT")], "what is new counts"


def test_what_the_ranks_found() -> None:
    ranks = [
        {"stamps": [[0.0, 1.0, 2.0], [10.0, 11.0]], "losses": [1.5, 1.0]},
        {"stamps": [[0.1, 1.5, 2.5], [9.0, 12.0]], "losses": [0.5, 0.25]},
        {"stamps": [], "losses": []},
    ]
    summed = results.measured(ranks, summed=True)
    assert summed.seconds == pytest.approx((1.4, 1.0, 2.0)), "from last end to last end"
    assert summed.losses == (2.0, 1.25)
    assert results.measured(ranks, summed=False, predicted=0.5).losses == (1.5, 1.0)


def test_arms_that_are_close_have_further_turns() -> None:
    assert points.close({**SECONDS, DDP: 1.14}) == {DDP, COMPILED}
    assert points.close({**SECONDS, FSDP: 0.94}) == {FSDP, COMPILED}
    assert points.close(SECONDS) == frozenset()
    assert points.close({**SECONDS, DDP: 0.85}) == frozenset(), "what is clear needs no more"
    assert points.close({**SECONDS, DDP: 1.07}, points.CLOSER) == frozenset()
    assert points.close({**SECONDS, DDP: 1.04}, points.CLOSER) == {DDP, COMPILED}
    assert points.close({**SECONDS, FORCED: 1.0}) == frozenset(), "data parallel is hetspmd's own"
    assert points.close({DDP: 1.0, FSDP: 1.0}) == frozenset()


def test_turns_until_a_ratio_is_known() -> None:
    """Drift that hits both says nothing against it; twelve ratios of which each is 4 % off, either way, do."""
    drifting = [1.0 + turn / 10 for turn in range(12)]
    assert points.known(drifting, [1.02 * seconds for seconds in drifting])
    for away, enough in ((0.02, True), (0.04, False)):
        noisy = [seconds * (1 + away * (-1) ** turn) for turn, seconds in enumerate(drifting)]
        assert points.known(drifting, noisy) == enough
    assert points.known(drifting * 3, [s * (1 + 0.04 * (-1) ** t) for t, s in enumerate(drifting * 3)])


def test_losses_must_agree() -> None:
    p = made()
    results.check_losses(p)

    def with_losses(*losses: float) -> Any:
        return replace(p, arms={**p.arms, FSDP: replace(p.arms[FSDP], losses=losses)})

    results.check_losses(with_losses(2.0001, 1.04))
    with pytest.raises(
        EmulationError, match=r"step 0: the loss is 2\.0 .* and 2\.001 with 'FSDP2 proportional'"
    ):
        results.check_losses(with_losses(2.001, 1.0))
    with pytest.raises(EmulationError, match="step 1"):
        results.check_losses(with_losses(2.0, float("nan")))
    with pytest.raises(EmulationError, match="2 losses"):
        results.check_losses(with_losses(2.0))


def test_the_balanced_link() -> None:
    asked = []

    def measure(rate: float) -> tuple[float, float]:
        asked.append(rate)
        return 0.5, 1.25e7 / rate  # as long as it computes at 25 MB/s

    assert points.balanced(measure, 1.25e8) == pytest.approx(25e6)
    assert asked == pytest.approx([1.25e8, 25e6])
    assert points.balanced(lambda rate: (1.0, 100.0), 1.25e8) == points.QUICKEST, "no link is that fast"
    assert points.balanced(lambda rate: (1.0, 1e-6), 1.25e8) == points.SLOWEST
    assert points.on_grid(97e6 / 8) * 8 == pytest.approx(100e6)
    assert points.on_grid(17.5e6 / 8) * 8 == pytest.approx(16e6)


def test_slow_arms_are_timed_less() -> None:
    assert [points.steps_of(s, 3) for s in (0.1, 1.0, 1.9, 3.0, 7.0, 20.0)] == [3, 3, 2, 1, 1, 1]
    assert points.again({"a": 1.0, "b": 1.9, "c": 2.1}) == {"a", "b"}
    assert points.again({"a": 5.0, "b": 7.0, "c": 9.0}) == {"a", "b"}
    assert points.again({COMPILED: 1.0, DDP: 4.0, FORCED: 5.0, FSDP: 4.0}) == {COMPILED, DDP, FORCED}
    assert points.again({COMPILED: 1.0, DDP: 11.0, FORCED: 13.0}) == {COMPILED, DDP, FORCED}
    assert points.again({COMPILED: 1.0, DDP: 13.0, FORCED: 13.0}) == {COMPILED}


@pytest.mark.parametrize("rate", [1.25e8, 2.5e7])
def test_devices_have_the_memory_of_before_processes_held_any(
    rate: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    class Ranks:
        spec = CLUSTERS["2:1"]

        def set_rate(self, rate: float) -> None:
            asked["rate"] = rate

        def run(self, function: str, **of: Any) -> list[str]:
            asked.update(of, function=function)
            return ["devices: []"]

    options = argparse.Namespace(budget=45.0, link_budget=20.0)
    ranks: Any = Ranks()
    monkeypatch.setattr(command, "available", lambda: 6 << 30)
    bench = command.Bench("2:1", tmp_path, ranks, ranks, options)
    monkeypatch.setattr(command, "available", lambda: 1 << 30)
    file = bench._link(rate)
    assert asked == {
        "rate": rate, "function": "trust.rank:profile", "memory": float(3 << 30),
        "budget": 45.0 if rate == bench.start else 20.0,
    }  # fmt: skip
    asked.clear()
    assert bench._link(rate).read_text(encoding="utf-8") == "devices: []"
    assert file.exists()
    assert not asked, "profiled once"


def test_a_rate_is_measured_once() -> None:
    """Where the balanced link has the rate of another, that point counts for both."""
    point = made("BERT")
    done = [made("ViT"), replace(point, rate=2.5e7), point]
    assert results.at_rate(done, ("2:1", "BERT", "small"), 1.25e8 * (1 + 1e-9)) is point
    assert results.at_rate(done, ("2:1", "BERT", "small"), 5e7) is None
    assert results.at_rate(done, ("equal", "BERT", "small"), 1.25e8) is None
    assert results.at_rate(done, ("2:1", "BERT", "large"), 1.25e8) is None


def test_a_model_may_have_another_batch_over_a_balanced_link() -> None:
    assert size_over("balanced", "small", "VGG19") == "large"
    assert {size_over(link, "small", "VGG19") for link in LINKS} == {"small", "large"}
    assert all(size_over(link, "small", "BERT") == "small" for link in LINKS)
    assert all(size_over("balanced", size, "VGG19") == size for size in ("tiny", "large"))
    rows = statistics.table([made(), made(link="balanced"), made("BERT", link="balanced")]).splitlines()
    assert [row.split("|")[3].strip() for row in rows[2:]] == [
        "1 Gbit/s", "1 Gbit/s (balanced, 32 rows)", "1 Gbit/s (balanced)",
    ]  # fmt: skip


def test_names_choose() -> None:
    def of(*only: str) -> bool:
        return points.wanted("2:1", "BERT", "balanced", only or None, MODELS)

    assert of()
    assert of("2:1")
    assert of("BERT", "ViT", "balanced")
    assert not of("2:1", "BERT", "1Gbit/s")
    assert not of("equal", "BERT")


def test_the_product() -> None:
    assert len(CLUSTERS) * len(MODELS) * len(LINKS) == 48
    assert all(spec.cores < 2 for spec in CLUSTERS.values())
    assert all(set(of) == set(MODELS) for size, of in SIZES.items() if size != "fits")
    assert rate_command("eth0", 25e6, "change")[1] == "change"
    assert "200000000bit" in rate_command("eth0", 25e6)


def test_one_quota() -> None:
    assert all(spec.one_quota and spec.cores < 2 for spec in one_quota.CLUSTERS.values())
    assert not any(spec.one_quota for spec in CLUSTERS.values())
    rates = [[rank.rate for rank in spec.ranks] for spec in one_quota.CLUSTERS.values()]
    assert rates == [[125e6] * 4, [125e6] * 2]
    assert [check.holds for check in one_quota.checks([])] == [None, None]
    made_well = made("BERT", compiled=0.98)
    assert one_quota.off(made_well) == pytest.approx(0.98 / 0.9 - 1)
    assert [check.holds for check in one_quota.checks([made_well])] == [True, True]
    assert [check.holds for check in one_quota.checks([made_well, made("BERT", compiled=2.07)])] == [
        False,
        False,
    ]
    assert [check.holds for check in one_quota.checks([made("BERT", compiled=0.8)])] == [True, False], (
        "too slow a prediction"
    )
    assert "from +8.9% to +8.9%" in one_quota.summary([made_well], 8)


def test_the_link_of_one_profile_and_the_devices_of_another() -> None:
    def cluster(flops: float, bandwidth: float, lanes: int) -> Cluster:
        devices = tuple(Device(name, {"default": flops}) for name in "ab")
        return Cluster(devices, Network(bandwidth, 1e-3), lanes=lanes)

    def beside(of: Cluster, factor: float) -> Cluster:
        return replace(
            of, devices=tuple(replace(d, computing_slowdown={"default": factor}) for d in of.devices)
        )

    assert command.joined(cluster(1e9, 1e6, 1), cluster(2e9, 5e6, 2)) == cluster(1e9, 5e6, 2)
    ops, link = beside(cluster(1e9, 1e6, 1), 3.0), beside(cluster(2e9, 5e6, 2), 1.5)
    assert command.joined(ops, link) == beside(cluster(1e9, 5e6, 2), 1.5)


@pytest.mark.parametrize("name", MODELS)
def test_parts_of_a_model_make_the_whole_loss(name: str) -> None:
    """What DDP's weighting rests on: the loss of the batch is the weighted sum of its parts' losses."""
    work = workload(name, "tiny")
    assert all(isinstance(work.model.get_submodule(b), nn.Module) for b in work.blocks)
    assert len(work.blocks) >= 1
    rows = proportional_rows(work.rows, (2.0, 1.0))
    with torch.no_grad():
        whole = float(work.model(**work.batch))
        parts = [micro_batches(work, sum(rows[:rank]), rows[rank], 1)[0] for rank in range(2)]
        summed = sum(float(work.model(**part.batch)) * part.share for part in parts)
    assert summed == pytest.approx(whole, rel=1e-5)
    assert sum(part.share for part in parts) == pytest.approx(1.0)
    again = workload(name, "tiny")
    step = stepper(again.model, again.batch, adamw)
    assert float(step()) == pytest.approx(whole, rel=1e-5), "seeded"
    assert float(step()) < whole, "it learns"


def test_what_is_reported_was_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for p in (made("BERT", link="balanced"), made("BERT", cluster="equal"), replace(made(), size="large")):
        results.append(tmp_path, p)
    assert command.main(["--report", "--folder", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "2 of 48 points" in out
    assert "VGG19 | 2:1" not in out, "of another size"
    command.main(["--report", "--folder", str(tmp_path), "--only", "equal"])
    assert "1 of 48 points" in capsys.readouterr().out


def test_a_page_goes_on_where_it_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "cluster.md"
    page.write_text("<!-- results -->\n<!-- end of results -->\n", encoding="utf-8")
    monkeypatch.setattr(results, "KEPT", page.with_suffix(".jsonl"))
    results.append(tmp_path / "one", made("BERT"))
    results.append(tmp_path / "other", made("ViT"))
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- faster -->\nold\n<!-- end of faster -->\nafter\n", encoding="utf-8")
    for folder, count in (("one", 1), ("other", 2), ("none", 2)):
        pages = ["--write", str(page), "--readme", str(readme)]
        assert command.main(["--report", "--folder", str(tmp_path / folder), *pages]) == 0
        assert f"{count} of 48 points" in page.read_text(encoding="utf-8")
        text = readme.read_text(encoding="utf-8")
        assert f"(Of {count} of 48 points.)" in " ".join(text.split())
        assert text.startswith("before\n<!-- faster -->\n| speeds |")
        assert text.endswith("\n<!-- end of faster -->\nafter\n")
    capsys.readouterr()
    command.main(["--report", "--folder", str(tmp_path / "other")])
    assert "1 of 48 points" in capsys.readouterr().out, "what is printed alone was measured here"


@pytest.mark.parametrize("option", ["--write", "--readme"])
def test_a_page_without_marks_is_refused_at_once(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    for text, message in ((None, "there is no page"), ("text\n", "lacks the marks")):
        if text is not None:
            page.write_text(text, encoding="utf-8")
        with pytest.raises(SystemExit) as ended:
            command.main([option, str(page)])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err


def test_readme_says_what_the_points_say(tmp_path: Path) -> None:
    readme = " ".join((results.KEPT.parents[1] / "README.md").read_text(encoding="utf-8").split())
    kept = results.load(tmp_path, results.KEPT)
    assert len(kept) == len(CLUSTERS) * len(MODELS) * len(LINKS)

    def means(chosen: list[results.Point]) -> list[str]:
        even = [p.seconds(DDP_EVEN) / p.seconds(COMPILED) for p in chosen]
        columns = even, [statistics.over_ddp(p) for p in chosen], [statistics.over_best(p) for p in chosen]
        return [f"{geometric_mean(column):.2f}" for column in columns]

    for cluster in CLUSTERS:
        speeds = "1 : 1 : 1 : 1" if cluster == "equal" else cluster.replace(":", " : ")
        row = " | ".join((f"| {speeds}", *means([p for p in kept if p.cluster == cluster])))
        assert f"{row} |" in readme
    _, ddp, best = means([p for p in kept if p.model != "VGG19"])
    assert f"DDP takes {ddp} times as long as hetspmd, and the best of the others {best} times" in readme
    worst = 1 / min(statistics.over_best(p) for p in kept)
    assert f"At no point does hetspmd take more than {worst:.2f} times the best of the others" in readme
