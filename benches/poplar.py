"""Poplar's evaluation (AAAI 2025, Figs. 3 and 4) in this cost model: predicted TFLOP/s of a training step.

    python benches/poplar.py [--write docs/reproduction.md]
    python benches/poplar.py --models NAME ... --clusters NAME ...

Nothing is measured here; every number is a prediction, the same in every run. ``--write`` replaces the tables
between their marks in a file. What is predicted of what is in :mod:`poplar_testbed`.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import torch

from hetspmd.cluster.cluster import Cluster
from hetspmd.codec.files import write_atomically
from hetspmd.errors import MemoryLimitError
from hetspmd.optimize.candidate import Candidate
from hetspmd.optimize.compile_options import CompileOptions
from hetspmd.optimize.compiler import compile_plan
from hetspmd.optimize.in_micro_batches import composed, in_micro_batches
from hetspmd.optimize.prefetch import further, storage_axes, stored_evenly
from hetspmd.optimize.synthesis import Synthesis
from hetspmd.optimize.synthesize import candidate_at
from hetspmd.optimize.zero_levels import repeated_in
from hetspmd.plan.plan import Plan
from hetspmd.program.lengths import Ratios, by_segment, lengths_for
from hetspmd.rules.theory import Theory
from hetspmd.search.constraints import zero
from hetspmd.search.search import Limits

sys.path.append(str(Path(__file__).parent))

import poplar_testbed as bed
from reproduction import replaced

LEVELS: Final = (0, 1, 2, 3)
TABLES: Final = {
    "poplar clusters": (bed.WORKLOADS[:1], bed.TESTBEDS, LEVELS),
    "poplar models": (bed.WORKLOADS[1:], bed.TESTBEDS, LEVELS),
    "poplar links": (bed.WORKLOADS[2:], (bed.SLOWER,), (1, 2, 3)),
}
"""Of each table (Fig. 3, Fig. 4, a slower link) the models, the clusters, and the levels of ZeRO."""
NONE: Final = "does not fit"
SAID: Final = {
    ("Llama 0.5B", "A"): "Whale as DeepSpeed; Poplar faster",
    ("Llama 0.5B", "B"): "Poplar faster than both",
    ("Llama 0.5B", "C"): "Poplar faster than both",
    ("Llama 1.1B", "C"): "up to 2.27x over DeepSpeed, 1.14x over Whale",
    ("BERT 1.1B", "C"): "up to 3.92x over DeepSpeed, 1.98x over Whale",
}
"""What the paper's text says; its figures are pictures. The cluster of the last two it does not name."""


@dataclass(frozen=True)
class Arm:
    """A prediction: seconds of a step, and the turns of each kind of GPU with the most rows of one, in words."""

    seconds: float
    turns: str


# systems --------------------------------------------------------------------------------------------------


def even(testbed: bed.Testbed) -> Ratios:
    """DeepSpeed: as many rows on every GPU."""
    return (1 / len(testbed.each),) * len(testbed.each)


def by_flops(testbed: bed.Testbed) -> Ratios:
    """Whale: rows in proportion to FLOP/s in single precision, its only measure of a GPU."""
    total = sum(gpu.single for gpu in testbed.each)
    return tuple(gpu.single / total for gpu in testbed.each)


