"""A search problem as an integer program, for HiGHS: an independent solver of the same problem.

One binary per value of a variable: a row of an instruction together with a move of its output (for several
outputs, one variable for the row and one per output, as in the core). Let x be the values of the producer of a
tensor and y those of a reader. With

    sum of y that need form f   <=   sum of x that make f available     for each form f and reader
    sum of the values of a variable = 1

the solutions are exactly the programs. Sums on both sides are at most 1, so one row per form and reader does.
"""

from __future__ import annotations

import json
from typing import Any

import highspy
import numpy as np

IDENTITY = 0


class _Model:
    def __init__(self) -> None:
        self.costs: list[float] = []
        self.rows: list[tuple[float, float, dict[int, float]]] = []

    def binary(self, cost: float) -> int:
        self.costs.append(cost)
        return len(self.costs) - 1

    def row(self, low: float, high: float, terms: dict[int, float]) -> None:
        self.rows.append((low, high, terms))


def optimum(problem: str, *, time_limit: float = 600.0) -> tuple[int, float]:
    """``(cost of the best program, seconds)`` of a problem text. Raises RuntimeError if HiGHS fails."""
    document: dict[str, Any] = json.loads(problem)
    unit = 1.0 / max(1, max((r["cost"] for i in document["instructions"] for r in i["rows"]), default=1))
    model = _Model()
    available: list[list[tuple[int, frozenset[int]]]] = [[] for _ in document["tensors"]]
    produced: list[list[tuple[int, int]]] = [[] for _ in document["tensors"]]
    needs: dict[tuple[int, int, int], dict[int, float]] = {}
    for number, instruction in enumerate(document["instructions"]):
        _instruction(model, document, number, instruction, unit, available, produced, needs)
    for (_, tensor, form), terms in needs.items():
        _implies(model, terms, _having(available[tensor], form))
    for requirement in document["requirements"]:
        terms = {
            v: 1.0
            for v, forms in available[requirement["tensor"]]
            if IDENTITY in forms or forms & set(requirement["any_of"])
        }
        model.row(1.0, highspy.kHighsInf, terms)
    for tie in document["ties"]:
        stored: dict[int, dict[int, float]] = {}
        for v, form in produced[tie["parameter"]]:
            stored.setdefault(form, {})[v] = 1.0
        for form, terms in stored.items():
            _implies(model, terms, _having(available[tie["gradient"]], form))
    return _solve(model, unit, time_limit)


def _instruction(
    model: _Model, document: dict[str, Any], number: int, instruction: dict[str, Any], unit: float,
    available: list[list[tuple[int, frozenset[int]]]], produced: list[list[tuple[int, int]]],
    needs: dict[tuple[int, int, int], dict[int, float]],
) -> None:  # fmt: skip
    outputs = instruction["outputs"]
    merged = len(outputs) == 1
    choice: dict[int, float] = {}
    by_form: list[dict[int, dict[int, float]]] = [{} for _ in outputs]
    for row in instruction["rows"]:
        values = []
        moves = _moves(document, outputs[0], row["post"][0]) if merged else [(frozenset[int](), 0)]
        for forms, cost in moves:
            v = model.binary((row["cost"] + cost) * unit)
            values.append(v)
            choice[v] = 1.0
            if merged:
                available[outputs[0]].append((v, forms))
                produced[outputs[0]].append((v, row["post"][0]))
        for position, form in enumerate(row["post"]):
            by_form[position].setdefault(form, {}).update(dict.fromkeys(values, 1.0))
        for tensor, form in dict.fromkeys(zip(instruction["inputs"], row["pre"], strict=True)):
            needs.setdefault((number, tensor, form), {}).update(dict.fromkeys(values, 1.0))
    model.row(1.0, 1.0, choice)
    if merged:
        return
    for position, tensor in enumerate(outputs):
        for form, rows in by_form[position].items():
            link = dict.fromkeys(rows, -1.0)
            for forms, cost in _moves(document, tensor, form):
                v = model.binary(cost * unit)
                available[tensor].append((v, forms))
                produced[tensor].append((v, form))
                link[v] = 1.0
            model.row(0.0, 0.0, link)


def _moves(document: dict[str, Any], tensor: int, form: int) -> list[tuple[frozenset[int], int]]:
    found = [(frozenset([form]), 0)]
    for source, target, _, cost in document["tensors"][tensor]["moves"]:
        if source == form:
            found.append((frozenset([form, target]), cost))
    return found


def _having(values: list[tuple[int, frozenset[int]]], form: int) -> dict[int, float]:
    return {v: 1.0 for v, forms in values if form in forms or IDENTITY in forms}


def _implies(model: _Model, left: dict[int, float], right: dict[int, float]) -> None:
    """sum of left <= sum of right."""
    terms = dict(right)
    for v in left:
        terms[v] = terms.get(v, 0.0) - 1.0
    model.row(0.0, highspy.kHighsInf, {v: c for v, c in terms.items() if c})


def _solve(model: _Model, unit: float, time_limit: float) -> tuple[int, float]:
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("time_limit", time_limit)
    solver.setOptionValue("mip_rel_gap", 0.0)
    solver.setOptionValue("mip_abs_gap", 0.0)
    solver.setOptionValue("threads", 1)
    count = len(model.costs)
    zeros, ones = np.zeros(count), np.ones(count)
    empty = np.empty(0)
    solver.addCols(
        count, np.array(model.costs), zeros, ones, 0, empty.astype(np.int32), empty.astype(np.int32), empty
    )
    columns = np.arange(count, dtype=np.int32)
    solver.changeColsIntegrality(count, columns, np.array([highspy.HighsVarType.kInteger] * count))
    for low, high, terms in model.rows:
        solver.addRow(
            low, high, len(terms), np.array(list(terms), dtype=np.int32), np.array(list(terms.values()))
        )
    solver.run()
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        raise RuntimeError(f"HiGHS stopped: {solver.modelStatusToString(solver.getModelStatus())}")
    return round(solver.getInfo().objective_function_value / unit), solver.getRunTime()
