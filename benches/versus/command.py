"""Measure what is missing, then print and write the comparison.

    python benches/versus [--only 2:1 BERT balanced ...] [--size large] [--fresh] [--write docs/cluster.md]
                           [--readme README.md]

For each cluster: emulate it once and start its ranks once; profile it and its models' ops over the first link, and
the collectives over every further link. For each model and link: make the plans, run all arms in turns, check that
their losses agree, write the point. As root, on Linux with iproute2 and the cpu controller of control groups;
elsewhere the bench says so and ends.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import hetspmd
from emulated.arms import proportional_rows
from emulated.cluster import EmulatedCluster
from emulated.command import measure_all, measure_missing, options_of, parsed, say
from emulated.launch import Workers
from emulated.memory import available
from emulated.pages import FASTER, lacking, replace_results
from emulated.spec import ClusterSpec
from emulated.workloads import Workload
from hetspmd.cluster.cluster import Cluster
from hetspmd.codec.files import write_atomically
from hetspmd.codec.quantities import parse_quantity
from hetspmd.optimize.compiler import plan_for
from hetspmd.plan.plan import Plan
from hetspmd.rules.theory import derive
from hetspmd.search import constraints as known
from hetspmd.trace.trace import trace
from hetspmd.tune.alternatives import alternatives
from versus import one_quota, results
from versus.models import MODELS, OPTIMIZERS, SIZES, size_over, workload
from versus.points import (
    ALONE,
    ARMS,
    BALANCED,
    CLUSTERS,
    COMPILED,
    DDP,
    DDP_EVEN,
    FASTEST_LINK,
    FORCED,
    FSDP,
    FSDP_EVEN,
    LINKS,
    balanced,
    wanted,
)
from versus.report import write
from versus.statistics import overview, summary, table

COPIES = 5
"""Times its parameters that an arm holds, at most: them, gradients, two moments, and the reducer's buckets."""
BESIDE = 512 << 20
"""Bytes of activations and of the operands of a profile."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write. Exit status 0 also where no cluster can be emulated, with the reason."""
    parser = options_of(
        __doc__, folder=results.FOLDER, only="clusters, models and links",
        steps=(2, "timed steps of a turn, at most"), budget=120.0,
    )  # fmt: skip
    sizes = [size for size, models in SIZES.items() if set(MODELS) <= set(models)]
    parser.add_argument("--size", choices=sizes, default="small", help="of the models")
    parser.add_argument(
        "--readme", type=Path, metavar="FILE", help="a page with a table of the means to replace"
    )
    parser.add_argument(
        "--one-quota",
        action="store_true",
        help="a rank's CPU share pays for the threads that carry messages, too; hetspmd's plan is not tuned",
    )
    parser.add_argument("--link-budget", type=float, default=20.0, help="seconds of a further link's profile")
    options = parsed(parser, [*CLUSTERS, *MODELS, *LINKS], arguments)
    if options.readme is not None and (problem := lacking(options.readme, FASTER)):
        parser.error(problem)
    if options.one_quota and options.readme is not None:
        parser.error("README has no table of clusters of one quota; leave out --readme")
    if options.one_quota and options.folder == results.FOLDER:
        options.folder = results.FOLDER / "one quota"
    clusters, links = _clusters(options)
    if not measure_all(options, clusters, _measure):
        return 0
    order = [(c, m, link) for m in MODELS for c in clusters for link in links]
    points = [
        p
        for p in results.load(options.folder, _kept(options))
        if p.size == options.size and wanted(p.cluster, p.model, p.link, options.only, MODELS)
    ]
    if not points:
        print("nothing has been measured yet")
        return 0
    points.sort(key=lambda p: order.index((p.cluster, p.model, p.link)))
    print(table(points))
    text = one_quota.summary(points, len(order)) if options.one_quota else summary(points, len(order))
    print(text)
    if options.write is not None:
        write(options.write, points, text)
    if options.readme is not None:
        replace_results(options.readme, overview(points, len(order)), FASTER)
    return 0


def _kept(options: argparse.Namespace) -> Path | None:
    """The points of the pages, which need not be measured again for it."""
    of_pages = options.write is not None or options.readme is not None
    kept = one_quota.KEPT if options.one_quota else results.KEPT
    return kept if of_pages and not options.fresh else None


