"""``hetspmd solve``: search a problem file, as written by ``hetspmd compile --problem``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from hetspmd.cli.options import positive_count, positive_seconds
from hetspmd.cli.outputs import STDOUT, check_writable, write_json
from hetspmd.errors import TargetError


def add(commands: Any, debug: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "solve",
        parents=[debug],
        help="search a problem file",
        description="Find the least program of a self-contained problem file, and prove it.",
    )
    parser.add_argument("file", metavar="FILE", help="problem file (JSON), from hetspmd compile --problem")
    parser.add_argument("--json", metavar="OUT", help="write the solution as JSON (-: to standard output)")
    parser.add_argument(
        "--time-limit", type=positive_seconds, default=600.0, metavar="S", help="seconds (600)"
    )
    parser.add_argument(
        "--max-expansions",
        type=positive_count,
        default=10_000_000,
        metavar="N",
        help="partial programs that A* may expand (10,000,000)",
    )
    parser.add_argument(
        "--progress", action="store_true", help="show bound and best on standard error while it runs"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Solve and report. Exit status 1 if the optimum is not proved."""
    from hetspmd import _core

    check_writable(options.json, stdout=True)
    try:
        problem = Path(options.file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TargetError(f"cannot read the problem file {options.file}: {error}") from error
    try:
        text = _core.solve(
            problem,
            time_limit=options.time_limit,
            max_expansions=options.max_expansions,
            memory_limit=4 * 2**30,
            progress=_show if options.progress else None,
        )
    except ValueError as error:
        raise TargetError(f"{options.file} is no problem file: {error}") from error
    solution = json.loads(text)
    if options.json is not None:
        write_json(options.json, solution)
    if options.json != STDOUT:
        print(_report(solution))
    return 0 if solution["stop_reason"] == "optimal" else 1


def _show(seconds: float, bound: int, best: int | None) -> None:
    cost = "-" if best is None else f"{best / 1e12:.9g}"
    print(f"{seconds:8.2f} s  lower bound {bound / 1e12:.9g} s  best {cost} s", file=sys.stderr)


def _report(solution: dict[str, Any]) -> str:
    if solution["cost"] is None:
        why = solution.get("conflict") or "a limit struck before a program was found"
        return f"no program: {solution['stop_reason']} ({why})"
    return "\n".join(
        [
            f"cost         {solution['cost'] / 1e12:.12g} s",
            f"lower bound  {solution['lower_bound'] / 1e12:.12g} s, gap {100 * solution['gap']:.3g} %",
            f"stopped      {solution['stop_reason']}, {solution['sweeps']} sweeps, "
            f"{solution['expansions']} expansions, {solution['seconds']:.3g} s",
            f"size         {solution['variables']} variables, {solution['values']} values, "
            f"{solution['values_after_reduction']} after exact reductions",
        ]
    )
