"""What a plan computes again in the backward, for people and as part of the JSON document."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hetspmd.codec.quantities import quantity_text, seconds_text
from hetspmd.codec.tables import counted, table
from hetspmd.plan.plan import Plan
from hetspmd.program.program import Communicate, Compute
from hetspmd.trace.recompute_savings import copying_instructions, saved_bytes

_MOST_ROWS = 12
"""Rows of the table: those of like blocks are one."""


@dataclass(frozen=True, slots=True)
class Recomputing:
    """A block that is computed again: predicted ``seconds`` that it adds on the device that takes longest for it,
    with
    its collectives and without overlap; ``nbytes`` of the whole batch that the forward need not hold for it."""

    block: str
    seconds: float
    nbytes: int


def recomputing(plan: Plan) -> tuple[Recomputing, ...]:
    """The blocks that a plan computes again."""
    graph, costs = plan.graph, plan.costs
    of = copying_instructions(graph)
    saved = saved_bytes(graph)
    compute = {name: [0.0] * len(plan.active) for name in saved}
    sent = dict.fromkeys(saved, 0.0)
    for step in plan.program.steps:
        if isinstance(step, Compute) and step.instruction in of:
            row = costs.row_index(step.instruction, step.row)
            seconds = costs.row_seconds(step.instruction, row, plan.lengths)
            block = of[step.instruction]
            compute[block] = [a + b for a, b in zip(compute[block], seconds, strict=True)]
        elif isinstance(step, Communicate) and graph.producers[step.tensor] in of:
            sent[of[graph.producers[step.tensor]]] += costs.move_seconds(
                step.tensor, step.source, step.target, step.kind, plan.lengths
            )
    return tuple(Recomputing(name, max(compute[name]) + sent[name], saved[name]) for name in saved)


def recomputing_text(plan: Plan) -> str:
    """The blocks, those whose names differ only in numbers together."""
    blocks = recomputing(plan)
    groups: dict[str, list[Recomputing]] = {}
    for block in blocks:
        groups.setdefault(re.sub(r"\d+", "*", block.block), []).append(block)
    rows = [
        [
            pattern if len(members) > 1 else members[0].block,
            str(len(members)),
            seconds_text(sum(b.seconds for b in members)),
            _bytes(members),
        ]
        for pattern, members in groups.items()
    ]
    more = [["...", "", "", ""]] if len(rows) > _MOST_ROWS else []
    total = seconds_text(sum(b.seconds for b in blocks))
    title = (
        f"Recomputation: the backward computes {counted(len(blocks), 'block')} again, which adds {total} and saves "
        f"{_bytes(blocks)} of activations of the whole batch"
    )
    header = ["block", "count", "adds", "saves"]
    return title + "\n" + table(header, [*rows[:_MOST_ROWS], *more], right=(1, 2, 3))


def recomputing_document(plan: Plan) -> list[dict[str, Any]]:
    """Per block ``block``, ``seconds`` and ``bytes``, as :class:`Recomputing` says."""
    return [{"block": b.block, "seconds": b.seconds, "bytes": b.nbytes} for b in recomputing(plan)]


def _bytes(blocks: Sequence[Recomputing]) -> str:
    return quantity_text(sum(b.nbytes for b in blocks), "bytes")
