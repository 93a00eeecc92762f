"""Uneven gathers and reductions side by side, in every implementation.

    python benches/collectives.py [--ranks 4] [--rate 1Gbit/s] [--rounds 7] [--sizes 65536 ...] [--write FILE]

As root on Linux each rank is in a network namespace of its own with a link of ``--rate``
(:mod:`emulated.cluster`); otherwise all share the loopback interface. The implementations of a case run in turns,
round by round; a time is from when the last rank starts, after a barrier, to when the last rank has its result,
and the table has medians. Ratios are to the padded one in the same run. ``formulas`` is what the cost model would
choose by one latency and bandwidth fitted to all times, ``curves`` by the curves that ``hetspmd profile`` would fit
to them. An exchange is an all-to-all with splits: of a gather every rank sends its shard to every other one, which
programs do not have; of a reduction every rank sends each other one its slice, and sums what it gets.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist

from emulated.cluster import EmulatedCluster, unavailable
from emulated.entry import exit_status
from emulated.launch import Workers
from emulated.pages import replace_results
from emulated.spec import ClusterSpec
from hetspmd.cluster.collective_kinds import Kind, kinds_between
from hetspmd.cluster.curves import Curve, Point, curve_for
from hetspmd.dist.process_group import ProcessGroupCommunicator
from hetspmd.dist.random import Randomness
from hetspmd.dist.runtime import Runtime
from hetspmd.profile.collective_trials import Trial, start, trials
from hetspmd.profile.fit import fit_curves, fit_network

SIZES: Final = (1 << 16, 1 << 20, 1 << 23)
GROUPS: Final = {
    "gather": kinds_between("shard", "replicated"),
    "reduce": kinds_between("partial", "shard"),
}
EXCHANGED: Final = "exchange_gather"
"""What programs do not have."""
HEAD: Final = ("padded", "grouped", "ring", "exchange")


def cases(sizes: Sequence[int], world: int) -> list[tuple[str, dict[str, Trial]]]:
    """``(group, trial by implementation)`` for each size and skew, the implementations in the order of ``HEAD``."""
    some: dict[tuple[int, str, str], Trial] = {}
    for size in sizes:
        for trial in trials(size, range(world)):
            for group, kinds in GROUPS.items():
                if trial.kind in kinds:
                    some.setdefault((size, group, trial.skew), trial)
    found = []
    for (_, group, _), trial in some.items():
        by_kind: dict[str, Trial] = {kind: replace(trial, kind=kind) for kind in GROUPS[group]}
        if group == "gather":
            by_kind[EXCHANGED] = by_kind["all_gather"]
        found.append((group, by_kind))
    return found


def rank(context: Any, *, sizes: list[int], rounds: int) -> list[list[float]]:
    """On each rank: when each implementation of each case began and ended, in turns."""
    runtime = Runtime(ProcessGroupCommunicator(), Randomness(0, context.rank, torch.device("cpu")))
    stamps = []
    for _, by_kind in cases(sizes, context.world):
        calls = [_call(runtime, name, trial) for name, trial in by_kind.items()]
        taken: list[list[float]] = [[] for _ in calls]
        for turn in range(rounds + 1):
            for call, times in zip(calls, taken, strict=True):
                dist.barrier()
                begin = time.monotonic()
                call()
                if turn:
                    times += [begin, time.monotonic()]
        stamps += taken
    return stamps


def _call(runtime: Runtime, name: str, trial: Trial) -> Callable[[], Any]:
    operand = torch.ones(trial.shape(runtime.communicator.rank))
    if name == EXCHANGED:
        return partial(_exchange_gather, runtime, operand, trial.extents)
    return lambda: start(runtime, trial, operand).wait()


def _exchange_gather(runtime: Runtime, shard: torch.Tensor, extents: Sequence[int]) -> torch.Tensor:
    world, width = len(extents), shard.shape[1]
    whole = shard.new_empty((sum(extents), width))
    splits = [extent * width for extent in extents]
    sent = shard.reshape(-1).repeat(world)
    runtime.communicator.all_to_all(whole.view(-1), sent, splits, [shard.numel()] * world).wait()
    return whole


class _Plain:
    """A rank's place where there is no emulated cluster."""

    def __init__(self, number: int, world: int) -> None:
        self.rank, self.world = number, world


