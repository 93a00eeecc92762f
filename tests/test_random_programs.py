"""Hundreds of random programs over small graphs: each is proven by the checker and equals the single device.

Half are written step by step with random triples and collectives, half come from the search: under random
costs, random stored forms and with random triples forbidden. Worlds of 1 to 5 devices; the lengths of every
axis are random and may be empty. What the programs exercise is counted and asserted.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hetspmd.cluster.collective_kinds import Kind
from hetspmd.cost.model import CostModel
from hetspmd.placement import PARTIAL, REPLICATE, Placement
from hetspmd.program.buckets import Bucket
from hetspmd.program.checker import check
from hetspmd.program.lengths import Lengths
from hetspmd.program.program import Communicate, Compute, Program, Result
from hetspmd.program.schedule import make_schedule
from hetspmd.program.schedule_check import check_schedule
from hetspmd.rules.rule import Triple
from hetspmd.rules.theory import Theory, derive
from hetspmd.search.constraints import Constraints
from hetspmd.search.search import Limits, search
from hetspmd.search.space import Move, search_space
from hetspmd.trace.graph import PARAMETER
from hetspmd.trace.trace import trace
from workbench import simulated_error, single_device

from program_builder import cheap_random_program, random_program, uneven  # isort: skip  # found by workbench
from small_models import case  # isort: skip

PROGRAMS = 400
BUCKETS = (0, 200, 10_000)
"""Sizes of buckets, in bytes."""
TOLERANCE = 1e-9


class Vocabulary(nn.Module):
    """An embedding and a cross entropy over more words than devices, with a label that is ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(13, 6, padding_idx=1)
        self.head = nn.Linear(6, 13)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.tokens(ids))).flatten(0, 1), labels.flatten())


class Experts(nn.Module):
    """Soft routing of tokens to experts by einsums, as in a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 5, bias=False)
        self.up = nn.Parameter(torch.randn(5, 6, 8) / 3)
        self.down = nn.Parameter(torch.randn(5, 8, 6) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = self.gate(x).softmax(-1)
        sent = torch.einsum("bte,btd->ebtd", gates, x)
        hidden = F.gelu(torch.einsum("ebtd,edh->ebth", sent, self.up))
        y = torch.einsum("ebth,ehd,bte->btd", hidden, self.down, gates)
        return F.mse_loss(y, x)


@dataclass(frozen=True)
class Subject:
    """A traced model with the single device's results."""

    model: nn.Module
    theory: Theory
    inputs: tuple[torch.Tensor, ...]
    want: Any


SUBJECTS = ("mlp", "conv", "attention", "vocabulary", "experts")


@cache
def subject(name: str) -> Subject:
    torch.manual_seed(0)
    batch: dict[str, torch.Tensor]
    if name in ("mlp", "conv", "attention", "residual"):
        made = case(name)
        model, batch, theory = made.model, made.batch, made.theory
    else:
        if name == "vocabulary":
            labels = torch.randint(0, 13, (4, 3))
            labels[1, 2] = -100
            model, batch = Vocabulary().double(), {"ids": torch.randint(0, 13, (4, 3)), "labels": labels}
        else:
            model, batch = Experts().double(), {"x": torch.randn(4, 3, 6, dtype=torch.float64)}
        theory = derive(trace(model, (), batch))
    inputs = tuple(batch[i.path] for i in theory.graph.inputs)
    return Subject(model, theory, inputs, single_device(theory, model, inputs))


class RandomCosts:
    """Costs that have nothing to do with any cluster; the search needs no more than these methods."""

    batches = None

    def __init__(self, theory: Theory, dice: random.Random) -> None:
        self.theory, self.dice = theory, dice
        self.move_price = dice.choice((0.01, 0.3, 3.0))

    def row_costs(self, lengths: Lengths) -> list[list[float]]:
        return [[self.dice.random() for _ in rows] for rows in self.theory.rows]

    def moves_costs(self, moves: tuple[tuple[int, Move], ...], lengths: Lengths) -> Any:
        return np.array([self.dice.random() * self.move_price for _ in moves])