class InTurns:
    """Data parallelism at a level of ZeRO in turns of all devices, whose rows are in given shares; parameters are
    stored in even shards."""

    def __init__(self, theory: Theory, cluster: Cluster, level: int, ratios: Ratios) -> None:
        self.theory, self.cluster, self.level, self.ratios = theory, cluster, level, ratios
        self._stored: frozenset[int] | None = None if level and len(set(ratios)) > 1 else frozenset()

    def at(self, count: int) -> Candidate:
        """The candidate in so many turns, whether it fits or not."""
        theory, batches = in_micro_batches(self.theory, count)
        constraints = composed(theory, batches, zero(theory, self.level))
        ctx = Synthesis(theory, self.cluster, constraints, Limits(), batches=batches)
        ctx = ctx.with_repeated(repeated_in(theory, batches, self.level))
        matrix = by_segment(self.ratios, theory.axes.segments)
        lengths = lengths_for(theory.axes, matrix)
        if self._stored is None:
            program = candidate_at(ctx, matrix, lengths, ctx.everyone).program
            self._stored = storage_axes(theory, program)
        lengths = stored_evenly(theory, lengths, matrix, self._stored) if self._stored else lengths
        return candidate_at(ctx, matrix, lengths, ctx.everyone)

    def fewest(self, rows: int) -> int | None:
        """The fewest turns that fit of a batch of so many rows; None where a row at a time does not fit. What is
        held is nearly linear in the rows of a turn, so that two numbers tell a third."""
        least, most = 0, -(-rows // round(1 / max(self.ratios)))
        found = self.at(most)
        if not found.fits:
            return None
        seen = [(1 / most, self._part(found))]
        guess = max(most // 4, 1)
        while most - least > 1:
            other = self.at(guess)
            if other.fits:
                most = guess
            else:
                least = guess
            seen.append((1 / guess, self._part(other)))
            (one, low), (two, high) = seen[-2:]
            full = one + (1 - low) * (two - one) / (high - low) if high != low else 1.0
            guess = min(max(math.ceil(1 / full - 1e-9) if full > 0 else most, least + 1), most - 1)
        return most

    def _part(self, found: Candidate) -> float:
        """The largest part of a device's memory that is held."""
        held = zip(found.cost.memory_bytes, self.cluster.devices, strict=True)
        return max(nbytes / device.memory for nbytes, device in held)


def forced(workload: bed.Workload, testbed: bed.Testbed, level: int, ratios: Ratios) -> Arm | None:
    """Such a program in the fewest turns that fit, as both systems were set by hand in the paper, with gathers as
    far ahead as is best; None where a row at a time does not fit."""
    theory, rows = bed.theory_of(workload, workload.rows), workload.rows
    count = InTurns(theory, bed.cluster_of(testbed, workload, level), level, ratios).fewest(rows)
    if count is None:
        return None
    at_once = [-(-round(share * rows) // count) for share in ratios]
    cluster = bed.cluster_of(testbed, workload, level, at_once)
    found = InTurns(theory, cluster, level, ratios).at(count)
    found = further(found.evaluator.ctx, found.step.model, found) or found
    return Arm(found.seconds, _turns(cluster, ratios, (count,) * cluster.world, rows))


def planned(theory: Theory, cluster: Cluster, level: int | None, rows: int) -> Arm | None:
    """What ``hetspmd.compile(..., micro_batches="auto", zero=level)`` finds; None where nothing fits."""
    options = CompileOptions(micro_batches="auto", zero=level)  # type: ignore[arg-type]  # one of the levels
    try:
        plan: Plan = compile_plan(None, (), {}, cluster, options, traced=theory.graph)  # type: ignore[arg-type]  # traced
    except MemoryLimitError:
        return None
    turns = plan.own_turns or (plan.micro_batches,) * len(plan.active)
    return Arm(plan.cost.step_seconds, _turns(cluster, plan.ratios[0], turns, rows, plan.active))


def _turns(
    cluster: Cluster, ratios: Ratios, turns: Sequence[int], rows: int, active: Sequence[int] | None = None
) -> str:
    """``12 x 15 + 9 x 9``: of each kind of GPU the turns and the most rows of one."""
    said: dict[str, str] = {}
    for rank, share, count in zip(active or range(cluster.world), ratios, turns, strict=True):
        said.setdefault(cluster.devices[rank].name, f"{count} x {-(-round(share * rows) // count)}")
    return " + ".join(said.values())


# table ----------------------------------------------------------------------------------------------------


@cache
def arms(workload: bed.Workload, testbed: bed.Testbed, level: int) -> dict[str, Arm | None]:
    """Every system at a level of ZeRO."""
    cluster, theory = bed.cluster_of(testbed, workload, level), bed.theory_of(workload, workload.rows)
    found = {
        name: forced(workload, testbed, level, shares(testbed))
        for name, shares in (("even", even), ("by FLOP/s", by_flops))
    }
    return {**found, "hetspmd": planned(theory, cluster, level, workload.rows)}


@cache
def free(workload: bed.Workload, testbed: bed.Testbed) -> Arm | None:
    """hetspmd where nothing is asked for."""
    cluster, theory = bed.cluster_of(testbed, workload, None), bed.theory_of(workload, workload.rows)
    return planned(theory, cluster, None, workload.rows)


def _rate(workload: bed.Workload, arm: Arm | None) -> str:
    if arm is None:
        return NONE
    return f"{bed.model_flops(workload) / arm.seconds / 1e12:.0f} ({arm.turns})"


def _over(arm: Arm | None, other: Arm | None) -> str:
    return "-" if arm is None or other is None else f"{other.seconds / arm.seconds:.2f}x"


def table(
    workloads: Sequence[bed.Workload], testbeds: Sequence[bed.Testbed], levels: Sequence[int] = LEVELS
) -> Iterator[str]:
    """The lines of the table: TFLOP/s of all GPUs together, and in parentheses the turns."""
    yield (
        "| model | cluster | ZeRO | even (DeepSpeed) | by FLOP/s (Whale) | hetspmd | over even | over by FLOP/s | "
        "the paper |"
    )
    yield "|---|---|---|--:|--:|--:|--:|--:|---|"
    for workload in workloads:
        for testbed in testbeds:
            said = SAID.get((workload.name, testbed.name), "")
            found = {level: arms(workload, testbed, level) for level in levels}
            best = [
                min((a for by in found.values() if (a := by[name])), key=lambda a: a.seconds, default=None)
                for name in ("even", "by FLOP/s")
            ]
            for level, by in found.items():
                others, own = [by["even"], by["by FLOP/s"]], by["hetspmd"]
                yield _line(workload, testbed, str(level), others, own, said)
                said = ""
            yield _line(workload, testbed, "free", best, free(workload, testbed), "")


def _line(
    workload: bed.Workload,
    testbed: bed.Testbed,
    level: str,
    others: Sequence[Arm | None],
    own: Arm | None,
    said: str,
) -> str:
    rates = [_rate(workload, arm) for arm in (*others, own)]
    cells = [workload.name, testbed.name, level, *rates, *(_over(own, other) for other in others), said]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the tables, or write them into a file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    models, clusters = (
        [each.name for each in every] for every in (bed.WORKLOADS, (*bed.TESTBEDS, bed.SLOWER))
    )
    parser.add_argument("--models", nargs="+", choices=models, help="one table of these, on all clusters")
    parser.add_argument("--clusters", nargs="+", choices=clusters, help="one table of these, of all models")
    parser.add_argument("--write", type=Path, metavar="FILE", help="replace the tables in this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.models or options.clusters:
        workloads = [w for w in bed.WORKLOADS if w.name in (options.models or models)]
        wanted = options.clusters or [t.name for t in bed.TESTBEDS]
        for line in table(workloads, [t for t in (*bed.TESTBEDS, bed.SLOWER) if t.name in wanted]):
            print(line, flush=True)
        return
    for name, asked in TABLES.items():
        lines, started = list[str](), time.perf_counter()
        for line in table(*asked):
            print(line, file=sys.stdout if options.write is None else sys.stderr, flush=True)
            lines.append(line)
        print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
        if options.write is not None:
            text = options.write.read_text(encoding="utf-8")
            write_atomically(options.write, replaced(text, name, lines))


if __name__ == "__main__":
    main()
