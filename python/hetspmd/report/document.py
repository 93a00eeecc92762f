"""A plan as the JSON document of ``hetspmd compile --json``.

Keys: ``version`` (of hetspmd), ``graph`` {``instructions``, ``parameters``: numbers of them, parameters
counted in elements}, ``search`` {``cost``, ``lower_bound``, ``gap``, ``seconds``, ``expansions``,
``stop_reason``}, ``cost`` {``step_seconds``, ``compute_seconds``, ``communication_seconds``,
``memory_bytes`` per device}, ``candidates`` (what was compared, as
:func:`~hetspmd.report.candidates.candidates_document` says), ``baselines`` (name to predicted seconds),
``ratios`` (share per device, 0 for
an idle one, of several segments their mean, weighted with FLOPs; sending idle ones the results is part of
``communication_seconds`` and no step of ``program``), ``segments`` (for each: ``ratios``, and ``modules``, the
first and the last that it runs in forward),
``micro_batches``, ``own_turns`` (how many turns each active device takes, where they differ), ``rows_of_turns`` (by
rank, the samples of each of its turns; empty without micro-batches), ``zero_levels`` (per group of parameters),
``recomputed`` (the blocks that the backward computes again: ``block``, ``seconds`` that it adds on the device that
takes longest for it, ``bytes`` of the whole batch that it saves),
``inside`` (of a plan across machines what :func:`~hetspmd.report.machine_report.inside_document` says, else null),
``program`` (per step: ``call`` and ``triple`` as text; of a collective ``kind``, ``bytes`` and ``seconds``
too), ``transfers`` (how many times something is sent for its collectives, of which small ones share buckets),
``sensitivity`` (of the quantities that the step depends on, the greatest elasticity first: ``quantity``,
``ranks`` (none: the network's), ``elasticity`` of the stage model's seconds, ``gain``: the part of the predicted
step that 10 % better would gain, null but for the first ones), ``lengths`` {``fractional_seconds``: of a step whose
units could be cut, ``loss``: what whole units cost beyond those, as a part of them} and ``seconds`` {``trace``,
``rules``, ``synth``, ``balance``, ``total``: wall time}. Where the cluster has measured steps, ``measured_steps``
says what they are to the plan (:func:`~hetspmd.report.measured_report.measured_document`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetspmd._core import version
from hetspmd.plan.plan import Plan
from hetspmd.plan.plan_facts import collectives, rows_of_turns, segment_modules, transfers
from hetspmd.report.candidates import candidates_document
from hetspmd.report.limits import limits, limits_document
from hetspmd.report.machine_report import inside_document
from hetspmd.report.measured_report import measured_document
from hetspmd.report.notation import step_text
from hetspmd.report.recomputing import recomputing_document
from hetspmd.report.schedule_text import schedule_document
from hetspmd.report.zero_text import zero_levels

STAGES = ("trace", "rules", "synth", "balance", "total")


def plan_json(plan: Plan, seconds: Mapping[str, float] | None = None) -> dict[str, Any]:
    """The document; ``seconds`` are the wall times that ``hetspmd.compile(..., timings=...)`` fills in."""
    wall = {stage: float((seconds or {}).get(stage, 0.0)) for stage in STAGES}
    graph, search, cost = plan.graph, plan.search, plan.cost
    return {
        "version": version(),
        "graph": {
            "instructions": len(graph.instructions),
            "parameters": sum(graph.tensors[p.tensor].numel for p in graph.parameters),
        },
        "search": {
            "cost": search.cost,
            "lower_bound": search.lower_bound,
            "gap": search.gap,
            "seconds": wall["synth"],
            "expansions": search.expansions,
            "stop_reason": search.stop_reason,
        },
        "cost": {
            "step_seconds": cost.step_seconds,
            "compute_seconds": cost.compute_seconds,
            "communication_seconds": cost.communication_seconds,
            "memory_bytes": list(cost.memory_bytes),
        },
        "candidates": candidates_document(plan),
        "baselines": {name: plan.baselines[name] for name in sorted(plan.baselines)},
        "ratios": list(plan.shares),
        "segments": [
            {"ratios": list(row), "modules": list(modules)}
            for row, modules in zip(plan.segment_shares, segment_modules(plan.graph), strict=True)
        ],
        "micro_batches": plan.micro_batches,
        "own_turns": list(plan.own_turns),
        "rows_of_turns": {str(rank): list(rows) for rank, rows in rows_of_turns(plan).items()},
        "zero_levels": zero_levels(plan),
        "recomputed": recomputing_document(plan),
        "program": _program(plan),
        "schedule": schedule_document(plan),
        "transfers": transfers(plan),
        "inside": inside_document(plan),
        **measured_document(plan),
        **limits_document(limits(plan)),
        "seconds": wall,
    }


def _program(plan: Plan) -> list[dict[str, Any]]:
    costs = {c.position: c for c in collectives(plan)}
    steps: list[dict[str, Any]] = []
    for position, step in enumerate(plan.program.steps):
        call, triple = step_text(plan.graph, step)
        entry: dict[str, Any] = {"call": call, "triple": triple}
        if position in costs:
            collective = costs[position]
            entry |= {"kind": collective.step.kind, "bytes": collective.nbytes, "seconds": collective.seconds}
        steps.append(entry)
    return steps
