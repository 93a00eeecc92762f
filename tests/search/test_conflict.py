"""Conflicts: the set that is named is infeasible, all its parts are feasible, and no conflict is smaller."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import Any, cast

import cost_graphs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import hetspmd
from hetspmd.cost.model import CostModel
from hetspmd.errors import InfeasibleError
from hetspmd.placement import REPLICATE, Placement, shard
from hetspmd.program.lengths import Lengths, lengths_for
from hetspmd.rules.rule import Triple
from hetspmd.rules.theory import Theory, derive
from hetspmd.search import conflict
from hetspmd.search.conflict import (
    conflict_message,
    feasible,
    naming_conflicts,
    smallest_conflict,
    smallest_infeasible,
)
from hetspmd.search.constraints import Constraints, RowFilter, named_tensors, resolve
from hetspmd.search.search import Limits, search
from hetspmd.search.space import Move, Space, search_space
from hetspmd.trace.graph import Output
from hetspmd.trace.trace import trace


@dataclass
class UnitCosts:
    """Every row and every communication costs a second."""

    theory: Theory
    batches = None

    def row_costs(self, lengths: Lengths) -> list[list[float]]:
        return [[1.0] * len(rows) for rows in self.theory.rows]

    def moves_costs(self, moves: tuple[tuple[int, Move], ...], lengths: Lengths) -> Any:
        return np.ones(len(moves))


def has_program(theory: Theory, constraints: Constraints) -> bool:
    """By a whole search."""
    try:
        space = search_space(theory, constraints)
        search(space, cast(CostModel, UnitCosts(theory)), lengths_for(theory.axes, (0.5, 0.5)), Limits())
    except InfeasibleError:
        return False
    return True


TERMS = (
    "ab,ab->ab",
    "ab,bc->ac",
    "ab,ba->ab",
    "ab->ba",
    "ab->ab",
    "ab,cd,ad->bc",
    "ab,cd,ef->af",
    "ab,cd,ef->bc",
)


@dataclass(frozen=True)
class Instance:
    """A random graph of square tensors, and forms asked of inputs, parameters and outputs. Some ops must divide."""

    theory: Theory
    forms: dict[int, Placement]
    row_filter: RowFilter


def instance(seed: int) -> Instance:
    dice = random.Random(seed)
    b = cost_graphs.Builder()
    sizes = dict.fromkeys("abcdef", 4)
    sources = [b.input(f"x{i}", (4, 4)) for i in range(dice.randint(3, 5))]
    sources += [b.parameter(f"w{i}", (4, 4)) for i in range(dice.randint(0, 1))]
    tensors = list(sources)
    for i in range(dice.randint(1, 4)):
        terms = dice.choice(TERMS)
        reads = dice.sample(sources if dice.random() < 0.5 else tensors, k=terms.count(",") + 1)
        tensors.append(b.op(f"y{i}", terms, reads, sizes, linear=dice.random() < 0.5))
    theory = b.theory(b.op("loss", "ab->", (tensors[-1],), sizes, linear=True), {})
    made = tensors[len(sources) :]
    outputs = tuple(Output(t) for t in dice.sample(made, dice.randint(0, len(made))))
    theory = replace(theory, graph=replace(theory.graph, outputs=outputs))
    named = list(named_tensors(theory).values())
    forms: dict[int, Placement] = {}
    whole = dice.choice((1, 6))
    for tensor in dice.sample(named, dice.randint(1, min(6, len(named)))):
        dims = [d for d in range(2) if theory.axes.axis(tensor, d) is not None]
        forms[tensor] = dice.choice([*[REPLICATE] * whole, *map(shard, dims)])
    divided = {i.id for i in theory.graph.instructions if not i.is_source and dice.random() < 0.5}
    divided -= {theory.graph.producers[theory.graph.loss or 0]}

    def allowed(instruction: int, row: Triple, axis: int | None) -> bool:
        return instruction not in divided or row.factor is not None

    return Instance(theory, forms, allowed)


def subsets(items: Sequence[int]) -> Iterable[tuple[int, ...]]:
    return chain.from_iterable(combinations(items, n) for n in range(len(items) + 1))


def test_random_graphs_have_the_conflicts_that_are_named() -> None:
    """300 graphs, every subset of the constraints searched."""
    sizes: Counter[int] = Counter()
    for seed in range(300):
        found = instance(seed)
        answers = {
            s: has_program(found.theory, Constraints({t: found.forms[t] for t in s}, found.row_filter))
            for s in subsets(tuple(found.forms))
        }
        named = smallest_conflict(found.theory, found.forms, row_filter=found.row_filter)
        if answers[tuple(found.forms)] or not answers[()]:
            assert named == (), seed
        else:
            assert not answers[named], seed
            assert all(answers[part] for part in subsets(named) if part != named), seed
            assert len(named) == min(len(s) for s, holds in answers.items() if not holds), seed
        sizes[len(named)] += 1
    assert sizes[0] > 30
    assert sizes[1] > 10
    assert sizes[2] > 10
    assert sizes[3] > 0


def test_feasibility_agrees_with_the_search() -> None:
    """Also in spaces that lack communications, where the shortcut does not decide."""
    decided: Counter[tuple[bool, bool]] = Counter()
    for seed in range(300):
        dice = random.Random(seed)
        found = instance(seed)
        try:
            space = search_space(found.theory, Constraints(found.forms, found.row_filter))
        except InfeasibleError:
            continue
        kept: list[tuple[Move, ...]] = []
        for moves in space.moves:
            # All implementations of a communication, or none.
            pairs = {pair for pair in sorted({m[:2] for m in moves}) if dice.random() < 0.5}
            kept.append(tuple(m for m in moves if m[:2] in pairs))
        poor = replace(space, moves=tuple(kept))
        for asked in (space, poor):
            costs, lengths = (
                cast(CostModel, UnitCosts(found.theory)),
                lengths_for(found.theory.axes, (0.5, 0.5)),
            )
            try:
                search(asked, costs, lengths, Limits())
                expected = True
            except InfeasibleError:
                expected = False
            assert feasible(asked) == expected, seed
            decided[conflict._all_whole(asked), expected] += 1
    assert decided[True, False] == 0
    assert decided[True, True] > 50
    assert decided[False, True] > 10
    assert decided[False, False] > 10


@settings(max_examples=200)
@given(
    n=st.integers(1, 9),
    family=st.lists(st.frozensets(st.integers(0, 8), max_size=5), max_size=6),
    checks=st.sampled_from((3, 200)),
)
def test_smallest_infeasible_beside_brute_force(n: int, family: list[frozenset[int]], checks: int) -> None:
    conflicts = [c for c in family if max(c, default=0) < n]
    asked: list[tuple[str, ...]] = []
    items = [f"c{i}" for i in range(n)]

    def holds(some: Sequence[str]) -> bool:
        asked.append(tuple(some))
        return not any({f"c{i}" for i in c} <= set(some) for c in conflicts)

    found = smallest_infeasible(items, holds, checks)
    assert len(asked) == len(set(asked))
    if not conflicts or frozenset() in conflicts:
        assert found == ()
        return
    assert not holds(found)
    assert list(found) == [item for item in items if item in found]
    if checks == 200:
        assert len(found) == min(map(len, conflicts))


class Denoiser(nn.Module):
    """Inputs that meet in one op, before many layers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

    def forward(self, x: torch.Tensor, noise: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        y = (x + noise) * mask
        for layer in self.layers:
            y = torch.relu(layer(y))
        return {"loss": F.mse_loss(y, x), "y": y}


BATCH = {name: torch.zeros(4, 8) for name in ("x", "noise", "mask")}


@pytest.fixture(scope="module")
def denoiser() -> Theory:
    return derive(trace(Denoiser(40), (), BATCH))


MEET = (
    "add.Tensor in the model reads (x, noise) as (replicated, replicated) or (shard(0), shard(0)) or "
    "(shard(1), shard(1))"
)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"layers.*.weight": "shard(0)", "[xn]*": "shard(0)", "mask": "shard(0)", "output[1]": "shard(1)"},
            None,
        ),
        (
            {"layers.*": "shard(0)", "mask": "replicated", "?": "shard(0)", "noise": "shard(1)"},
            "no program satisfies these constraints together: x (by '?'): shard(0) [float32[4, 8], read by "
            "add.Tensor in the model]; noise: shard(1) [float32[4, 8], read by add.Tensor in the model]; "
            f"{MEET}; drop or change one (81 others are fine)",
        ),
        (
            {"x": "replicated", "noise": "shard(1)"},
            "no program satisfies these constraints together: x: replicated [float32[4, 8], read by "
            "add.Tensor in the model]; noise: shard(1) [float32[4, 8], read by add.Tensor in the model]; "
            f"{MEET}; drop or change one",
        ),
    ],
)
def test_messages(denoiser: Theory, spec: dict[str, str], message: str | None) -> None:
    constraints = resolve(denoiser, spec)
    assert conflict_message(denoiser, constraints) == message
    assert has_program(denoiser, constraints) == (message is None)


