"""``hetspmd profile``: measure devices and network, write a cluster file; or show one that was measured."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetspmd.cli.options import add_autocast
from hetspmd.cli.outputs import STDOUT, check_writable, write_text
from hetspmd.cli.progress import Progress
from hetspmd.errors import OutputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hetspmd.cluster.cluster import Cluster
    from hetspmd.profile.cases import OpCase
    from hetspmd.profile.measure import Options, Profile
    from hetspmd.profile.rows import RowPlaces
    from hetspmd.profile.session import Session
    from hetspmd.profile.step_runs import StepCase


def add(commands: Any, debug: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "profile",
        parents=[debug],
        help="measure this machine or cluster and write a cluster file",
        description="Measure the devices and, under torchrun, the collectives between them; write a cluster "
        "file. With --model also the times of a model's ops, and of its whole steps until memory ends. Each rank "
        "measures its own device, so start it "
        "as you start the training: torchrun --nproc-per-node N ... -m hetspmd profile --out FILE.",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--out", metavar="FILE", help="write the cluster file (-: to standard output)")
    what.add_argument("--show", metavar="FILE", help="show a measured cluster file, and plot it")
    _add_model(parser)
    parser.add_argument(
        "--svg", metavar="OUT", help="with --show: where the plot goes (default: FILE with the suffix .svg)"
    )
    parser.add_argument(
        "--budget",
        type=_duration,
        default=60.0,
        metavar="TIME",
        help="time such as 60s or 2min after which nothing is repeated any more (60s)",
    )
    parser.add_argument(
        "--tolerance",
        type=_percentage,
        default=0.05,
        metavar="P",
        help="how far a median may be uncertain before it is measured again, such as 5%% (5%%)",
    )
    parser.add_argument(
        "--device", default="auto", metavar="DEVICE", help="auto (a GPU if there is one), cpu, cuda or cuda:N"
    )
    parser.add_argument(
        "--flops",
        choices=("matmul", "convolution"),
        default="matmul",
        help="which measured FLOP/s become the devices': of matrix products (default) or convolutions",
    )
    parser.set_defaults(run=run)


def _add_model(parser: argparse.ArgumentParser) -> None:
    """What says which models are measured, and how."""
    parser.add_argument(
        "--model",
        metavar="TARGET",
        action="append",
        default=[],
        help="measure the ops and steps of this model too: file.py[:function] or package.module[:function]; may be "
        "repeated",
    )
    parser.add_argument(
        "--no-steps",
        action="store_true",
        help="with --model: measure ops alone, no whole steps until memory ends",
    )
    parser.add_argument(
        "--memory",
        type=_bytes,
        metavar="BYTES",
        help="with --model: bytes such as 8GiB that a step is given on each rank (the devices' memory)",
    )
    parser.add_argument(
        "--cluster",
        metavar="FILE",
        help="with --model: keep this file's devices and network, add op times and steps (written to FILE without "
        "--out)",
    )
    add_autocast(parser, "with --model: measure it under torch.autocast in this dtype: bfloat16 or float16")
    parser.add_argument(
        "--optimizer",
        choices=("adamw", "momentum", "sgd"),
        default="adamw",
        help="whose step is measured (adamw; momentum: SGD with it)",
    )


def _duration(text: str) -> float:
    from hetspmd.codec.quantities import parse_quantity

    for unit, seconds in (("min", 60.0), ("h", 3600.0)):
        if text.endswith(unit):
            number, scale = text.removesuffix(unit), seconds
            break
    else:
        number, scale = text, 1.0
    try:
        return scale * parse_quantity(number, "seconds")
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write it as 60s or 2min") from error


def _bytes(text: str) -> int:
    from hetspmd.codec.quantities import parse_quantity

    try:
        return max(int(parse_quantity(text, "bytes")), 1)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes; write it as 8GiB") from error


def _percentage(text: str) -> float:
    number, scale = (text.removesuffix("%"), 0.01) if text.endswith("%") else (text, 1.0)
    try:
        value = scale * float(number)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no part of a whole; write it as 5% or 0.05")
    return value


def run(options: argparse.Namespace) -> int:
    """Measure, or show."""
    if options.show is not None:
        if options.model or options.cluster is not None:
            raise OutputError("--model and --cluster measure; --show only shows a file that was measured")
        return _show(options)
    if options.svg is not None:
        raise OutputError("--svg goes with --show FILE; measure first, then plot the file")
    if (options.memory is not None or options.no_steps or options.autocast) and not options.model:
        raise OutputError("--memory, --no-steps and --autocast go with --model TARGET, which is measured")
    if options.memory is not None and options.no_steps:
        raise OutputError("--memory is what steps are given, and --no-steps measures none; leave one out")
    if options.cluster is not None and not options.model:
        raise OutputError("--cluster FILE goes with --model TARGET, whose ops are measured")
    if options.out is None and options.cluster is None:
        raise OutputError(
            "name --out FILE for the cluster file that is measured, or --show FILE for one to show"
        )
    return _measure(options)


def _show(options: argparse.Namespace) -> int:
    from hetspmd.codec.files import write_output
    from hetspmd.profile.measure import Profile
    from hetspmd.profile.plot import profile_svg
    from hetspmd.profile.show import profile_text

    picture = options.svg or str(Path(options.show).with_suffix(".svg"))
    check_writable(picture)
    profile = Profile.load(options.show)
    write_output(profile_svg(profile), picture)
    print(profile_text(profile))
    print(f"\nPlotted in {picture}")
    return 0


def _measure(options: argparse.Namespace) -> int:
    from dataclasses import replace

    from hetspmd.profile.measure import Options, Profile, measure
    from hetspmd.profile.session import joined
    from hetspmd.profile.show import profile_text

    path = options.cluster if options.out is None else options.out
    wanted = Options(options.budget, options.tolerance, options.flops, optimizer=options.optimizer)
    with joined(options.device) as session:
        first = session.rank == 0
        session.together("checking the output", lambda: check_writable(path, stdout=True) if first else None)
        if options.cluster is not None:
            (profile, *_) = session.together("reading the cluster", lambda: Profile.open(options.cluster))
            for_ops = wanted
        else:
            for_ops = replace(wanted, budget=options.budget / 2)
            profile = _devices(session, for_ops if options.model else wanted, measure)
        if options.model:
            profile = _model(session, options, profile, for_ops)
        session.together("writing", lambda: write_text(path, profile.to_text()) if first else None)
        if first and path != STDOUT:
            print(profile_text(profile))
            print(f"\nWritten to {path}; plot it with hetspmd profile --show {path}")
    return 0


def _devices(session: Session, wanted: Options, measure: Callable[..., Profile]) -> Profile:
    """Measure the devices and the collectives."""
    first = session.rank == 0
    progress = Progress(wanted.budget, shown=first)
    if first:
        print(_promise(session, wanted), file=sys.stderr)
    try:
        return measure(session, wanted, progress)
    finally:
        progress.close()


def _model(session: Session, options: argparse.Namespace, profile: Profile, wanted: Options) -> Profile:
    """Measure the ops of the models and, unless told otherwise, their whole steps."""
    from dataclasses import replace

    from hetspmd.profile.measure import with_ops
    from hetspmd.profile.profile_thresholds import THRESHOLDS
    from hetspmd.profile.whole_steps import with_steps

    first = session.rank == 0
    ops, steps = _cases(session, options, profile.cluster)
    part = THRESHOLDS.model_part if steps else 0.0
    for_ops = replace(wanted, budget=(1 - part) * wanted.budget)
    for_steps = replace(wanted, budget=part * wanted.budget)
    if first:
        also = f", and whole steps for about {for_steps.budget:g} s" if steps else ""
        print(f"Measuring {len(ops)} ops for at most {for_ops.budget:g} s{also}.", file=sys.stderr)
    progress = Progress(wanted.budget, shown=first)
    try:
        profile = with_ops(session, profile, ops, for_ops, progress)
        return with_steps(session, profile, steps, for_steps, options.memory, progress) if steps else profile
    finally:
        progress.close()


def _cases(
    session: Session, options: argparse.Namespace, cluster: Cluster
) -> tuple[list[OpCase], list[StepCase]]:
    """The ops of the models, found by rank 0; the others import the files, which may register ops and rules. And
    the steps of the models, which every rank makes for itself; rank 0 says where their examples have rows."""
    from hetspmd.cli.target import load_module, load_target, target_place
    from hetspmd.profile.cases import together
    from hetspmd.profile.whole_steps import step_case
    from hetspmd.rules.theory import derive
    from hetspmd.trace.autocast import autocast_for
    from hetspmd.trace.trace import split_example, trace

    targets, dtype, steps = options.model, options.autocast, not options.no_steps
    loaded = []

    def traced() -> tuple[list[OpCase], list[RowPlaces]]:
        if session.rank:
            for target in targets:
                load_module(target_place(target))
            return [], []
        theories, cases = [], []
        for target in targets:
            model, example = load_target(target)
            with autocast_for(model, dtype):
                theories.append(derive(trace(model, *split_example(example), training=True)))
            if steps:
                cases.append(step_case(target, model, example, autocast=dtype))
        loaded.extend(cases)
        return together(theories, cluster), [case.places for case in cases]

    def made() -> list[StepCase]:
        return loaded or [
            step_case(t, *load_target(t), of, dtype) for t, of in zip(targets, places, strict=True)
        ]

    ops, places = session.together("tracing the model", traced)[0]
    if not steps:
        return ops, []
    own: list[StepCase] = []
    session.together("loading the model", lambda: own.extend(made()))
    return ops, own


def _promise(session: Session, options: Options) -> str:
    import torch

    world = session.world
    what = f"{world} devices and the collectives between them" if world > 1 else "one device"
    text = (
        f"Measuring {what}, for about {options.budget:g} s: each median until its 95 % interval (order statistics) "
        f"is within ± {100 * options.tolerance:g} %, or the time is up."
    )
    others = torch.cuda.device_count() if session.device.type == "cuda" and world == 1 else 1
    if others > 1:
        text += f"\nThere are {others} GPUs here; torchrun --nproc-per-node {others} -m hetspmd profile ... "
        text += "measures all."
    return text