def _plain(number: int, world: int, folder: str, sizes: list[int], rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=world)
    torch.save(rank(_Plain(number, world), sizes=sizes, rounds=rounds), f"{folder}/{number}.pt")
    dist.destroy_process_group()


def measured(sizes: list[int], rounds: int, world: int, rate: str) -> tuple[list[list[float]], str]:
    """The seconds of each implementation of each case, round by round, and what they were measured on."""
    spec = ClusterSpec.of([1.0] * world, cores=float(len(os.sched_getaffinity(0))), rate=rate)
    reason = unavailable(spec)
    if reason is None:
        with EmulatedCluster(spec) as cluster, Workers(cluster) as workers:
            stamps = workers.run("collectives:rank", sizes=sizes, rounds=rounds)
        where = f"{world} ranks in network namespaces, links of {rate}"
    else:
        print(f"{reason}; on the loopback interface instead", file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder:
            arguments = (world, folder, sizes, rounds)
            torch.multiprocessing.spawn(_plain, arguments, nprocs=world)
            stamps = [torch.load(f"{folder}/{number}.pt") for number in range(world)]
        where = f"{world} ranks on the loopback interface"
    found = []
    for of_ranks in zip(*stamps, strict=True):
        latest = [max(times) for times in zip(*of_ranks, strict=True)]
        found.append([end - begin for begin, end in zip(latest[::2], latest[1::2], strict=True)])
    return found, where


def table(sizes: list[int], seconds: list[list[float]], world: int) -> list[str]:
    """The lines of the table in Markdown."""
    rows: list[tuple[str, dict[str, Trial], dict[str, float]]] = []
    times = iter(seconds)
    points: dict[Kind, list[Point]] = {}
    profiled = {trial for size in sizes for trial in trials(size, range(world))}
    for group, by_kind in cases(sizes, world):
        medians = {name: median(next(times)) for name in by_kind}
        rows.append((group, by_kind, medians))
        for kind in GROUPS[group]:
            t, taken = by_kind[kind], medians[kind]
            if t not in profiled:  # padded kinds of one holder, which run as grouped ones
                continue
            point = Point(t.skew, t.nbytes, t.shards, t.largest, 0.0, taken, taken, taken, 1)
            points.setdefault(kind, []).append(point)
    fits = {kind: fit_curves(kind, world, found) for kind, found in points.items()}
    curves = {kind: [fit.curve for fit in found] for kind, found in fits.items()}
    network = fit_network([fit for found in fits.values() for fit in found])
    lines = [
        f"| | bytes | shards | {HEAD[0]}, ms | {' | '.join(HEAD[1:])} | formulas | curves |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for group, by_kind, medians in rows:
        base, *others = medians.values()
        trial = next(iter(by_kind.values()))
        names = dict(zip(GROUPS[group], HEAD, strict=False))
        formula = {
            GROUPS[group][0]: network.latency
            + (world - 1) * trial.largest * trial.nbytes / network.bandwidth,
            GROUPS[group][1]: trial.shards * network.latency + trial.nbytes / network.bandwidth,
        }
        predicted = {kind: _seconds(curves[kind], trial) for kind in GROUPS[group]}
        chosen = [names[min(of, key=lambda k: of[k])] for of in (formula, predicted)]
        ratios = " | ".join(f"{taken / base:.2f}" for taken in others)
        lines.append(
            f"| {group} | {trial.nbytes} | {trial.skew} | {1e3 * base:.2f} | {ratios} | {' | '.join(chosen)} |"
        )
    return lines


def _seconds(curves: list[Curve], trial: Trial) -> float:
    return curve_for(curves, trial.nbytes).seconds(trial.nbytes, trial.shards, trial.largest, 0.0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Uneven gathers and reductions side by side.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rate", default="1Gbit/s", help="of each emulated link")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="bytes of the whole tensor")
    parser.add_argument("--write", type=Path, help="put the table between the marks of this page")
    options = parser.parse_args(arguments)
    seconds, where = measured(options.sizes, options.rounds, options.ranks, options.rate)
    head = f"{where}; medians of {options.rounds} rounds.\n\n"
    lines = head + "\n".join(table(options.sizes, seconds, options.ranks)) + "\n"
    print(lines)
    if options.write is not None:
        replace_results(options.write, lines)
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_status(main))
