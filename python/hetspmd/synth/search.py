"""The search for the best program at given lengths: A* in the Rust core (HAP 4.3, design 5)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from hetspmd import _core
from hetspmd.balance.lengths import Lengths
from hetspmd.cost.model import CostModel
from hetspmd.errors import InfeasibleError, SearchError
from hetspmd.synth.order import assemble_program
from hetspmd.synth.program import Program
from hetspmd.synth.space import Move, Space, cost_unit

Progress = Callable[[float, int, int | None], object]


@dataclass(frozen=True)
class Limits:
    """Where a search stops early: seconds, expansions of partial programs, bytes.

    The limit on expansions, not the one on seconds, is what ends a hard search by default, so that the plan does
    not depend on the machine.
    """

    seconds: float = 600.0
    expansions: int = 100_000
    memory: int = 4 * 2**30


@dataclass(frozen=True)
class Found:
    """A program and what the search proved of it. Costs are additive, in seconds; ``gap`` is relative.

    ``rows`` and ``moves`` are the chosen values; ``seconds`` is wall time.
    """

    program: Program
    rows: tuple[int, ...]
    moves: tuple[Move | None, ...]
    cost: float
    lower_bound: float
    gap: float
    stop_reason: str
    expansions: int
    seconds: float
    values: int


def priced(
    space: Space, model: CostModel, lengths: Lengths
) -> tuple[str, tuple[tuple[int, ...], ...], float]:
    """The problem text of ``space`` at ``lengths``, the moves kept in it (:meth:`Space.problem`), and how many
    units of its costs make a second."""
    row_seconds = [list(map(float, costs)) for costs in model.row_costs(lengths)]
    move_seconds = [
        list(map(float, model.move_costs(t, moves, lengths))) for t, moves in enumerate(space.moves)
    ]
    per_second = cost_unit(row_seconds, move_seconds)
    return *space.problem(row_seconds, move_seconds, per_second), per_second


def search(
    space: Space, model: CostModel, lengths: Lengths, limits: Limits, *, start: Found | None = None,
    progress: Progress | None = None,
) -> Found:  # fmt: skip
    """The best program of ``space`` at ``lengths``.

    ``start`` is an earlier find in the same space, whose program is an upper bound. Raises InfeasibleError if
    no program satisfies the constraints, SearchError if a limit struck before the first program was found.
    """
    problem, kept, per_second = priced(space, model, lengths)
    incumbent = None if start is None else _incumbent(space, kept, start)
    text = _core.solve(
        problem, time_limit=limits.seconds, max_expansions=limits.expansions, memory_limit=limits.memory,
        incumbent=incumbent, progress=progress,
    )  # fmt: skip
    solution = json.loads(text)
    if solution["stop_reason"] == "infeasible":
        raise InfeasibleError(
            f"no program satisfies the constraints: {solution.get('conflict', 'unknown conflict')}"
        )
    if solution["cost"] is None:
        raise SearchError(
            f"the search stopped ({solution['stop_reason']}) before it found a program; raise the limit"
        )
    rows = tuple(space.rows[i][k] for i, k in enumerate(solution["rows"]))
    chosen = dict(zip(sorted(space.theory.graph.producers), solution["moves"], strict=True))
    moves = tuple(
        None if chosen.get(t, -1) < 0 else space.moves[t][kept[t][chosen[t]]] for t in range(len(space.moves))
    )
    return Found(
        assemble_program(space, rows, moves), rows, moves, solution["cost"] / per_second,
        solution["lower_bound"] / per_second, solution["gap"], solution["stop_reason"],
        solution["expansions"], solution["seconds"], solution["values"],
    )  # fmt: skip


def _incumbent(space: Space, kept: tuple[tuple[int, ...], ...], start: Found) -> str | None:
    """The core's text of an earlier find; None if the space lacks one of its values."""
    rows: list[int] = []
    for i, row in enumerate(start.rows):
        if row not in space.rows[i]:
            return None
        rows.append(space.rows[i].index(row))
    moves: list[int] = []
    for t in sorted(space.theory.graph.producers):
        move = start.moves[t]
        forms = [space.moves[t][k][:2] for k in kept[t]]
        if move is None:
            moves.append(-1)
        elif move[:2] in forms:
            moves.append(forms.index(move[:2]))
        else:
            return None
    return json.dumps({"rows": rows, "moves": moves})
