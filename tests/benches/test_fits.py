"""What the bench of limited memory makes of its counts and points, without an emulated cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from emulated.accumulation import Setting, micro_batches, recompute_blocks
from emulated.arms import accumulating, stepper
from fits import command, points, report, results
from fits.points import COMPILED
from versus.models import MODELS, SIZES, workload
from versus.rank import adamw

GB = 10**9


def test_limits_lie_between_what_fsdp_and_what_ddp_need() -> None:
    assert points.limits((100, 100, 80), (200, 180, 160), (4.0, 2.0, 1.0)) == (150, 120, 100)
    assert points.limits((100, 100), (200, 200), (1.0, 1.0)) == (150, 150), "equal devices are all large"
    with pytest.raises(ValueError, match="needs"):
        points.limits((100, 100), (200, 100), (2.0, 1.0))


@pytest.mark.parametrize(("rows", "counts"), [([1, 1], [1]), ([5, 3], [1, 2, 4, 5]), ([8, 1], [1, 2, 4, 8])])
def test_the_micro_batch_is_halved(rows: list[int], counts: list[int]) -> None:
    assert points.halved(rows) == counts


def peaks(setting: Setting) -> tuple[int, int]:
    """Of a model of 40 bytes, and activations of 160, of which a quarter is held with recomputation."""
    held = 40 if setting.reshard else 60
    held += 0 if setting.sync_each or setting.micro_batches == 1 else 30
    held += 160 // setting.micro_batches // (4 if setting.recompute else 1)
    return held, held // 2


def test_every_setting_has_the_fewest_micro_batches_that_fit() -> None:
    asked: list[Setting] = []

    def counted(setting: Setting) -> tuple[int, int]:
        asked.append(setting)
        return peaks(setting)

    found = points.fitting([16, 4], (90, 90), counted)
    assert found == {
        Setting(1, True, True, True): (80, 40),
        Setting(2, True, False, True): (80, 40),
        Setting(4, False, True, True): (80, 40),
        Setting(8, False, False, True): (80, 40),
        Setting(8, False, True, False): (90, 45),
    }
    assert len(asked) == len(set(asked)), "nothing is counted twice"
    assert points.fitting([16, 4], (30, 30), peaks) == {}
    assert all(s.recompute for s in asked if not s.reshard and not s.sync_each and s.micro_batches > 1)


def test_halving_ends_where_it_is_hopeless() -> None:
    assert not points.hopeless((), (200, 90), (90, 90)), "the first"
    assert not points.hopeless((110, 90), (100, 90), (90, 90)), "it may save another ten"
    assert points.hopeless((110, 90), (100, 90), (89, 90))
    assert points.hopeless((80, 90), (80, 91), (90, 90)), "nothing is saved"


def test_micro_batches_are_the_step() -> None:
    """Rows in turns, blocks computed again, turns without rows: losses and gradients are the whole batch's."""
    work = workload("BERT", "tiny")
    step = stepper(work.model, work.batch, adamw)
    whole = float(step()), float(step())
    for setting in (Setting(), Setting(3, recompute=True), Setting(16)):
        work = workload("BERT", "tiny")
        parts = micro_batches(work, 0, work.rows, setting.micro_batches)
        assert len(parts) == setting.micro_batches
        assert sum(part.share for part in parts) == pytest.approx(1.0)
        if setting.recompute:
            recompute_blocks(work)
        step = accumulating(work.model, parts, 1.0, adamw, setting)
        assert (float(step()), float(step())) == pytest.approx(whole, rel=1e-4), setting


def test_settings_in_words() -> None:
    assert str(Setting()) == "1 micro-batch, resharding"
    lean = Setting(4, recompute=True, reshard=False, sync_each=True, ahead=True)
    assert str(lean) == "4 micro-batches, recomputation, no resharding, reduced in each, gathered ahead"
    assert points.leanest([3, 5]) == Setting(5, recompute=True, reshard=True, sync_each=True)
    assert command.fastest({"a": 3.0, "b": 1.0, "c": 2.0}) == ["b", "c"]


def arm(words: str, seconds: float, held: tuple[int, ...] = (GB, GB)) -> results.Arm:
    return results.Arm(words, (seconds - 0.1, seconds, seconds + 0.3), (2.0, 1.0), held)


POINT = results.Point(
    "2:1", "BERT", (2 * GB, GB), (4 * GB, 3 * GB), (3 * GB, 3 * GB), (GB, GB // 2),
    {"FSDP2, a": 2.0, "FSDP2, b": 3.0},
    {"FSDP2, b": arm("b", 3.0), "FSDP2, a": arm("a", 2.0), COMPILED: arm("rows", 1.6)}, 1.5, (GB, GB),
)  # fmt: skip


def test_ratios_and_checks() -> None:
    assert POINT.best == "FSDP2, a"
    assert POINT.ratio == pytest.approx(1.25)
    slower = replace(POINT, model="ViT", arms={**POINT.arms, COMPILED: arm("rows", 2.1)})
    assert [check.holds for check in report.checks([POINT])] == [True, True, True]
    assert [check.holds for check in report.checks([POINT, slower])] == [False, False, True]
    beyond = replace(POINT, arms={**POINT.arms, COMPILED: arm("rows", 1.0, (GB, GB + 1))})
    assert beyond.over == (1,)
    assert beyond.ratio is None
    assert [check.holds for check in report.checks([POINT, beyond])] == [False, False, False]
    assert "does not fit on rank 1" in report.table([beyond])
    arms = {name: own for name, own in POINT.arms.items() if name != COMPILED}
    none = replace(POINT, arms=arms, failure="no program was found", expected=())
    assert none.ratio is None
    assert "no plan fits" in report.table([none])
    assert "hetspmd fits at 1 of them" in report.summary([POINT, none], 12)


def test_points_are_kept_and_written(tmp_path: Path) -> None:
    results.append(tmp_path, POINT)
    assert results.load(tmp_path) == [POINT]
    page = tmp_path / "fits.md"
    page.write_text("before\n<!-- results -->\nold\n<!-- end of results -->\nafter\n", encoding="utf-8")
    report.write(page, [POINT], 12)
    text = page.read_text(encoding="utf-8")
    assert "old" not in text
    assert "1 of 12 points measured" in text
    assert "| 2000, 1000 | 4000, 3000 | 3000, 3000 | 1000, 500 | FSDP2, a | 2.000 |" in text
    assert "| BERT | 2:1 | FSDP2, b | 3.000 |" in text
    assert results.load(tmp_path / "none", page.with_suffix(".jsonl")) == [POINT]


def test_what_is_wanted() -> None:
    assert points.wanted("2:1", "BERT", None)
    assert points.wanted("2:1", "BERT", ["2:1"])
    assert not points.wanted("2:1", "BERT", ["2:1", "ViT"])
    assert set(points.MODELS) == set(SIZES[points.SIZE])
    assert set(MODELS) <= set(SIZES["small"])
