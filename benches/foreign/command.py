"""Run what has no outcome yet, then print and write the outcomes.

    python benches/foreign [--only 'timm-*' ...] [--fresh] [--jobs 1] [--timeout 120] [--write docs/what-works.md]

Exit status 1 where a case is wrong, crashed or hung.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path

from foreign import report
from foreign.judge import BROKEN, FAULTS, Outcome
from foreign.registry import load
from foreign.runner import run

FOLDER = Path(__file__).parents[2] / "target" / "bench" / "foreign"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="GLOB", help="cases to run")
    parser.add_argument("--fresh", action="store_true", help="run again what has an outcome")
    parser.add_argument(
        "--faults", action="store_true", help="run again what has a fault for an outcome, or none"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds after which a case is HUNG")
    parser.add_argument(
        "--folder", type=Path, default=FOLDER, help="where outcomes and what is printed are kept"
    )
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the outcomes into a page")
    options = parser.parse_args(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    options.folder.mkdir(parents=True, exist_ok=True)
    every = load()
    chosen = [c for n, c in every.items() if not options.only or any(fnmatch(n, g) for g in options.only)]
    left_out = [c.package for c in every.values() if not c.installed]
    kept = _kept(options.folder)
    wanted = [c for c in chosen if c.installed and (options.fresh or _open(kept.get(c.name), options.faults))]
    for outcome in run(wanted, timeout=options.timeout, jobs=options.jobs, logs=options.folder):
        kept[outcome.name] = outcome
        _keep(options.folder, kept)
        print(f"{outcome.name}: {outcome.outcome} {outcome.detail} ({outcome.seconds:.0f} s)", flush=True)
    for package in sorted(set(left_out)):
        print(f"left out, because it is not installed: {package}", file=sys.stderr)
    found = [kept[c.name] for c in chosen if c.name in kept and kept[c.name].outcome != BROKEN]
    print(report.summary(found))
    if options.write is not None:
        whole = [kept[n] for n in every if n in kept and kept[n].outcome != BROKEN]
        without = [n for n, case in every.items() if case.installed and n not in kept]
        command = f"python benches/foreign --write {options.write.as_posix()}"
        report.write(options.write, whole, left_out, command, without)
    return int(any(o.outcome in FAULTS for o in found))


def _open(outcome: Outcome | None, faults: bool) -> bool:
    """Whether a case is still to be run."""
    return outcome is None or (faults and outcome.outcome in (*FAULTS, BROKEN))


def _kept(folder: Path) -> dict[str, Outcome]:
    file = folder / "outcomes.json"
    if not file.exists():
        return {}
    rows = json.loads(file.read_text(encoding="utf-8"))
    return {r["name"]: Outcome(**{**r, "missing": tuple(r["missing"])}) for r in rows}


def _keep(folder: Path, outcomes: Mapping[str, Outcome]) -> None:
    text = json.dumps([asdict(o) for o in outcomes.values()], indent=1)
    (folder / "outcomes.json").write_text(text, encoding="utf-8")
