"""What the checks of a step cost: CPU seconds of two gloo ranks, with and without them.

Two modules over the same plan take turns, step by step, in the same two processes: one compares the ranks'
batches, calls and copies (the default), the other is made with ``check_batches=False``. The ratio is the median
over pairs of neighbouring steps of the seconds of both ranks together. What looks for the right plan in each step
(the batch's structure, the attributes that forward reads, the parameters) is in both, and timed on its own. One
thread a rank.

python benches/checks.py [--rounds N] [NAME ...]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

import hetspmd
from local import STEPS, stepper
from trust.models import MODELS, build

RANKS = 2
CLUSTER = {
    "devices": [
        {"flops": f"{100 * s} GFLOP/s", "memory": "64GiB", "memory_bandwidth": "10GB/s"} for s in (2, 1)
    ],
    "network": {"bandwidth": "100Gbit/s", "latency": "1us"},
}


@dataclass(frozen=True)
class Checked:
    """CPU seconds of each step of one rank: checked, unchecked, and of a checked one before its program begins."""

    checked: tuple[float, ...]
    unchecked: tuple[float, ...]
    planning: tuple[float, ...]


def rank_main(rank: int, store: str, name: str, rounds: int, options: dict[str, int], results: Any) -> None:
    """What one process does; puts ``(rank, Checked)``."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=UserWarning)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    model, batch = build(name, **options)
    other, _ = build(name, **options)
    first = hetspmd.HAP(model, CLUSTER, example=batch)
    second = hetspmd.HAP(other, CLUSTER, plan=first.plan, check_batches=False)
    assert len(first.plan.active) == RANKS, "both ranks take part"
    planning: list[float] = []
    first._planned = _timed(first._planned, planning)  # type: ignore[method-assign]  # measured from outside
    arms = stepper(first, batch), stepper(second, batch)
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(-STEPS, rounds):
        for arm in (0, 1) if turn % 2 else (1, 0):
            dist.barrier()
            began = time.process_time()
            arms[arm]()
            times[arm].append(time.process_time() - began)
    results.put((rank, Checked(*(tuple(t[STEPS:]) for t in (*times, planning)))))
    dist.destroy_process_group()


def _timed(function: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.process_time()
        found = function(*args, **kwargs)
        times.append(time.process_time() - began)
        return found

    return timed


def measure(name: str, rounds: int, **options: int) -> list[Checked]:
    """What each rank measured, in their order."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        args = (str(Path(folder) / "store"), name, rounds, options, results)
        multiprocessing.start_processes(rank_main, args, nprocs=RANKS, start_method="spawn")
        found = dict(results.get() for _ in range(RANKS))
    return [found[rank] for rank in range(RANKS)]


def row(name: str, found: list[Checked]) -> str:
    """The line of the table."""
    checked, unchecked, planning = (
        [sum(each) for each in zip(*times, strict=True)]
        for times in zip(*((f.checked, f.unchecked, f.planning) for f in found), strict=True)
    )
    ratios = sorted(c / u for c, u in zip(checked, unchecked, strict=True))
    base, plan = statistics.median(unchecked), statistics.median(planning)
    return (
        f"| {name} | {base:.3f} | {statistics.median(ratios):.4f} | {ratios[len(ratios) // 4]:.4f} to "
        f"{ratios[-1 - len(ratios) // 4]:.4f} | {1e3 * plan:.2f} | {100 * plan / base:.2f} % |"
    )


_DEFAULT = ("BERT", "ResNet-50")
HEAD = """| model | unchecked, s | checked / unchecked | middle half | finding the plan, ms | of a step |
|---|--:|--:|--:|--:|--:|"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(MODELS)} (default: {' '.join(_DEFAULT)})"
    )
    parser.add_argument("--rounds", type=int, default=20, help="pairs of steps (default: %(default)s)")
    options = parser.parse_args()
    if unknown := set(options.names) - MODELS.keys():
        parser.error(f"there is no {', '.join(sorted(unknown))}; NAME is one of {', '.join(MODELS)}")
    print(HEAD)
    for name in options.names or _DEFAULT:
        print(row(name, measure(name, options.rounds)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
