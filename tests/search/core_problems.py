"""Problems for the search core, as documents: a small one, one that no search finishes, and random ones."""

from __future__ import annotations

import random
from typing import Any

IDENTITY, ALL_REDUCE, GATHER_0 = 0, 1, 2
FORMS = 4


def small_problem() -> dict[str, Any]:
    """``y = f(x)``, x stored as slices, y wanted whole: gather x and run replicated, or gather y."""
    return {
        "version": 1,
        "tensors": [
            {"name": "x", "moves": [[GATHER_0, IDENTITY, "all_gather", 5]]},
            {"name": "y", "moves": [[GATHER_0, IDENTITY, "all_gather", 4]]},
        ],
        "instructions": [
            {"name": "x", "inputs": [], "outputs": [0], "rows": [{"pre": [], "post": [GATHER_0], "cost": 1}]},
            {
                "name": "f",
                "inputs": [0],
                "outputs": [1],
                "rows": [
                    {"pre": [IDENTITY], "post": [IDENTITY], "cost": 3},
                    {"pre": [GATHER_0], "post": [GATHER_0], "cost": 1},
                ],
            },
        ],
        "requirements": [{"tensor": 1, "any_of": [IDENTITY]}],
        "ties": [],
    }


def hard_problem(count: int = 320) -> dict[str, Any]:
    """Densely connected and pseudo-random: no search finishes it within a test."""
    state = 7

    def draw(below: int) -> int:
        nonlocal state
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (state >> 33) % below

    tensors, instructions = [], []
    for index in range(count):
        arity = 3 if index >= 3 else 0
        rows = [{"pre": [IDENTITY] * arity, "post": [IDENTITY], "cost": 900}]
        rows += [
            {"pre": [1 + draw(5) for _ in range(arity)], "post": [1 + draw(5)], "cost": draw(400)}
            for _ in range(7)
        ]
        moves: list[list[Any]] = [[form, IDENTITY, "gather", 300 + draw(900)] for form in range(1, 6)]
        moves += [[form, 1 + draw(5), "all_to_all", 50 + draw(400)] for form in range(1, 6)]
        inputs = [draw(index) for _ in range(arity)]
        instructions.append({"name": f"i{index}", "inputs": inputs, "outputs": [index], "rows": rows})
        tensors.append({"name": f"t{index}", "moves": moves})
    requirements = [{"tensor": count - 1, "any_of": [IDENTITY]}]
    return {
        "version": 1,
        "tensors": tensors,
        "instructions": instructions,
        "requirements": requirements,
        "ties": [],
    }


def random_problem(seed: int, count: int = 14) -> dict[str, Any]:
    """Instructions with none to two inputs (which may repeat) and up to two outputs, prices of holding, direct
    rows, requirements and ties. Many of them have a program, some have none."""
    rng = random.Random(seed)

    def form() -> int:
        return rng.choice((IDENTITY, ALL_REDUCE, 2, 2, 3, 3))

    tensors: list[dict[str, Any]] = []
    instructions: list[dict[str, Any]] = []
    for index in range(count):
        inputs = [rng.randrange(len(tensors)) for _ in range(rng.randrange(3))] if tensors else []
        outputs = list(range(len(tensors), len(tensors) + rng.choice((1, 1, 1, 2))))
        rows: list[dict[str, Any]] = []
        for _ in range(rng.randint(2, 5)):
            row: dict[str, Any] = {
                "pre": [form() for _ in inputs],
                "post": [form() for _ in outputs],
                "cost": rng.randrange(30),
            }
            rows.append(row | {"direct": True} if inputs and rng.random() < 0.25 else row)
        if rng.random() < 0.8:
            rows.append({"pre": [0] * len(inputs), "post": [0] * len(outputs), "cost": 40})
        instructions.append({"name": f"i{index}", "inputs": inputs, "outputs": outputs, "rows": rows})
        for tensor in outputs:
            pairs = [(a, b) for a in range(FORMS) for b in range(FORMS) if a != b]
            moves = [[*pair, "move", rng.randrange(25)] for pair in rng.sample(pairs, rng.randrange(6))]
            keep = [[held, rng.randrange(20)] for held in range(FORMS) if rng.random() < 0.5]
            tensors.append({"name": f"t{tensor}", "moves": moves, "keep": keep})
    some = range(len(tensors))
    requirements = [
        {"tensor": t, "any_of": sorted({form(), form()})} for t in (some[-1], rng.choice(some[:-1]))
    ]
    parameter, gradient = rng.choice(some[: len(some) // 2]), rng.choice(some[len(some) // 2 :])
    ties = [{"parameter": parameter, "gradient": gradient}]
    return {
        "version": 1,
        "tensors": tensors,
        "instructions": instructions,
        "requirements": requirements,
        "ties": ties,
    }
