"""What the commands of the benches on emulated clusters share: options, the way through the clusters, messages."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch

from emulated.cluster import EmulatedCluster, unavailable
from emulated.launch import Workers
from emulated.pages import lacking
from emulated.spec import ClusterSpec
from hetspmd.codec.files import write_atomically

__all__ = ["measure_all", "measure_missing", "options_of", "parsed", "running", "say"]

Missing = TypeVar("Missing")


def options_of(
    doc: str | None, *, folder: Path, only: str, steps: tuple[int, str], budget: float
) -> argparse.ArgumentParser:
    """The options of a bench.

    ``doc``: its module's docstring; ``folder``: where its results are kept; ``only``: what may be named; ``steps``:
    how many by default, and what they are; ``budget``: seconds of a cluster's profile.
    """
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"{only} (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each one that is compared")
    parser.add_argument("--steps", type=int, default=steps[0], help=steps[1])
    parser.add_argument("--budget", type=float, default=budget, help="seconds of a cluster's profile")
    parser.add_argument("--ops-budget", type=float, default=75.0, help="seconds of a model's ops")
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--folder", type=Path, default=folder, help="where results are kept")
    parser.add_argument("--write", type=Path, metavar="FILE", help="replace the results in this page")
    return parser


def parsed(
    parser: argparse.ArgumentParser, names: Sequence[str], arguments: Sequence[str] | None
) -> argparse.Namespace:
    """The options; ends the process with a message if one of ``--only`` is none of ``names``, or if the page
    to write lacks its marks."""
    options = parser.parse_args(arguments)
    if unknown := [n for n in options.only or () if n not in names]:
        parser.error(f"nothing is called {unknown[0]!r}; there are {', '.join(names)}")
    if options.write is not None and (problem := lacking(options.write)):
        parser.error(problem)
    if options.rounds < 1 or options.steps < 1:
        parser.error("--rounds and --steps are at least 1")
    return options


def measure_all(
    options: argparse.Namespace, clusters: Iterable[str], measure: Callable[[str, argparse.Namespace], None]
) -> bool:
    """Measure each cluster as the options have it. False, and the reason printed, if none can be emulated."""
    torch.set_num_threads(1)
    if options.report:
        return True
    reason = unavailable()
    if reason is not None:
        print(f"skipped: {reason}")
        return False
    if options.fresh and options.folder.exists():
        shutil.rmtree(options.folder)
    for name in clusters:
        measure(name, options)
    return True


def measure_missing(
    name: str,
    spec: ClusterSpec,
    options: argparse.Namespace,
    missing: Sequence[Missing],
    bench: Callable[[Path, EmulatedCluster, Workers], Callable[[Missing], None]],
) -> None:
    """Measure points of a cluster, whose ranks are started once.

    ``bench`` gives what measures a point, from the cluster's folder, the cluster and its workers. A cluster that
    cannot be emulated is skipped, and why is printed.
    """
    if not missing:
        return
    reason = unavailable(spec)
    if reason is not None:
        print(f"skipped {name}: {reason}")
        return
    folder = options.folder / name.replace(":", "-")
    with running(spec, folder) as (emulated, workers):
        say(f"{name}: {emulated.spec}")
        measure = bench(folder, emulated, workers)
        for point in missing:
            measure(point)


@contextmanager
def running(spec: ClusterSpec, folder: Path) -> Iterator[tuple[EmulatedCluster, Workers]]:
    """The cluster and its workers, at the pace at which what is in ``folder`` was measured.

    What was measured before, such as the profile of the ranks' devices, is of no use at another pace.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "pace"
    pace = float(file.read_text(encoding="ascii")) if file.exists() else None
    with EmulatedCluster(spec, pace) as emulated, Workers(emulated) as workers:
        write_atomically(file, f"{emulated.pace}\n")
        yield emulated, workers


def say(text: str) -> None:
    """Progress, on standard error."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)
