"""Measure what is missing, then print and write the comparison.

    python benches/fits [--only 2:1 BERT ...] [--fresh] [--write docs/fits.md]

For each cluster: emulate it once, start its ranks once, profile it and its models' ops. For each model: count what
DDP and FSDP2 need, give the devices memory between the two, compile with ``micro_batches="auto"`` and
``recompute="auto"``, tune FSDP2 by hand, run the fastest of it and hetspmd's plan in turns, check that their losses
agree, write the point. As root, on Linux with iproute2 and the cpu controller of control groups; elsewhere the
bench says so and ends.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import hetspmd
from emulated.accumulation import Setting
from emulated.arms import proportional_rows
from emulated.command import measure_all, measure_missing, options_of, parsed, say
from emulated.memory import available
from fits import points as of
from fits import results
from fits.points import CLUSTERS, COMPILED, FINAL, LINK, MODELS, SIZE, Peaks, wanted
from fits.report import plan_words, summary, table, write
from hetspmd.cluster.cluster import Cluster
from hetspmd.codec.quantities import parse_quantity
from hetspmd.errors import MemoryLimitError, MicroBatchError
from hetspmd.plan.plan import Plan
from versus.command import BESIDE, COPIES, Bench
from versus.models import workload
from versus.points import QUICKEST
from versus.results import check_same, measured

Described = dict[str, Any]
"""An arm, as :func:`versus.rank.train` takes it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write. Exit status 0 also where no cluster can be emulated, with the reason."""
    parser = options_of(
        __doc__, folder=results.FOLDER, only="clusters and models", steps=(2, "timed steps of a turn, at most"),
        budget=90.0,
    )  # fmt: skip
    options = parsed(parser, [*CLUSTERS, *MODELS], arguments)
    options.link_budget = options.budget
    if not measure_all(options, CLUSTERS, _measure):
        return 0
    order = [(c, m) for m in MODELS for c in CLUSTERS]
    points = [
        p
        for p in results.load(options.folder, _kept(options))
        if wanted(p.cluster, p.model, options.only) and p.key in order
    ]
    if not points:
        print("nothing has been measured yet")
        return 0
    points.sort(key=lambda p: order.index(p.key))
    print(table(points))
    print(summary(points, len(order)))
    if options.write is not None:
        write(options.write, points, len(order))
    return 0


def _kept(options: argparse.Namespace) -> Any:
    """The points of the page, which need not be measured again for it."""
    return results.KEPT if options.write is not None and not options.fresh else None


def _measure(name: str, options: argparse.Namespace) -> None:
    """The points of a cluster that are wanted and have not been measured."""
    done = {p.key for p in results.load(options.folder, _kept(options))}
    missing = [m for m in MODELS if wanted(name, m, options.only) and (name, m) not in done]
    measure_missing(
        name, CLUSTERS[name], options, missing,
        lambda folder, emulated, workers: FitsBench(name, folder, emulated, workers, options).point,
    )  # fmt: skip


class FitsBench(Bench):
    """The points of one cluster, whose ranks are running."""

    def point(self, model: str) -> None:
        """Measure a point and keep it. Raises EmulationError if the losses of its arms differ."""
        work = workload(model, SIZE)
        parameters = sum(p.nbytes for p in work.model.parameters())
        most = available() / len(self.emulated.spec.ranks) / 2
        self.workers.run("versus.rank:hold", nbytes=int(min(COPIES * parameters + BESIDE, most)))
        cluster = Cluster.load(str(self._ops(model, SIZE)))
        speeds = [d.rate("float32") for d in cluster.devices]
        rows = {
            "even": proportional_rows(work.rows, [1.0] * len(speeds)),
            "proportional": proportional_rows(work.rows, speeds),
        }
        plain, need, least, limits = self._needs(model, rows, speeds)
        for what, figures in (("limits", limits), ("DDP", plain), ("leanest", need), ("FSDP2", least)):
            say(f"  {what}: {_megabytes(figures)}")
        given = [float(limit - of.OWN) for limit in limits]
        devices = tuple(replace(d, memory=m) for d, m in zip(cluster.devices, given, strict=True))
        plan, failure = _compiled(model, replace(cluster, devices=devices))
        if plan is not None:
            say(f"  hetspmd: {plan_words(plan, work.rows)}; predicted {plan.cost.step_seconds:.3f} s")
            plan.save(self._file(model, SIZE, LINK, COMPILED))
        arms, held, tried = self._tuned_by_hand(model, rows, limits)
        words = {name: name for name in arms}
        final = {name: arms[name] for name in fastest(tried)}
        if plan is not None:
            file = self._file(model, SIZE, LINK, COMPILED)
            final[COMPILED] = {"arm": "hetspmd", "rows": None, "plan": str(file)}
            words[COMPILED] = plan_words(plan, work.rows)
            held[COMPILED] = self._peaks(model, final[COMPILED])
            say(f"  hetspmd: {_megabytes(held[COMPILED])}, predicted {_megabytes(plan.cost.memory_bytes)}")
        del work
        gc.collect()
        timed = self._in_turns(model, final, parameters)
        point = results.Point(
            self.name, model, limits, plain, need, least, tried,
            {n: results.Arm(words[n], *timed[n], held[n]) for n in final},
            0.0 if plan is None else plan.cost.step_seconds,
            () if plan is None else tuple(map(int, plan.cost.memory_bytes)), failure,
        )  # fmt: skip
        results.append(self.options.folder, point)
        for name in final:
            say(f"  {point.arms[name].median:.3f} s: {name}")

    def _needs(
        self, model: str, rows: Mapping[str, list[int]], speeds: Sequence[float]
    ) -> tuple[Peaks, Peaks, Peaks, Peaks]:
        """Bytes of each rank: of DDP with all rows at once, of DDP at its leanest, of FSDP2 at its leanest; and the
        limits."""
        cases = (
            ("ddp", "proportional", Setting()),
            ("ddp", "proportional", of.leanest(rows["proportional"])),
            ("fsdp", "even", of.leanest(rows["even"])),
        )
        plain, need, least = (
            self._peaks(model, described(arm, rows[how], setting)) for arm, how, setting in cases
        )
        return plain, need, least, of.limits(least, need, speeds)

    def _tuned_by_hand(
        self, model: str, rows: Mapping[str, list[int]], limits: Peaks
    ) -> tuple[dict[str, Described], dict[str, Peaks], dict[str, float]]:
        """FSDP2 with each setting that fits, the bytes that each rank then holds, and the seconds of a step; the
        fastest of them also with gathers ahead, if these fit."""
        arms: dict[str, Described] = {}
        held: dict[str, Peaks] = {}
        tried: dict[str, float] = {}

        def peaks(how: str, setting: Setting) -> Peaks:
            found = self._peaks(model, described("fsdp", rows[how], setting))
            say(f"  {how}, {setting}: {_megabytes(found)}")
            return found

        def enter(how: str, setting: Setting, found: Peaks) -> None:
            name = f"FSDP2, {how} rows, {setting}"
            arms[name], held[name] = described("fsdp", rows[how], setting), found
            tried[name] = self._run("pace", model, arms[name])[0]
            chosen[name] = how, setting
            say(f"  {tried[name]:.3f} s: {name}, {_megabytes(found)}")

        chosen: dict[str, tuple[str, Setting]] = {}
        for how, own in rows.items():
            for setting, found in of.fitting(own, limits, partial(peaks, how)).items():
                enter(how, setting, found)
        for how, setting in [chosen[name] for name in fastest(tried)]:
            ahead = replace(setting, ahead=True)
            if of.within(found := peaks(how, ahead), limits):
                enter(how, ahead, found)
        return arms, held, tried

    def _peaks(self, model: str, arm: Described) -> Peaks:
        """Bytes that each rank holds, counted over links that are fast."""
        self.emulated.set_rate(QUICKEST)
        found = tuple(self._run("peak", model, arm))
        self.emulated.set_rate(parse_quantity(LINK, "bytes/s"))
        return found

    def _in_turns(
        self, model: str, arms: Mapping[str, Described], parameters: int
    ) -> dict[str, tuple[tuple[float, ...], tuple[float, ...]]]:
        """Of each arm the seconds of its timed steps and the losses of its first two."""
        world = len(self.emulated.spec.ranks)
        keep = parameters * COPIES * len(arms) * world < available() / 2
        found = self.workers.run(
            "versus.rank:train", model=model, size=SIZE, arms=arms, fastest=self.emulated.spec.fastest,
            rounds=self.options.rounds, steps=self.options.steps, keep=keep,
        )  # fmt: skip
        timed = {
            name: measured([rank[name] for rank in found], summed=arm["arm"] == "fsdp")
            for name, arm in arms.items()
        }
        check_same({name: arm.losses for name, arm in timed.items()}, f"{model} on {self.name}")
        return {name: (arm.seconds, arm.losses) for name, arm in timed.items()}

    def _run(self, what: str, model: str, arm: Described) -> list[Any]:
        """A function of :mod:`fits.rank` on all ranks."""
        return self.workers.run(f"fits.rank:{what}", model=model, size=SIZE, arm=arm)


def fastest(tried: Mapping[str, float]) -> list[str]:
    """The settings that take turns with hetspmd, by the seconds of a first step of each."""
    return sorted(tried, key=tried.__getitem__)[:FINAL]


def described(arm: str, rows: Sequence[int], setting: Setting) -> Described:
    """An arm of data parallelism."""
    return {"arm": arm, "rows": list(rows), "plan": None, "setting": asdict(setting)}


def _compiled(model: str, cluster: Cluster) -> tuple[Plan | None, str]:
    """The plan of a model, or why there is none."""
    work = workload(model, SIZE)
    try:
        return (
            hetspmd.compile(
                work.model, dict(work.batch), cluster, micro_batches="auto", recompute="auto"
            ),
            "",
        )  # fmt: skip
    except (MemoryLimitError, MicroBatchError) as error:
        return None, str(error)


def _megabytes(peaks: Sequence[float]) -> str:
    return "[" + ", ".join(f"{peak / 1e6:.0f}" for peak in peaks) + "] MB"
