"""``hetspmd verify``: run all ranks in one process and compare with the single device."""

from __future__ import annotations

import argparse
import math
from typing import Any

from hetspmd.cli.options import add_target, positive_count
from hetspmd.cli.outputs import STDOUT, check_writable, read_constraints, write_json
from hetspmd.errors import DeviceError


def add(commands: Any, debug: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "verify",
        parents=[debug],
        help="compare the program with the single device",
        description="Run the program of every rank in this process and compare loss, gradients and "
        "parameters with the single device. Exit status 1 if they differ.",
    )
    add_target(parser)
    parser.add_argument(
        "--dtype", choices=("float64", "float32"), default="float64", help="dtype to compute in (float64)"
    )
    parser.add_argument("--steps", type=positive_count, default=2, metavar="N", help="optimizer steps (2)")
    parser.add_argument(
        "--locate",
        action="store_true",
        help="where they differ: name the first tensor and instruction that does",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Verify and report."""
    from hetspmd.cli.target import load_target
    from hetspmd.cluster.cluster import Cluster
    from hetspmd.trace.autocast import autocast_for
    from hetspmd.verify.comparison import verify

    check_writable(options.json, stdout=True)
    cluster = Cluster.load(options.cluster)
    constraints = read_constraints(options.constraints)
    model, example = load_target(options.target)
    empty = next((n for n, p in model.named_parameters() if p.is_meta), None)
    if empty is not None:
        raise DeviceError(
            f"{options.target} puts {empty} on the meta device, where it has no values; name a function that "
            "returns a model with weights, such as a small configuration"
        )
    with autocast_for(model, options.autocast):
        report = verify(
            model,
            example,
            cluster,
            dtype=options.dtype,
            steps=options.steps,
            constraints=constraints,
            segments=options.segments,
            machines=options.machines,
            micro_batches=options.micro_batches,
            zero=options.zero,
            recompute=options.recompute,
            locate=options.locate,
        )
    errors = {
        "loss_error": report.loss_error,
        "gradient_error": report.gradient_error,
        "parameter_error": report.parameter_error,
    }
    # JSON has no infinity, which stands for a tensor that is missing or not a number.
    document: dict[str, Any] = {
        "ok": report.ok,
        **{k: v if math.isfinite(v) else None for k, v in errors.items()},
        "unproved": report.unproved,
        "notes": list(report.notes),
        "located": report.located,
    }
    if report.rounding is not None:
        document["rounding"] = report.rounding if math.isfinite(report.rounding) else None
    if options.json is not None:
        write_json(options.json, document)
    if options.json != STDOUT:
        print(report.text)
    return 0 if report.ok else 1
