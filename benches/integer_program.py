"""A search problem as an integer program, for HiGHS: an independent solver of the same problem.

One binary per value of a variable: a row of an instruction together with a move of its output (for several
outputs, one variable for the row and one per output, as in the core). The value with the produced form p and
the communicated form m costs

    row + move + kept,    kept = price of holding p, or the least of those of p and m

and makes p and m available, and everything if one of them is replicated. Let x be the values of the producer of a
tensor and y those of a reader. With

    sum of y that need form f             <=   sum of x that make f available    for each form f and reader
    sum of y of direct rows that need f   <=   sum of x that produce f           the same, without communication
    sum of x that produce f               <=   sum of z that make f available    for each tie of x to z
    sum of the values of a variable = 1

the solutions are exactly the programs. Sums on both sides are at most 1, so one row per form and reader does.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import highspy
import numpy as np

IDENTITY = 0

LARGEST = 1e6
"""What the dearest value costs in the unit that HiGHS sees: its tolerances are absolute, about 1e-6."""

Terms = dict[int, float]


@dataclass(frozen=True)
class Optimum:
    """A program, its exact cost, HiGHS's lower bound, and CPU seconds of HiGHS alone.

    ``rows`` and ``moves`` are as in the core's solutions: one row per instruction, one move or -1 per tensor.
    """

    cost: int
    bound: float
    seconds: float
    rows: list[int]
    moves: list[int]


@dataclass
class _Model:
    """Binaries, rows, and what each binary stands for."""

    document: dict[str, Any]
    costs: list[int] = field(default_factory=list)
    rows: list[tuple[float, float, Terms]] = field(default_factory=list)
    meaning: list[tuple[int | None, int, int | None, int]] = field(default_factory=list)
    """Per binary: instruction, row, tensor, move."""
    available: list[dict[int, frozenset[int]]] = field(default_factory=list)
    produced: list[dict[int, int]] = field(default_factory=list)

    def binary(self, cost: int, meaning: tuple[int | None, int, int | None, int]) -> int:
        self.costs.append(cost)
        self.meaning.append(meaning)
        return len(self.costs) - 1

    def output(self, v: int, tensor: int, form: int, forms: frozenset[int]) -> None:
        """The value ``v`` produces ``tensor`` in ``form`` and makes ``forms`` available."""
        self.produced[tensor][v] = form
        self.available[tensor][v] = forms

    def having(self, tensor: int, form: int) -> Terms:
        """The values that make a form available."""
        return {v: 1.0 for v, forms in self.available[tensor].items() if form in forms or IDENTITY in forms}

    def producing(self, tensor: int, form: int) -> Terms:
        """The values that make it available without communication."""
        return {v: 1.0 for v, made in self.produced[tensor].items() if made in (form, IDENTITY)}

    def implies(self, left: Terms, right: Terms) -> None:
        """Sum of left <= sum of right."""
        terms = dict(right)
        for v in left:
            terms[v] = terms.get(v, 0.0) - 1.0
        self.rows.append((0.0, highspy.kHighsInf, {v: c for v, c in terms.items() if c}))


def optimum(problem: str, *, time_limit: float = 600.0) -> Optimum:
    """The best program of a problem text. Raises RuntimeError if HiGHS fails or runs out of time."""
    document: dict[str, Any] = json.loads(problem)
    model = _Model(document)
    model.available = [{} for _ in document["tensors"]]
    model.produced = [{} for _ in document["tensors"]]
    needs: dict[tuple[int, int, int, bool], Terms] = {}
    for number, instruction in enumerate(document["instructions"]):
        _instruction(model, number, instruction, needs)
    for (_, tensor, form, direct), terms in needs.items():
        model.implies(terms, model.producing(tensor, form) if direct else model.having(tensor, form))
    for requirement in document["requirements"]:
        wanted = set(requirement["any_of"])
        met = {
            v: 1.0
            for v, forms in model.available[requirement["tensor"]].items()
            if IDENTITY in forms or forms & wanted
        }
        model.rows.append((1.0, highspy.kHighsInf, met))
    for tie in document["ties"]:
        stored: dict[int, Terms] = {}
        for v, form in model.produced[tie["parameter"]].items():
            stored.setdefault(form, {})[v] = 1.0
        for form, terms in stored.items():
            model.implies(terms, model.having(tie["gradient"], form))
    return _solve(model, time_limit)


def _instruction(
    model: _Model, number: int, instruction: dict[str, Any], needs: dict[tuple[int, int, int, bool], Terms]
) -> None:
    outputs = instruction["outputs"]
    merged = len(outputs) == 1
    choice: Terms = {}
    by_form: list[dict[int, Terms]] = [{} for _ in outputs]
    for place, row in enumerate(instruction["rows"]):
        values: Terms = {}
        if merged:
            for move, forms, cost in _moves(model.document, outputs[0], row["post"][0]):
                v = model.binary(row["cost"] + cost, (number, place, outputs[0], move))
                model.output(v, outputs[0], row["post"][0], forms)
                values[v] = 1.0
        else:
            values[model.binary(row["cost"], (number, place, None, -1))] = 1.0
        choice |= values
        for position, form in enumerate(row["post"]):
            by_form[position].setdefault(form, {}).update(values)
        for tensor, form in dict.fromkeys(zip(instruction["inputs"], row["pre"], strict=True)):
            needs.setdefault((number, tensor, form, False), {}).update(values)
            if row.get("direct"):
                needs.setdefault((number, tensor, form, True), {}).update(values)
    model.rows.append((1.0, 1.0, choice))
    if merged:
        return
    for position, tensor in enumerate(outputs):
        for form, rows in by_form[position].items():
            link = dict.fromkeys(rows, -1.0)
            for move, forms, cost in _moves(model.document, tensor, form):
                v = model.binary(cost, (None, -1, tensor, move))
                model.output(v, tensor, form, forms)
                link[v] = 1.0
            model.rows.append((0.0, 0.0, link))


def _moves(document: dict[str, Any], tensor: int, form: int) -> list[tuple[int, frozenset[int], int]]:
    """``(move or -1, forms available, cost of the move and of holding the tensor)``, produced as ``form``."""
    described = document["tensors"][tensor]
    price: dict[int, int] = dict(described.get("keep", ()))
    kept = price.get(form, 0)
    found = [(-1, frozenset([form]), kept)]
    for number, (source, target, _, cost) in enumerate(described["moves"]):
        if source == form:
            found.append((number, frozenset([form, target]), cost + min(kept, price.get(target, 0))))
    return found


def _solve(model: _Model, time_limit: float) -> Optimum:
    unit = LARGEST / max(1, max(model.costs, default=1))
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("time_limit", time_limit)
    solver.setOptionValue("mip_rel_gap", 0.0)
    solver.setOptionValue("mip_abs_gap", 0.0)
    solver.setOptionValue("threads", 1)
    count = len(model.costs)
    zeros, ones = np.zeros(count), np.ones(count)
    none, empty = np.empty(0, dtype=np.int32), np.empty(0)
    solver.addCols(count, np.array(model.costs) * unit, zeros, ones, 0, none, none, empty)
    columns = np.arange(count, dtype=np.int32)
    solver.changeColsIntegrality(count, columns, np.array([highspy.HighsVarType.kInteger] * count))
    for low, high, terms in model.rows:
        solver.addRow(
            low, high, len(terms), np.array(list(terms), dtype=np.int32), np.array(list(terms.values()))
        )
    started = time.process_time()
    solver.run()
    seconds = time.process_time() - started
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        raise RuntimeError(f"HiGHS stopped: {solver.modelStatusToString(solver.getModelStatus())}")
    chosen = np.flatnonzero(np.array(solver.getSolution().col_value) > 0.5).tolist()
    rows, moves = [-1] * len(model.document["instructions"]), [-1] * len(model.document["tensors"])
    for v in chosen:
        instruction, row, tensor, move = model.meaning[v]
        if instruction is not None:
            rows[instruction] = row
        if tensor is not None:
            moves[tensor] = move
    cost = sum(model.costs[v] for v in chosen)
    return Optimum(cost, solver.getInfo().mip_dual_bound / unit, seconds, rows, moves)