def searched_program(theory: Theory, seed: int, lengths: Lengths) -> Program:
    """The best program under random costs, random stored forms and random forbidden triples."""
    dice = random.Random(seed)
    forms: dict[int, Placement] = {}
    for parameter in theory.graph.parameters:
        if dice.random() < 0.5:
            rows = theory.rows[theory.graph.producers[parameter.tensor]]
            forms[parameter.tensor] = dice.choice(rows).post[0]
    share = dice.choice((0.0, 0.3, 0.7))
    dropped = {
        (i, row.name)
        for i, rows in enumerate(theory.rows)
        if not theory.graph.instructions[i].is_source
        for row in rows[1:]
        if dice.random() < share
    }
    # Every instruction of a model may lose its first, replicated triple where another one is left.
    only_divided = {
        i for i, rows in enumerate(theory.rows)
        if theory.graph.instructions[i].op != PARAMETER and dice.random() < 0.2
        and any(r.factor is not None and (i, r.name) not in dropped for r in rows)
    }  # fmt: skip

    def allowed(instruction: int, row: Triple, axis: int | None) -> bool:
        if instruction in only_divided and row.name == "always":
            return False
        return (instruction, row.name) not in dropped

    costs = cast(CostModel, RandomCosts(theory, dice))
    return search(
        search_space(theory, Constraints(forms, allowed)), costs, lengths, Limits(expansions=3000)
    ).program


def with_final_outputs(program: Program) -> Program:
    """Outputs that a hand-made program leaves as summands are reduced at the end: a program must not return
    them so."""
    steps, outputs, done = list(program.steps), [], set()
    for output in program.outputs:
        if output.form == PARTIAL:
            have = {s.target for s in steps if isinstance(s, Communicate) and s.tensor == output.tensor}
            if output.tensor not in done and REPLICATE not in have:
                steps.append(Communicate(output.tensor, "all_reduce", PARTIAL, REPLICATE))
            done.add(output.tensor)
            output = Result(output.tensor, REPLICATE)
        outputs.append(output)
    return replace(program, steps=tuple(steps), outputs=tuple(outputs))


Make = Callable[[Theory, int, Lengths], Program]
MAKERS: dict[str, Make] = {
    "wild": lambda theory, seed, _: with_final_outputs(random_program(theory, seed)),
    "thrifty": lambda theory, seed, _: with_final_outputs(cheap_random_program(theory, seed)),
    "searched": searched_program,
    "searched-again": searched_program,
}


def triples_used(theory: Theory, programs: Sequence[Program]) -> set[tuple[str, Triple]]:
    return {
        (theory.graph.instructions[s.instruction].op, s.row)
        for p in programs for s in p.steps if isinstance(s, Compute)
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SUBJECTS)
def test_random_programs(name: str, record_property: Callable[[str, object], None]) -> None:
    found = subject(name)
    theory = found.theory
    programs: list[Program] = []
    worlds = set()
    shared: Counter[Kind] = Counter()
    for index in range(PROGRAMS // len(SUBJECTS)):
        seed = 10_000 * SUBJECTS.index(name) + index
        world = 1 + index % 5
        maker = list(MAKERS)[index // 5 % len(MAKERS)]
        lengths = uneven(theory, world, seed)
        program = MAKERS[maker](theory, seed, lengths)
        check(theory, program)
        size = BUCKETS[index // 3 % len(BUCKETS)]
        schedule = make_schedule(theory, program, size, prefetch_distance=1 + index // 7 % 4)
        check_schedule(theory.graph, program, schedule)
        error = simulated_error(
            theory, program, lengths, found.model, found.inputs, found.want, schedule=schedule
        )
        order = schedule.steps(program)
        shared.update(s.kind for s in (*order.forward, *order.backward) if isinstance(s, Bucket))
        assert error <= TOLERANCE, f"{maker} program {index} on {world} devices (seed {seed}): {error:.2e}"
        programs.append(program)
        worlds.add(world)
    used = triples_used(theory, programs)
    available = {
        (instruction.op, row)
        for instruction in theory.graph.instructions
        for row in theory.rows[instruction.id]
    }
    kinds: set[Kind] = {s.kind for p in programs for s in p.steps if isinstance(s, Communicate)}
    record_property("programs", len(programs))
    record_property("distinct", len(set(programs)))
    record_property("triples", f"{len(used)} of {len(available)}")
    record_property("ops", len({op for op, _ in used}))
    print(
        f"{name}: {len(programs)} programs ({len(set(programs))} distinct), {len(used)} of {len(available)} "
        f"triples, {len({op for op, _ in used})} ops, {len(kinds)} kinds of collectives, buckets {dict(shared)}"
    )
    assert len(set(programs)) >= 0.95 * len(programs)
    assert used == available, "triples that no program used"
    assert len(kinds) == 9
    assert worlds == {1, 2, 3, 4, 5}
    assert {"all_reduce", "all_gather"} <= set(shared), "no buckets"
