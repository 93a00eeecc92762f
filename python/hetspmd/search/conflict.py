"""Which of the user's constraints no program satisfies together: a smallest infeasible set of them.

Feasibility is monotone: dropping a constraint never makes a feasible set infeasible. So

1. QuickXplain (Junker, AAAI 2004) finds a *minimal* infeasible set, of which every proper subset is feasible, in
   about ``2 k log(n / k)`` checks for k of n constraints;
2. a *smallest* one is a smallest set that meets the complement of every maximal feasible set (Reiter 1987;
   Ignatiev et al., CP 2015): take a smallest set that meets the complements known so far; if it is infeasible,
   none is smaller; if not, extend it to a maximal feasible set, whose complement is one more to meet. It ends when
   such a set is as large as the one of step 1, mostly after k checks.

A check asks for any program, whatever it costs (:func:`feasible`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from hetspmd import _core
from hetspmd.errors import InfeasibleError
from hetspmd.placement import PARTIAL, REPLICATE, Placement
from hetspmd.rules.theory import Theory
from hetspmd.search.constraints import ConstraintOrigin, Constraints, RowFilter, named_tensors, spelling
from hetspmd.search.space import Space, search_space
from hetspmd.trace.graph import Instruction

CHECKS = 200
"""Checks after which the best set so far is taken."""

_SECONDS, _EXPANSIONS, _MEMORY = 60.0, 100_000, 2**30
_SHOWN = 4

T = TypeVar("T")


def feasible(space: Space) -> bool:
    """Whether the space holds a program; also True where the core's limits leave that open.

    Mostly no search is needed: a tensor that is whole somewhere is available in every form, so the space holds a
    program if every instruction has a row whose outputs are whole or can be communicated to be. Otherwise the
    core, with all costs zero, decides by arc consistency and, where that does not, by search.
    """
    return _all_whole(space) or _searched(space)


def smallest_conflict(
    theory: Theory, forms: Mapping[int, Placement], *, row_filter: RowFilter | None = None
) -> tuple[int, ...]:
    """Tensor ids of a smallest part of ``forms`` that no program satisfies, in the order of ``forms``.

    Empty if a program satisfies all of them, or if there is none even without them. After :data:`CHECKS` checks
    the set is infeasible still, but another might be smaller.
    """

    def holds(tensors: Sequence[int]) -> bool:
        try:
            return feasible(search_space(theory, Constraints({t: forms[t] for t in tensors}, row_filter)))
        except InfeasibleError:
            return False

    return smallest_infeasible(tuple(forms), holds, CHECKS)


def conflict_message(theory: Theory, constraints: Constraints) -> str | None:
    """``no program satisfies these constraints together: x: shard(1) [...]; y: replicated [...]; ...``

    The entries are those of :func:`smallest_conflict`, with what each tensor is in the model, an instruction at
    which they meet, and what to do. None if the constraints are not to blame.
    """
    forms = constraints.forms
    conflict = smallest_conflict(theory, forms, row_filter=constraints.row_filter)
    if not conflict:
        return None
    names = _names(theory, constraints)
    entries = "; ".join(f"{names[t]}: {spelling(forms[t])} [{_place(theory, t)}]" for t in conflict)
    together = "these constraints together" if len(conflict) > 1 else "this constraint"
    parts = [f"no program satisfies {together}: {entries}"]
    if where := _meeting(theory, {t: forms[t] for t in conflict}, constraints):
        parts.append(where)
    others = {t: form for t, form in forms.items() if t not in conflict}
    fine = "drop or change one" if len(conflict) > 1 else "drop or change it"
    if others:
        other_conflict = smallest_conflict(theory, others, row_filter=constraints.row_filter)
        fine += (
            f" (of the {len(others)} others, some are in conflict too)"
            if other_conflict
            else f" ({len(others)} {'others are' if len(others) > 1 else 'other is'} fine)"
        )
    return "; ".join([*parts, fine])


@contextmanager
def naming_conflicts(theory: Theory, constraints: Constraints) -> Iterator[None]:
    """Has an InfeasibleError of the block that is due to ``constraints`` name the smallest conflict."""
    try:
        yield
    except InfeasibleError as error:
        message = conflict_message(theory, constraints) if constraints.forms else None
        if message is None:
            raise
        raise InfeasibleError(message) from error


def smallest_infeasible(
    items: Sequence[T], holds: Callable[[Sequence[T]], bool], checks: int
) -> tuple[T, ...]:
    """A smallest subset of ``items``, in their order, for which ``holds`` is False, if ``holds`` is monotone.

    Empty if ``holds`` is True of all items, or False of none of them. Beyond ``checks`` calls the set is
    infeasible still, but maybe not smallest, and beyond twice as many maybe not minimal.
    """
    verdicts: dict[frozenset[int], bool] = {}

    def check(indices: Sequence[int]) -> bool:
        key = frozenset(indices)
        if key not in verdicts:
            verdicts[key] = holds([items[i] for i in sorted(key)])
        return verdicts[key]

    everything = range(len(items))
    if check(everything) or not check(()):
        return ()
    minimal = _minimal(everything, check, lambda: len(verdicts) < 2 * checks)
    smallest = _smallest(everything, minimal, check, lambda: len(verdicts) < checks)
    return tuple(items[i] for i in smallest)


Check = Callable[[Sequence[int]], bool]


def _minimal(items: Sequence[int], check: Check, go_on: Callable[[], bool]) -> tuple[int, ...]:
    """QuickXplain: a minimal infeasible subset of ``items``, which are infeasible."""

    def part(base: tuple[int, ...], added: bool, rest: Sequence[int]) -> tuple[int, ...]:
        if added and not check(base):
            return ()
        if len(rest) == 1 or not go_on():
            return tuple(rest)
        half = len(rest) // 2
        second = part((*base, *rest[:half]), True, rest[half:])
        first = part((*base, *second), bool(second), rest[:half])
        return (*first, *second)

    return tuple(sorted(part((), False, items)))


def _smallest(
    items: Sequence[int], minimal: tuple[int, ...], check: Check, go_on: Callable[[], bool]
) -> tuple[int, ...]:
    """A smallest infeasible subset of ``items``, of which ``minimal`` is a minimal one."""

    def grow(base: tuple[int, ...], rest: Sequence[int]) -> tuple[int, ...]:
        """``base``, which is feasible, with as many of ``rest`` as it can take."""
        if not rest or not go_on():
            return base
        if check((*base, *rest)):
            return (*base, *rest)
        if len(rest) == 1:
            return base
        half = len(rest) // 2
        return grow(grow(base, rest[:half]), rest[half:])

    complements: list[frozenset[int]] = []
    for i in minimal:  # a constraint without which all others are feasible belongs to every conflict
        if check([j for j in items if j != i]):
            complements.append(frozenset((i,)))
    while go_on():
        candidate = _hitting(complements, len(minimal))
        if candidate is None:
            return minimal
        if not check(candidate):
            return candidate
        whole = grow(candidate, [i for i in items if i not in candidate])
        complements.append(frozenset(items) - frozenset(whole))
    return minimal


def _hitting(sets: Sequence[frozenset[int]], below: int) -> tuple[int, ...] | None:
    """A smallest set of fewer than ``below`` indices that meets all ``sets``; None if there is none."""

    def extend(chosen: tuple[int, ...], room: int) -> tuple[int, ...] | None:
        missed = next((s for s in sets if s.isdisjoint(chosen)), None)
        if missed is None:
            return chosen
        if room == 0:
            return None
        return next((h for i in sorted(missed) if (h := extend((*chosen, i), room - 1)) is not None), None)

    return next((h for size in range(below) if (h := extend((), size)) is not None), None)


def _all_whole(space: Space) -> bool:
    graph = space.theory.graph
    needed = {r.tensor for r in space.requirements} | {g for _, g in space.ties} | set(graph.consumers)
    whole = [{REPLICATE} | {s for s, target, _ in moves if target == REPLICATE} for moves in space.moves]
    return all(
        any(
            all(t not in needed or form in whole[t] for t, form in zip(outputs, post, strict=True))
            for post in (space.theory.rows[i][k].post for k in space.rows[i])
        )
        for i, outputs in enumerate(instruction.outputs for instruction in graph.instructions)
    )


def _searched(space: Space) -> bool:
    solution = json.loads(
        _core.solve(space.structure(), time_limit=_SECONDS, max_expansions=_EXPANSIONS, memory_limit=_MEMORY)
    )
    return bool(solution["stop_reason"] != "infeasible")


def _names(theory: Theory, constraints: Constraints) -> dict[int, ConstraintOrigin]:
    """What to call each tensor: as the user did, else by its first name."""
    names: dict[int, ConstraintOrigin] = {}
    for name, tensor in named_tensors(theory).items():
        names.setdefault(tensor, ConstraintOrigin(name, name))
    for tensor in constraints.forms:
        name = theory.graph.tensors[tensor].name
        names.setdefault(tensor, ConstraintOrigin(name, name))
    return {**names, **constraints.origins}


def _place(theory: Theory, tensor: int) -> str:
    """What made a tensor, or, for a source, what reads it first."""
    graph = theory.graph
    producer = graph.producer(tensor)
    shape = f"{graph.tensors[tensor].dtype}{list(graph.tensors[tensor].shape)}"
    if not producer.is_source:
        return f"{shape}, made by {_call(producer)}"
    readers = graph.consumers.get(tensor, ())
    return f"{shape}, read by {_call(graph.instructions[readers[0]])}" if readers else f"{shape}, never read"


def _call(instruction: Instruction) -> str:
    op = instruction.op.removeprefix("aten.").removesuffix(".default")
    return f"{op} in {instruction.source or 'the model'}"


def _meeting(theory: Theory, forms: Mapping[int, Placement], constraints: Constraints) -> str:
    """The first instruction that can read its inputs in some forms, but not in those asked for."""
    graph = theory.graph
    inputs = {i.tensor for i in graph.inputs}
    names = _names(theory, constraints)
    for i, instruction in enumerate(graph.instructions):
        asked = [(n, t) for n, t in enumerate(instruction.inputs) if t in forms and t in inputs]
        rows = theory.rows[i]
        if not asked or any(all(row.pre[n] == forms[t] for n, t in asked) for row in rows):
            continue
        forms_of = dict.fromkeys(tuple(row.pre[n] for n, _ in asked) for row in rows)
        takes = [_together(map(spelling, pre)) for pre in forms_of if PARTIAL not in pre]
        shown = " or ".join(takes[:_SHOWN]) + (" or ..." if len(takes) > _SHOWN else "")
        return f"{_call(instruction)} reads {_together(names[t].name for _, t in asked)} as {shown}"
    return ""


def _together(texts: Iterable[str]) -> str:
    """``x``, or ``(x, y)`` of several."""
    several = tuple(texts)
    return several[0] if len(several) == 1 else f"({', '.join(several)})"
