"""Predicted against measured: hetspmd's plans, forced data-parallel plans, DDP, FSDP2 and the fastest device alone.

For each cluster and workload: calibrate, compile, run every arm, check that all arms' losses agree, print a table.
Predictions are the cost model's seconds for what an arm computes: a plan's own, the forced data-parallel plan of
the same rows for DDP, the sum of one device's ops for the device alone. FSDP gathers parameters twice, which no
plan does, and has no prediction.

    python benches/emulated [--speeds 4,2,1,1] [--cores 1.2] [--rate 200Mbit/s] [--workload vgg] [--json FILE]

As root, on Linux with iproute2 and the cpu controller of control groups. Needs ``hetspmd`` installed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import hetspmd
from emulated.arms import Arm, Measured, check_losses, measure, proportional_rows
from emulated.calibrate import calibrate
from emulated.cluster import EmulatedCluster, clean, unavailable
from emulated.launch import Workers
from emulated.spec import ClusterSpec
from emulated.worker import find
from hetspmd.codec.files import write_atomically
from hetspmd.cost.model import CostModel
from hetspmd.optimize.compiler import plan_for
from hetspmd.plan.plan import Plan
from hetspmd.rules.theory import derive
from hetspmd.search import constraints as known
from hetspmd.trace.trace import trace

WORKLOADS = ("vgg", "bert")
SPEEDS = ("2,1", "4,2,1,1")
RATES = ("200Mbit/s", "1Gbit/s")


@dataclass(frozen=True)
class Row:
    """One arm: predicted seconds of a step (None where the cost model has no such program), and measured."""

    arm: str
    predicted: float | None
    measured: Measured


def compare(
    workers: Workers, cluster: hetspmd.Cluster, workload: str, options: dict[str, Any], *, steps: int,
    folder: Path,
) -> list[Row]:  # fmt: skip
    """All arms of one workload. Raises EmulationError if their losses differ."""
    work = find(workload)(**options)
    batch = dict(work.batch)
    speeds = [d.rate("float32") for d in cluster.devices]
    proportional = proportional_rows(work.rows, speeds)
    even = proportional_rows(work.rows, [1.0] * cluster.world)
    plans: dict[str, Plan] = {"hetspmd": hetspmd.compile(work.model, batch, cluster)}
    theory = derive(trace(work.model, (), batch))
    for name, rows in (("even", even), ("proportional", proportional)):
        ratios = tuple(r / work.rows for r in rows)
        plans[f"hetspmd, data parallel {name}"] = plan_for(
            theory, cluster, known.data_parallel(theory), ratios
        )
    fastest = workers.cluster.spec.fastest
    found: list[Row] = []
    for name, plan in plans.items():
        path = folder / "plan.json"
        plan.save(path)
        measured = measure(workers, "hetspmd", workload, options, plan=str(path), steps=steps)
        found.append(Row(name, plan.cost.step_seconds, measured))
    incumbents: Sequence[tuple[str, Arm, list[int] | None, float | None]] = (
        ("DDP even", "ddp", even, found[1].predicted),
        ("DDP proportional", "ddp", proportional, found[2].predicted),
        ("FSDP2 even", "fsdp", even, None),
        ("FSDP2 proportional", "fsdp", proportional, None),
        ("fastest device alone", "alone", None, float(CostModel(theory, cluster).alone()[fastest])),
    )
    for name, arm, rows_of, predicted in incumbents:
        found.append(
            Row(name, predicted, measure(workers, arm, workload, options, rows=rows_of, steps=steps))
        )
    check_losses({row.arm: row.measured for row in found})
    return found


def table(rows: Sequence[Row]) -> str:
    """For people: seconds, their ratio, and each rank's peak in MB."""
    lines = [f"{'arm':<36}{'predicted':>10}{'measured':>10}{'p / m':>8}  peak MB per rank (resident)"]
    for row in rows:
        seconds = row.measured.median
        predicted = "" if row.predicted is None else f"{row.predicted:.3f}"
        ratio = "" if row.predicted is None else f"{row.predicted / seconds:.2f}"
        pairs = zip(row.measured.peak_bytes, row.measured.resident_bytes, strict=True)
        memory = " ".join(f"{p / 1e6:.0f} ({r / 1e6:.0f})" for p, r in pairs)
        lines.append(f"{row.arm:<36}{predicted:>10}{seconds:>10.3f}{ratio:>8}  {memory}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table per cluster and workload. Exit status 2 where no cluster can be emulated."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--speeds", action="append", help="relative speeds (default: 2,1 and 4,2,1,1)")
    parser.add_argument("--rate", action="append", help="of every link (default: 200Mbit/s and 1Gbit/s)")
    parser.add_argument("--latency", default="", help="of every link (needs netem)")
    parser.add_argument("--cores", type=float, default=1.2, help="the sum of the CPU shares")
    parser.add_argument("--workload", action="append", help=f"of emulated.workloads (default: {WORKLOADS})")
    parser.add_argument("--steps", type=int, default=5, help="that are timed")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--clean", action="store_true", help="only remove what killed runs have left")
    options = parser.parse_args(arguments)
    if options.clean:
        print("\n".join(clean()))
        return 0
    torch.set_num_threads(1)
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for speeds in options.speeds or SPEEDS:
            for rate in options.rate or RATES:
                spec = ClusterSpec.of(
                    [float(s) for s in speeds.split(",")], cores=options.cores, rate=rate,
                    latency=options.latency or 0.0,
                )  # fmt: skip
                reason = unavailable(spec)
                if reason is not None:
                    print(reason, file=sys.stderr)
                    return 2
                with EmulatedCluster(spec) as emulated, Workers(emulated) as workers:
                    calibration = calibrate(workers)
                    print(f"\n## {speeds}: {spec}\n{calibration.cluster}", flush=True)
                    for name in options.workload or WORKLOADS:
                        workload = name if ":" in name else f"emulated.workloads:{name}"
                        rows = compare(
                            workers, calibration.cluster, workload, {}, steps=options.steps,
                            folder=Path(folder),
                        )  # fmt: skip
                        print(f"\n{name}\n{table(rows)}", flush=True)
                        figures.append(_figures(speeds, rate, name, calibration.text(), rows))
    if options.json:
        write_atomically(Path(options.json), json.dumps(figures, indent=1) + "\n")
    return 0


def _figures(speeds: str, rate: str, workload: str, cluster: str, rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "speeds": speeds, "rate": rate, "workload": workload, "cluster": cluster,
        "arms": [
            {
                "arm": row.arm, "predicted_seconds": row.predicted, "median_seconds": row.measured.median,
                "seconds": row.measured.seconds, "losses": row.measured.losses,
                "peak_bytes": row.measured.peak_bytes, "resident_bytes": row.measured.resident_bytes,
            }
            for row in rows
        ],
    }  # fmt: skip
