"""The README's table of models: largest relative errors of ``hetspmd.verify`` in float64.

The models are small, and on real devices every device would best compute such a model whole. The cluster here
has slow devices (4 : 2 : 1 : 1) and a fast network instead, so that nearly every instruction is divided.

python benches/models_table.py [--cluster FILE] [--write README.md] [NAME ...]
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import hetspmd
from hetspmd.placement import REPLICATE
from hetspmd.program.program import Compute

ROOT = Path(__file__).parents[1]
EXAMPLES = ("bert", "bert_moe", "gpt2", "llama", "vit", "vgg19", "resnet50")
MARKS = ("<!-- models table -->\n", "<!-- end of models table -->")

CLUSTER = ROOT / "examples" / "clusters" / "four-slow.yaml"

Entry = tuple[Any, Any, Any]


def entries() -> Iterator[tuple[str, Callable[[], Entry]]]:
    """``(name, function that returns (model, example, loss))``: the examples, then the tests' models."""
    sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests")]
    for name in EXAMPLES:
        module = importlib.import_module(name)
        yield f"examples/{name}.py", lambda module=module: (*module.small(), None)
    zoo = importlib.import_module("zoo")
    for name in zoo.ZOO:
        if name not in EXAMPLES:
            yield name, lambda name=name: zoo.build(name)


def row(name: str, make: Callable[[], Entry], cluster: hetspmd.Cluster) -> str:
    """One line of the table; an error stands in it."""
    model, example, loss = make()
    count = sum(p.numel() for p in model.parameters())
    started = time.perf_counter()
    try:
        plan = hetspmd.compile(model, example, cluster, loss=loss)
        report = hetspmd.verify(model, example, cluster, plan=plan, loss=loss)
    except hetspmd.errors.HetspmdError as error:
        return (
            f"| {name} | {count:,} | | | {type(error).__name__}: {' '.join(str(error).split())[:120]} | | | |"
        )
    computed = [step for step in plan.program.steps if isinstance(step, Compute)]
    work = [s for s in computed if not plan.graph.instructions[s.instruction].is_source]
    divided = sum(any(form != REPLICATE for form in (*s.row.pre, *s.row.post)) for s in work) / len(work)
    collectives = len(plan.program.steps) - len(computed)
    errors = (report.loss_error, report.gradient_error, report.parameter_error)
    shown = " | ".join(f"{error:.0e}" for error in errors)
    print(f"{name}: {time.perf_counter() - started:.1f} s", file=sys.stderr)
    verdict = "yes" if report.ok else "**no**"
    return f"| {name} | {count:,} | {divided:.0%} | {collectives} | {shown} | {verdict} |"


def main() -> None:
    """Print the table, or write it into a file between its marks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="models to take (default: all)")
    parser.add_argument(
        "--cluster", default=CLUSTER, help="cluster file (default: examples/clusters/four-slow.yaml)"
    )
    parser.add_argument("--write", metavar="FILE", help="replace the table in this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", hetspmd.errors.MissingRuleWarning)
    cluster = hetspmd.Cluster.load(options.cluster)
    lines = [
        "| model | parameters | divided | collectives | loss | gradients | after 2 steps | equal |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for name, make in entries():
        if not options.names or name in options.names:
            lines.append(row(name, make, cluster))
    table = "\n".join(lines) + "\n"
    if options.write is None:
        print(table, end="")
        return
    path = Path(options.write)
    text = path.read_text(encoding="utf-8")
    between = re.escape(MARKS[0]) + ".*?" + re.escape(MARKS[1])
    path.write_text(
        re.sub(between, lambda _: MARKS[0] + table + MARKS[1], text, flags=re.DOTALL), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