def _clusters(options: argparse.Namespace) -> tuple[Mapping[str, ClusterSpec], Sequence[str]]:
    """The clusters and the links."""
    return (one_quota.CLUSTERS, one_quota.LINKS) if options.one_quota else (CLUSTERS, LINKS)


def _measure(name: str, options: argparse.Namespace) -> None:
    """The points of a cluster that are wanted and have not been measured."""
    done = {p.key for p in results.load(options.folder, _kept(options))}
    clusters, links = _clusters(options)
    missing = [
        (model, link)
        for model in MODELS
        for link in links
        if wanted(name, model, link, options.only, MODELS) and (name, model, options.size, link) not in done
    ]
    measure_missing(
        name, clusters[name], options, missing,
        lambda folder, emulated, workers: Bench(name, folder, emulated, workers, options).measure,
    )  # fmt: skip


class Bench:
    """The points of one cluster, whose ranks are running."""

    def __init__(
        self,
        name: str,
        folder: Path,
        emulated: EmulatedCluster,
        workers: Workers,
        options: argparse.Namespace,
    ) -> None:
        self.name, self.folder = name, folder
        self.emulated, self.workers, self.options = emulated, workers, options
        self.start = parse_quantity(FASTEST_LINK, "bytes/s")
        # Processes hold a model's memory later, which would bind hetspmd's plans and no other arm.
        self.memory = float(available() // len(emulated.spec.ranks))

    def measure(self, of: tuple[str, str]) -> None:
        """All arms of a point, a model and a link; raises EmulationError if their losses differ."""
        (model, link), options = of, self.options
        size = size_over(link, options.size, model)
        work = workload(model, size)
        parameters = sum(p.nbytes for p in work.model.parameters())
        most = available() / len(self.emulated.spec.ranks) / 2
        self.workers.run("versus.rank:hold", nbytes=int(min(COPIES * parameters + BESIDE, most)))
        ops = Cluster.load(str(self._ops(model, size)))
        speeds = [d.rate("float32") for d in ops.devices]
        rows = {True: proportional_rows(work.rows, [1.0] * len(speeds))}
        rows[False] = proportional_rows(work.rows, speeds)
        rate = (
            parse_quantity(link, "bytes/s") if link != BALANCED else self._balanced(model, size, rows[False])
        )
        points = results.load(options.folder, _kept(options))
        done = [p for p in points if size_over(p.link, p.size, p.model) == size]
        if (same := results.at_rate(done, (self.name, model, options.size), rate)) is not None:
            say(f"{self.name}, {model}, {rate * 8 / 1e6:g} Mbit/s has been measured: {same.link}")
            results.append(options.folder, replace(same, link=link))
            return
        computing, communicating = self._apart(model, size, rows[False], rate)
        cluster = joined(ops, Cluster.load(str(self._link(rate))))
        say(f"{self.name}, {model}, {rate * 8 / 1e6:g} Mbit/s: plans")
        theory = derive(trace(work.model, (), dict(work.batch)))
        ratios = tuple(r / work.rows for r in rows[False])
        self.emulated.set_rate(rate)
        plans = {
            FORCED: plan_for(theory, cluster, known.data_parallel(theory), ratios),
            COMPILED: self._plan(model, size, link, work, cluster),
        }
        arms: dict[str, dict[str, Any]] = {
            ALONE: {"arm": "alone", "rows": None, "plan": None},
            DDP_EVEN: {"arm": "ddp", "rows": rows[True], "plan": None},
            DDP: {"arm": "ddp", "rows": rows[False], "plan": None},
            FSDP_EVEN: {"arm": "fsdp", "rows": rows[True], "plan": None},
            FSDP: {"arm": "fsdp", "rows": rows[False], "plan": None},
        }
        for arm, plan in plans.items():
            file = self._file(model, size, link, arm)
            plan.save(file)
            arms[arm] = {"arm": "hetspmd", "rows": None, "plan": str(file)}
            say(f"  {arm}: predicted {plan.cost.step_seconds:.3f} s")
        keep = parameters * COPIES * len(arms) * len(speeds) < available() / 2
        predicted = {arm: plan.cost.step_seconds for arm, plan in plans.items()}
        del work, theory, plans
        gc.collect()  # the ranks need the memory
        found = self.workers.run(
            "versus.rank:train", model=model, size=size, arms=arms, fastest=self.emulated.spec.fastest,
            rounds=options.rounds, steps=options.steps, keep=keep,
        )  # fmt: skip
        measured = {
            arm: results.measured(
                [r[arm] for r in found],
                summed=arms[arm]["arm"] in ("ddp", "fsdp"),
                predicted=predicted.get(arm),
            )
            for arm in ARMS
        }
        point = results.Point(
            self.name, model, options.size, link, rate, computing, communicating, measured
        )  # fmt: skip
        results.check_losses(point)
        results.append(options.folder, point)
        for arm in ARMS:
            say(f"  {arm}: {point.seconds(arm):.3f} s")

    def _plan(self, model: str, size: str, link: str, work: Workload, cluster: Cluster) -> Plan:
        """hetspmd's: tuned, unless the cluster is one of one quota."""
        if self.options.one_quota:
            return hetspmd.compile(work.model, dict(work.batch), cluster)
        return self._tuned(model, size, link, alternatives(work.model, (), dict(work.batch), cluster))

    def _tuned(self, model: str, size: str, link: str, plans: Mapping[str, Plan]) -> Plan:
        """The plan that :func:`hetspmd.tune` takes, as the ranks measure them."""
        files = {}
        for name, plan in plans.items():
            files[name] = str(self._file(model, size, link, f"tried {name}"))
            plan.save(files[name])
        chosen, seconds = self.workers.run(
            "versus.rank:choose", model=model, size=size, plans=files, steps=4
        )[0]
        for name, measured in seconds.items():
            say(f"  {name}: {measured:.3f} s, predicted {plans[name].cost.step_seconds:.3f} s")
        return plans[chosen]

    def _file(self, model: str, size: str, link: str, arm: str) -> Path:
        return self.folder / f"{model} {size} {link} - {arm}.json".replace("/", " per ")

    def _balanced(self, model: str, size: str, rows: list[int]) -> float:
        """The rate, in bytes/s, at which proportional DDP communicates as long as it computes."""
        return balanced(lambda rate: self._apart(model, size, rows, rate), self.start)

    def _apart(self, model: str, size: str, rows: list[int], rate: float) -> tuple[float, float]:
        """Medians over repeats of the slowest rank's seconds, computing and communicating, over links of a rate."""
        self.emulated.set_rate(rate)
        found = self.workers.run("versus.rank:apart", model=model, size=size, rows=rows, repeats=3)
        computing, communicating = (
            median(map(max, zip(*(rank[what] for rank in found), strict=True)))
            for what in ("computing", "communicating")
        )
        say(
            f"{self.name}, {model}, {rate * 8 / 1e6:g} Mbit/s: computes {computing:.3f} s, communicates "
            f"{communicating:.3f} s"
        )
        return computing, communicating

    def _link(self, rate: float) -> Path:
        """The profile of the cluster over links of a rate."""
        file = self.folder / f"{rate * 8 / 1e6:g} Mbit.yaml"
        if not file.exists():
            say(f"{self.name}, {rate * 8 / 1e6:g} Mbit/s: profile")
            self.emulated.set_rate(rate)
            budget = self.options.budget if rate == self.start else self.options.link_budget
            found = self.workers.run("trust.rank:profile", budget=budget, memory=self.memory)
            write_atomically(file, found[0])
        return file

    def _ops(self, model: str, size: str) -> Path:
        """The profile over the first link with the times of a model's ops, which no link changes."""
        file = self.folder / f"{model} {size}.yaml"
        if not file.exists():
            whole = self._link(self.start)
            say(f"{self.name}, {model}: profile of its ops")
            self.emulated.set_rate(self.start)
            text = self.workers.run(
                "trust.rank:profile_ops", file=str(whole), model=model, cache=str(self.folder / "cache"),
                budget=self.options.ops_budget, options=dict(SIZES[size][model]),
                optimizer=OPTIMIZERS[model],
            )[0]  # fmt: skip
            write_atomically(file, text)
        return file


def joined(ops: Cluster, link: Cluster) -> Cluster:
    """The devices and ops of one profile, the collectives of another of the same cluster, and what these and
    computing take from each other."""
    devices = tuple(
        replace(d, computing_slowdown=on.computing_slowdown, collective_slowdown=on.collective_slowdown)
        for d, on in zip(ops.devices, link.devices, strict=True)
    )
    return replace(ops, devices=devices, network=link.network, curves=link.curves, lanes=link.lanes)
