"""Constraints on a search: which forms parameters, inputs and outputs may have, and which rows may be used.

``{"encoder.*.weight": "shard(0)", "lm_head.weight": "replicated"}``: names or globs over parameter names, input
paths and ``output[i]``. A parameter is stored in its form, an input is read in it, an output is left in it.
Constraints that are impossible together are the business of :mod:`hetspmd.search.conflict`.

:func:`data_parallel` and its neighbours are constraints that reproduce known programs in the same cost model;
they are the baselines of a plan and the forced programs of the tests.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from hetspmd.errors import ConstraintError, InfeasibleError
from hetspmd.placement import PARTIAL, REPLICATE, Placement, is_sharded, parse_placement, shard, sharded_dim
from hetspmd.rules.rule import Triple
from hetspmd.rules.theory import Theory

RowFilter = Callable[[int, Triple, int | None], bool]
"""``(instruction id, row, logical axis of the row) -> whether the search may use it``."""

FORMS = "write replicated or shard(d), such as shard(0)"


@dataclass(frozen=True)
class ConstraintOrigin:
    """Where the form of a tensor was asked for: the glob, and the name that it matched."""

    glob: str
    name: str

    def __str__(self) -> str:
        return self.name if self.glob == self.name else f"{self.name} (by {self.glob!r})"


@dataclass(frozen=True)
class Constraints:
    """``forms``: tensor id to the only form allowed for it. ``row_filter`` drops triples of computations.
    ``origins``: tensor id to what a user wrote, for messages."""

    forms: Mapping[int, Placement] = field(default_factory=dict)
    row_filter: RowFilter | None = None
    origins: Mapping[int, ConstraintOrigin] = field(default_factory=dict)


def resolve(theory: Theory, spec: Mapping[str, str | Placement] | None) -> Constraints:
    """The constraints that names and globs spell. Brackets in them may stand for themselves (``output[0]``,
    ``args[*]``), or for a set of characters (``h.[0-5].*``).

    Raises InfeasibleError for a glob that matches nothing, a form that a tensor cannot have, or two globs
    that ask for different forms; ConstraintError for what is no mapping of names to forms.
    """
    forms: dict[int, Placement] = {}
    origins: dict[int, ConstraintOrigin] = {}
    names = named_tensors(theory)
    if spec is not None and not isinstance(spec, Mapping):
        raise ConstraintError(f"constraints are a {type(spec).__name__}; give a dict of names to forms")
    for pattern, wanted in (spec or {}).items():
        if not isinstance(pattern, str):
            raise ConstraintError(f"the constraint {pattern!r} is no name or glob; write a string")
        form = _form_of(pattern, wanted)
        matched = [name for name in names if _matches(name, pattern)]
        if not matched:
            raise InfeasibleError(
                f"constraint {pattern!r} matches no parameter, input or output{_hint(pattern, names)}"
            )
        _check(theory, names, pattern, matched, form)
        for name in matched:
            tensor = names[name]
            if forms.setdefault(tensor, form) != form:
                first = origins[tensor]
                same = f"{first.name} and {name}, which are one tensor" if first.name != name else name
                raise InfeasibleError(
                    f"constraints {first.glob!r} ({spelling(forms[tensor])}) and {pattern!r} "
                    f"({spelling(form)}) both match {same}; keep one"
                )
            origins.setdefault(tensor, ConstraintOrigin(pattern, name))
    return Constraints(forms, origins=origins)


def parse_wanted(text: str) -> Placement:
    """The form that a user spells. Raises ValueError, saying what to write."""
    try:
        return parse_placement(text)
    except ValueError:
        negative = re.fullmatch(r"\s*shard\(\s*-\d+\s*\)\s*", text, re.IGNORECASE)
        hint = "; dims count from 0" if negative else ""
        raise ValueError(f"{text!r} is no placement; {FORMS}{hint}") from None


def spelling(form: Placement) -> str:
    """A form as users write it: ``replicated``, ``partial`` or ``shard(d)``."""
    if is_sharded(form):
        return f"shard({sharded_dim(form)})"
    return "replicated" if form == REPLICATE else "partial"


def named_tensors(theory: Theory) -> dict[str, int]:
    """Names that a constraint may match: parameters (all tied names), inputs, ``output[i]``."""
    graph = theory.graph
    names = {name: p.tensor for p in graph.parameters for name in p.names}
    names.update((i.path, i.tensor) for i in graph.inputs)
    for i, output in enumerate(graph.outputs):
        if output.tensor is not None:
            names[f"output[{i}]"] = output.tensor
    return names


def nearest(name: str, names: Iterable[str]) -> str:
    """``; did you mean 'fc.weight'?``, or nothing where no name is near."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _form_of(pattern: str, wanted: object) -> Placement:
    if isinstance(wanted, str):
        try:
            return parse_wanted(wanted)
        except ValueError as error:
            raise InfeasibleError(f"constraint {pattern!r}: {error}") from error
    if isinstance(wanted, int) and not isinstance(wanted, bool) and wanted >= 0:
        return wanted
    raise ConstraintError(f"constraint {pattern!r}: {wanted!r} is no placement; {FORMS}")


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, pattern.replace("[", "[[]"))


