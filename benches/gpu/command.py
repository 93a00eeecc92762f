"""Measure what is missing, then print and write the comparison.

    python benches/gpu [--seconds 240] [--only eager real BERT ...] [--folder FOLDER] [--write docs/gpu.md]
    python benches/gpu --device cpu --small     # tries all of it on a CPU, over gloo
    python benches/gpu --report --write docs/gpu.md

Each point is a line of JSON in ``--folder``, written when the point has been measured or has failed. A later run
measures what has no line yet: several short runs add up. ``--seconds`` ends a run between two points.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from emulated.command import say
from emulated.pages import lacking
from gpu import results
from gpu.points import SHARES, Key, every, names, wanted
from gpu.report import summary, tables, write
from gpu.results import Line
from gpu.session import Session


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write. Exit status 0 also where there is no GPU, with the reason."""
    options = _parsed(arguments)
    shares = options.shares or SHARES
    keys = [key for key in every(shares) if wanted(key, options.only, shares)]
    kept = options.write.with_suffix(".jsonl") if options.write is not None and not options.fresh else None
    if not options.report and not _measure(options, keys, kept):
        return 0
    lines = results.load(options.folder, kept, small=options.small)
    found = results.ordered(lines, keys)
    if not found:
        print("nothing has been measured yet")
    else:
        print(tables(found))
        print(summary(found, keys))
    if options.write is not None:
        write(options.write, results.ordered(lines, every(shares)), every(shares))
    return 0


def missing(keys: Sequence[Key], lines: Mapping[Key, Line], again: bool) -> list[Key]:
    """The points to measure: those without a line, those that a machine lacked something for, and, ``again``, those
    that failed."""
    return [
        key for key in keys if key not in lines or lines[key].skipped or (again and not lines[key].measured)
    ]


def run(
    keys: Sequence[Key], measure: Callable[[Key], Line], folder: Path, seconds: float | None,
    now: Callable[[], float] = time.monotonic,
) -> int:  # fmt: skip
    """Measure points until ``seconds`` have passed, which is looked at between two of them; how many were tried."""
    began = now()
    for count, key in enumerate(keys):
        if seconds is not None and now() - began >= seconds:
            say(f"{seconds:g} s are over: {len(keys) - count} points are left to a later run")
            return count
        say(str(key))
        line = measure(key)
        results.append(folder, line)
        for name, arm in line.arms.items():
            say(f"  {name}: {arm.reason or f'{arm.median:.4f} s'}")
        if line.reason:
            say(f"  {'skipped' if line.skipped else 'failed'}: {line.reason}")
    return len(keys)


def _measure(options: argparse.Namespace, keys: Sequence[Key], kept: Path | None) -> bool:
    """Measure what is missing. False, and the reason printed, where there is no GPU."""
    if options.device == "cuda" and not torch.cuda.is_available():
        print("skipped: torch sees no GPU here; --device cpu --small tries the bench without one")
        return False
    if options.fresh:
        (options.folder / "points.jsonl").unlink(missing_ok=True)
    left = missing(keys, results.load(options.folder, kept, small=options.small), options.again)
    with Session(options) as session:
        run(left, session.line, options.folder, options.seconds)
    return True


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; ends the process with a message for those that mean nothing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--only",
        nargs="+",
        metavar="NAME",
        help="parts, models, precisions, batches and shares (default: all)",
    )
    add("--seconds", type=float, help="start no further point after so many seconds (default: no limit)")
    add("--folder", type=Path, help="where lines, profiles and plans are kept (default: target/bench/gpu)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="of all ranks (default: %(default)s)")
    add("--small", action="store_true", help="tiny models, to try the bench")
    add("--shares", nargs="+", metavar="A:B", help=f"percents of the ranks (default: {' '.join(SHARES)})")
    add("--rounds", type=int, default=12, help="turns of each arm on one GPU (default: %(default)s)")
    add("--turns", type=int, default=3, help="turns of each arm of several ranks (default: %(default)s)")
    add("--steps", type=int, default=3, help="timed steps of a turn (default: %(default)s)")
    add(
        "--longest",
        type=float,
        default=15.0,
        help="seconds of further turns of close arms (default: %(default)s)",
    )
    add("--budget", type=float, default=40.0, help="seconds of a profile of the ranks (default: %(default)s)")
    add("--ops-budget", type=float, default=25.0, help="seconds of a model's ops (default: %(default)s)")
    add("--timeout", type=float, default=300.0, help="seconds after which a job of the ranks has failed")
    add("--again", action="store_true", help="try again the points that failed")
    add("--fresh", action="store_true", help="forget what was measured before")
    add("--report", action="store_true", help="measure nothing")
    add(
        "--write", type=Path, metavar="FILE", help="replace the results in this page, and the lines beside it"
    )
    options = parser.parse_args(arguments)
    _check(parser, options)
    if options.folder is None:
        options.folder = results.FOLDER / "small" if options.small else results.FOLDER
    return options


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the process for options that mean nothing."""
    for shares in options.shares or ():
        parts = shares.split(":")
        if len(parts) < 2 or not all(part.isdigit() and 0 < int(part) <= 100 for part in parts):
            parser.error(f"--shares {shares!r}: write percents of two ranks or more, such as 50:25:12:12")
    known = names(options.shares or SHARES)
    if unknown := [n for n in options.only or () if n not in known]:
        parser.error(f"nothing is called {unknown[0]!r}; there are {', '.join(known)}")
    if min(options.rounds, options.turns, options.steps) < 1:
        parser.error("--rounds, --turns and --steps are at least 1")
    if options.seconds is not None and options.seconds < 0:
        parser.error("--seconds is 0 or more")
    if options.device == "cpu" and not options.small and not options.report:
        parser.error("--device cpu goes with --small: the real sizes are a GPU's")
    if options.small and options.write is not None:
        parser.error("--small tries the bench; its lines do not belong into the page of --write")
    if options.write is not None and (problem := lacking(options.write)):
        parser.error(problem)
