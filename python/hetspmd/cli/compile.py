"""``hetspmd compile``: show what was decided and what it costs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetspmd.cli.options import add_target, positive_seconds
from hetspmd.cli.outputs import STDOUT, check_folder_writable, check_writable, read_constraints, write_json
from hetspmd.cli.progress import Elapsed

if TYPE_CHECKING:
    from hetspmd.plan.explanation import Explanation
    from hetspmd.plan.plan import Plan

STAGES = {
    "trace": "tracing the model",
    "rules": "deriving rules",
    "synth": "searching programs",
    "balance": "balancing ratios",
    "total": "",
}
"""What progress says of the compiler's stages."""


def add(commands: Any, debug: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "compile",
        parents=[debug],
        help="synthesize a program and show it",
        description="Synthesize the program of a training step; show what was decided and what it costs.",
    )
    add_target(parser)
    parser.add_argument("--plan", metavar="OUT", help="write the plan, for hetspmd.HAP(..., plan=OUT)")
    parser.add_argument("--program", action="store_true", help="print the whole program as well")
    parser.add_argument(
        "--schedule",
        action="store_true",
        help="print the order in which the steps run, where collectives are waited for, and what is saved",
    )
    parser.add_argument(
        "--host-randomness",
        choices=("refuse", "trace_each_step", "freeze"),
        default="refuse",
        help="what becomes of random numbers that the model's Python draws (refuse); HAP must be told the same",
    )
    parser.add_argument("--strict", action="store_true", help="an op without a rule is an error")
    parser.add_argument(
        "--time-limit",
        type=positive_seconds,
        default=600.0,
        metavar="S",
        help="seconds for one search (600); where it strikes, the plan depends on the machine's speed",
    )
    parser.add_argument(
        "--explain",
        metavar="NAME",
        action="append",
        default=[],
        help="why a parameter, input or output[i] has its form: the best program's cost for each it could have",
    )
    parser.add_argument(
        "--why",
        action="store_true",
        help="print every candidate that was compared, with its predicted seconds and why it was not taken",
    )
    parser.add_argument(
        "--timeline",
        metavar="OUT",
        help="show who waits for whom in a step, and write it as a Chrome trace (for ui.perfetto.dev)",
    )
    parser.add_argument(
        "--problem", metavar="OUT", help="write the search problem at the plan's lengths, for hetspmd solve"
    )
    parser.add_argument(
        "--dump-passes",
        metavar="DIR",
        help="write the local graphs of each rank after each pass of lowering, as DIR/rank0/00-emit.txt",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Compile and report."""
    from hetspmd.cli.target import load_target
    from hetspmd.cluster.cluster import Cluster
    from hetspmd.codec.files import write_output
    from hetspmd.lower.dump import dump_passes
    from hetspmd.optimize.compiler import compile as synthesize
    from hetspmd.optimize.compiler import problem_text
    from hetspmd.report import plan_json
    from hetspmd.trace.autocast import autocast_for

    check_writable(options.json, stdout=True)
    check_writable(options.plan)
    check_writable(options.problem)
    check_writable(options.timeline)
    check_folder_writable(options.dump_passes)
    cluster = Cluster.load(options.cluster)
    constraints = read_constraints(options.constraints)
    model, example = load_target(options.target)
    timings: dict[str, float] = {}
    with autocast_for(model, options.autocast), Elapsed() as progress:
        plan = synthesize(
            model,
            example,
            cluster,
            strict=options.strict,
            constraints=constraints,
            host_randomness=options.host_randomness,
            time_limit=options.time_limit,
            segments=options.segments,
            machines=options.machines,
            micro_batches=options.micro_batches,
            zero=options.zero,
            recompute=options.recompute,
            timings=timings,
            progress=lambda stage: progress(STAGES[stage]),
        )
    if options.plan is not None:
        write_output(plan.to_json(), options.plan)
    if options.problem is not None:
        write_output(problem_text(plan, constraints), options.problem)
    if options.timeline is not None:
        plan.timeline().save(options.timeline)
    dumped = () if options.dump_passes is None else dump_passes(plan, Path(options.dump_passes))
    explained = [plan.explain(name, constraints=constraints) for name in options.explain]
    if options.json is not None:
        document = plan_json(plan, timings)
        if explained:
            document["explain"] = [e.document() for e in explained]
        write_json(options.json, document)
    if options.json != STDOUT:
        _show(options, plan, timings, dumped, explained)
    return 0


def _show(
    options: argparse.Namespace,
    plan: Plan,
    timings: Mapping[str, float],
    dumped: Sequence[int],
    explained: Sequence[Explanation],
) -> None:
    """Print the plan; ``timings`` in seconds per stage, ``dumped`` the ranks whose local graphs were written."""
    from hetspmd.lower.local_program import numbered
    from hetspmd.report import candidates_text, plan_text, program_text, schedule_text

    print(plan_text(plan))
    print("Compiled in " + ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in timings.items()))
    if dumped:
        print(f"Local graphs of {numbered('rank', dumped)} after each pass: {options.dump_passes}")
    if options.why:
        print(f"\n{candidates_text(plan)}")
    if options.timeline is not None:
        print(f"\n{plan.timeline()}")
    for explanation in explained:
        print(f"\n{explanation}")
    if options.program:
        print(f"\nProgram\n{program_text(plan)}")
    if options.schedule:
        print(f"\n{schedule_text(plan)}")