def test_an_input_that_no_reader_takes_so() -> None:
    """Dim 1 of x can be cut for one reader, but softmax needs its rows whole."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.layer(x) * x.softmax(-1)).sum()

    theory = derive(trace(Both(), (), {"x": torch.zeros(4, 8)}))
    constraints = resolve(theory, {"x": "shard(1)", "layer.*": "shard(0)"})
    assert conflict_message(theory, constraints) == (
        "no program satisfies this constraint: x: shard(1) [float32[4, 8], read by addmm in layer]; _softmax in "
        "the model reads x as replicated or shard(0); drop or change it (2 others are fine)"
    )
    assert not has_program(theory, constraints)


def test_other_conflicts_are_mentioned() -> None:
    def two(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        return ((a + b).sin().sum() + (c + d).sin().sum()) * 1.0

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(()))

        def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
            return two(**inputs) * self.w

    theory = derive(trace(Two(), (), {n: torch.zeros(4, 4) for n in "abcd"}))
    spec = {"a": "shard(0)", "b": "shard(1)", "c": "replicated", "d": "shard(0)"}
    message = conflict_message(theory, resolve(theory, spec))
    assert message is not None
    assert message.endswith("drop or change one (of the 2 others, some are in conflict too)")


def test_few_checks_are_needed(denoiser: Theory, monkeypatch: pytest.MonkeyPatch) -> None:
    spaces: list[Constraints] = []

    def counted(theory: Theory, constraints: Constraints) -> Space:
        spaces.append(constraints)
        return search_space(theory, constraints)

    monkeypatch.setattr(conflict, "search_space", counted)
    spec = {"layers.*": "shard(0)", "mask": "shard(0)", "x": "shard(0)", "noise": "shard(1)"}
    constraints = resolve(denoiser, spec)
    assert len(constraints.forms) == 83
    names = named_tensors(denoiser)
    assert smallest_conflict(denoiser, constraints.forms) == (names["x"], names["noise"])
    assert len(spaces) <= 20


def test_an_error_of_a_block_names_the_conflict(denoiser: Theory) -> None:
    wrong = resolve(denoiser, {"x": "replicated", "noise": "shard(1)", "layers.3.bias": "shard(0)"})
    with (
        pytest.raises(InfeasibleError, match=r"together: x: replicated .*; noise: shard\(1\)") as caught,
        naming_conflicts(denoiser, wrong),
    ):
        search_space(denoiser, wrong)
    assert isinstance(caught.value.__cause__, InfeasibleError)
    for blameless in (Constraints(), resolve(denoiser, {"x": "shard(0)"})):
        with pytest.raises(InfeasibleError, match="no memory"), naming_conflicts(denoiser, blameless):
            raise InfeasibleError("no memory")


def test_a_compilation_names_the_conflict() -> None:
    devices = {"devices": [{"flops": 1e9, "count": 2}], "network": {"bandwidth": 1e9, "latency": 1e-6}}
    with pytest.raises(InfeasibleError, match=r"together: x: replicated .*; noise: shard\(1\)"):
        hetspmd.compile(
            Denoiser(2),
            BATCH,
            devices,
            constraints={"x": "replicated", "noise": "shard(1)", "mask": "shard(0)"},
        )