def _hint(pattern: str, names: Mapping[str, int]) -> str:
    if any(_matches(name, f"*.{pattern}") for name in names):
        return f"; did you mean {f'*.{pattern}'!r}?"
    general = [re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names] if "*" in pattern else []
    if near := nearest(pattern, dict.fromkeys([*general, *names])):
        return near
    return "; there are " + ", ".join(list(names)[:3]) + (", ..." if len(names) > 3 else "")


def _check(
    theory: Theory, names: Mapping[str, int], pattern: str, matched: list[str], form: Placement
) -> None:
    """Raise InfeasibleError if a tensor that ``pattern`` matches cannot have the form by itself."""
    wrong = [(name, why) for name in matched if (why := _obstacle(theory, names[name], form))]
    if not wrong:
        return
    name, why = wrong[0]
    prefix = "" if pattern == name else f"constraint {pattern!r}: "
    more = (
        f"; it fits {len(matched) - len(wrong)} of the {len(matched)} that match" if len(matched) > 1 else ""
    )
    raise InfeasibleError(f"{prefix}{name} {why}{more}")


def _obstacle(theory: Theory, tensor: int, form: Placement) -> str:
    """Why the tensor cannot have the form in any program; empty if it can."""
    e = theory.graph.tensors[tensor]
    if form == PARTIAL:
        return "cannot be kept as summands; use replicated or shard(d)"
    if form == REPLICATE:
        return ""
    dim = sharded_dim(form)
    if dim >= len(e.shape):
        return f"has shape {list(e.shape)}: there is no dim {dim} to shard"
    axis = theory.axes.axis(tensor, dim)
    if axis is None or axis.units < 2:
        return f"cannot be sharded along dim {dim} (shape {list(e.shape)}): " + (
            "no rule of an op that reads it cuts that dim" if axis is None else "it is one indivisible unit"
        )
    return ""


def _batch_rows(theory: Theory) -> RowFilter:
    """Every instruction that can work on its share of the batch does; nothing is sharded otherwise."""
    batch = theory.batch_axes
    again = theory.graph.second_reads
    divisible = {
        i
        for i, axes in enumerate(theory.row_axes)
        if any(axis in batch for axis in axes) and not theory.graph.instructions[i].is_source
    }

    def allowed(instruction: int, row: Triple, axis: int | None) -> bool:
        if theory.graph.instructions[instruction].is_source or instruction in again:
            return True
        if axis is not None:
            return axis in batch
        return instruction not in divisible or PARTIAL in row.pre

    return allowed


def data_parallel(theory: Theory) -> Constraints:
    """Whole parameters on every device, the batch divided: what DDP computes."""
    return Constraints({p.tensor: REPLICATE for p in theory.graph.parameters}, _batch_rows(theory))


def single_device(theory: Theory, forms: Mapping[int, Placement]) -> Constraints:
    """Every instruction runs whole, as on one device; ``forms`` are kept where parameters must be stored or inputs
    read so."""
    graph = theory.graph
    asked = {i.tensor for i in graph.inputs if forms.get(i.tensor, REPLICATE) != REPLICATE}

    def allowed(instruction: int, _row: Triple, axis: int | None) -> bool:
        node = graph.instructions[instruction]
        if node.is_source:
            return axis is None or node.outputs[0] in forms
        return axis is None or not asked.isdisjoint(node.inputs)

    return Constraints(dict(forms), allowed)


def zero_like(theory: Theory) -> Constraints:
    """The batch divided, each parameter stored sharded along its first divisible dim: ZeRO-3."""
    forms: dict[int, Placement] = {}
    for p in theory.graph.parameters:
        shape = theory.graph.tensors[p.tensor].shape
        dims = [
            d for d in range(len(shape)) if (a := theory.axes.axis(p.tensor, d)) is not None and a.units >= 2
        ]
        forms[p.tensor] = shard(dims[0]) if dims else REPLICATE
    return Constraints(forms, _batch_rows(theory))


def zero(theory: Theory, level: int) -> Constraints:
    """Data parallelism at a level of ZeRO (Rajbhandari et al. 2020), as far as storage and readings tell it: with
    parameters whole at level 0, else in shards; at level 3 the backward gathers again what the forward has
    gathered."""
    if level == 0:
        return data_parallel(theory)
    sharded = zero_like(theory)
    forms, again, rows = sharded.forms, theory.graph.second_reads, sharded.row_filter

    def allowed(instruction: int, row: Triple, axis: int | None) -> bool:
        if instruction in again:
            return row.pre[0] == (forms[again[instruction]] if level == 3 else REPLICATE)
        return rows is None or rows(instruction, row, axis)

    return Constraints(forms, allowed)


def tensor_parallel(theory: Theory) -> Constraints:
    """Nothing is sharded along the batch: Megatron-like where the rules allow it."""
    batch = theory.batch_axes

    def allowed(_instruction: int, _row: Triple, axis: int | None) -> bool:
        return axis not in batch

    return Constraints({}, allowed)
