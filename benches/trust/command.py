"""Measure what is missing, then print and write the comparison.

    python benches/trust [--only 2:1 BERT ...] [--fresh] [--rounds 3] [--steps 2] [--write docs/trust.md]

For each cluster: emulate it, profile it with ``hetspmd profile``'s own measurement, and for each of its models make
the plans and run them in turns. As root, on Linux with iproute2 and the cpu controller of control groups; elsewhere
the bench says so and ends.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import hetspmd
from emulated.command import measure_all, measure_missing, options_of, parsed, say
from emulated.launch import Workers
from emulated.spec import EmulationError
from hetspmd.codec.files import write_atomically
from trust import results
from trust.models import build
from trust.points import CLUSTERS, MODELS, plans
from trust.report import write
from trust.statistics import summary, table

TOLERANCES = (1e-4, 0.05)
"""Relative difference of the losses of a model's plans that rounding in float32 may make: of the first step, and of
the second, which has the first's gradients in it. AdamW divides each gradient by its own size: gradients that are
nothing but rounding move parameters as far as others do. Plans of ResNet-50 that agree to 1e-10 in float64 differ
by 1e-2 in the second step, and by more in each after it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write. Exit status 0 also where no cluster can be emulated, with the reason."""
    steps = (2, "timed steps of a turn, after one that is not")
    parser = options_of(__doc__, folder=results.FOLDER, only="clusters and models", steps=steps, budget=100.0)
    names = [*CLUSTERS, *dict.fromkeys(m for of in MODELS.values() for m in of)]
    options = parsed(parser, names, arguments)
    if not measure_all(options, CLUSTERS, _measure):
        return 0
    points = [p for p in results.load(options.folder) if _wanted(p.cluster, p.model, options.only)]
    if not points:
        print("nothing has been measured yet")
        return 0
    print(table(points))
    print(summary(points))
    if options.write is not None:
        write(options.write, points)
    return 0


def _wanted(cluster: str, model: str, only: Sequence[str] | None) -> bool:
    """Whether the names leave a model on a cluster: of each kind, one of those named, if any is."""
    if only is None:
        return True
    clusters, models = [n for n in only if n in CLUSTERS], [n for n in only if n not in CLUSTERS]
    return (not clusters or cluster in clusters) and (not models or model in models)


def _measure(name: str, options: argparse.Namespace) -> None:
    """The models of a cluster that have no points yet."""
    done = {p.model for p in results.load(options.folder) if p.cluster == name}
    models = [m for m in MODELS[name] if m not in done and _wanted(name, m, options.only)]
    measure_missing(
        name, CLUSTERS[name], options, models,
        lambda folder, _, workers: partial(_point, name, options, folder, workers),
    )  # fmt: skip


def _point(name: str, options: argparse.Namespace, folder: Path, workers: Workers, model: str) -> None:
    """The points of a model."""
    file = folder / "cluster.yaml"
    if not file.exists():
        say(f"{name}: profile")
        write_atomically(file, workers.run("trust.rank:profile", budget=options.budget)[0])
    own = folder / f"{model}.yaml"
    if not own.exists():
        say(f"{name}, {model}: profile of its ops")
        text = workers.run(
            "trust.rank:profile_ops", file=str(file), model=model, cache=str(folder / "cache"),
            budget=options.ops_budget,
        )[0]  # fmt: skip
        write_atomically(own, text)
    say(f"{name}, {model}: plans")
    cluster = hetspmd.Cluster.load(own)
    network, batch = build(model)
    files = {}
    for plan_name, plan in plans(network, batch, cluster):
        files[plan_name] = folder / f"{model} - {plan_name}.json"
        plan.save(files[plan_name])
        say(f"  {plan_name}: {plan.cost.step_seconds:.3f} s")
    say(f"{name}, {model}: steps")
    ranks = workers.run(
        "trust.rank:train", model=model, plans={n: str(f) for n, f in files.items()},
        rounds=options.rounds, steps=options.steps,
    )  # fmt: skip
    points = [
        results.point(name, model, plan_name, path, [r[plan_name] for r in ranks])
        for plan_name, path in files.items()
    ]
    _check_losses(points)
    results.append(options.folder, points)
    for p in points:
        say(f"  {p.plan}: predicted {p.predicted:.3f} s, measured {p.measured:.3f} s")


def _check_losses(points: Sequence[results.Point]) -> None:
    """Raise EmulationError unless all plans of a model computed the same losses."""
    first = points[0]
    for other in points[1:]:
        for step, (a, b, tolerance) in enumerate(zip(first.losses, other.losses, TOLERANCES, strict=False)):
            if not abs(a - b) <= tolerance * max(abs(a), 1e-12):
                raise EmulationError(
                    f"{first.model}, step {step}: the loss is {a} with {first.plan!r} and {b} with {other.plan!r}"
                )
