"""Constraints on a search: which forms parameters, inputs and outputs may have, and which rows may be used.

``{"encoder.*.weight": "shard(0)", "lm_head.weight": "replicated"}``: globs over parameter names, input
paths and ``output[i]``. :func:`data_parallel` and its neighbours are constraints that reproduce known
programs in the same cost model; they are the baselines of a plan and the forced programs of the tests.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from hetspmd.errors import InfeasibleError
from hetspmd.forms import ALL_REDUCE, IDENTITY, Form, all_gather, form_text, parse_form
from hetspmd.rules.rule import Row
from hetspmd.rules.theory import Theory

RowFilter = Callable[[int, Row, int | None], bool]
"""``(instruction id, row, logical axis of the row) -> whether the search may use it``."""


@dataclass(frozen=True)
class Constraints:
    """``forms``: tensor id to the only form allowed for it. ``row_filter`` drops triples of computations."""

    forms: Mapping[int, Form] = field(default_factory=dict)
    row_filter: RowFilter | None = None


def resolve(theory: Theory, spec: Mapping[str, str | Form] | None) -> Constraints:
    """The constraints that globs spell.

    Raises InfeasibleError for a glob that matches nothing, a form that the tensor cannot have, or two globs
    that ask for different forms.
    """
    forms: dict[int, Form] = {}
    origin: dict[int, str] = {}
    names = named_tensors(theory)
    for pattern, wanted in (spec or {}).items():
        try:
            form = parse_form(wanted) if isinstance(wanted, str) else wanted
        except ValueError as error:
            raise InfeasibleError(f"constraint {pattern!r}: {error}") from error
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            close = difflib.get_close_matches(pattern, list(names), n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise InfeasibleError(f"constraint {pattern!r} matches no parameter, input or output{hint}")
        for name in matched:
            tensor = names[name]
            _check(theory, name, tensor, form)
            if forms.setdefault(tensor, form) != form:
                raise InfeasibleError(
                    f"constraints {origin[tensor]!r} ({form_text(forms[tensor])}) and {pattern!r} "
                    f"({form_text(form)}) both match {name}; keep one"
                )
            origin.setdefault(tensor, pattern)
    return Constraints(forms)


def named_tensors(theory: Theory) -> dict[str, int]:
    """Names that a constraint may match: parameters (all tied names), inputs, ``output[i]``."""
    graph = theory.graph
    names = {name: p.tensor for p in graph.parameters for name in p.names}
    names.update((i.path, i.tensor) for i in graph.inputs)
    for i, output in enumerate(graph.outputs):
        if output.tensor is not None:
            names[f"output[{i}]"] = output.tensor
    return names


def _check(theory: Theory, name: str, tensor: int, form: Form) -> None:
    e = theory.graph.tensors[tensor]
    if form == ALL_REDUCE:
        raise InfeasibleError(f"{name} cannot be kept as summands; use replicated or shard(d)")
    if form == IDENTITY:
        return
    dim = form - 2
    if dim >= len(e.shape):
        raise InfeasibleError(f"{name} has shape {list(e.shape)}: there is no dim {dim} to shard")
    axis = theory.axes.axis(tensor, dim)
    if axis is None or axis.units < 2:
        raise InfeasibleError(
            f"{name} cannot be sharded along dim {dim} (shape {list(e.shape)}): "
            + (
                "no rule of an op that reads it cuts that dim"
                if axis is None
                else "it is one indivisible unit"
            )
        )


def batch_axes(theory: Theory) -> frozenset[int]:
    """Logical axes of dim 0 of the inputs: the samples."""
    found = (
        theory.axes.axis(i.tensor, 0) for i in theory.graph.inputs if theory.graph.tensors[i.tensor].shape
    )
    return frozenset(axis.id for axis in found if axis is not None)


def _batch_rows(theory: Theory) -> RowFilter:
    """Every instruction that can work on its share of the batch does; nothing is sharded otherwise."""
    batch = batch_axes(theory)
    again = theory.graph.second_reads
    divisible = {
        i
        for i, axes in enumerate(theory.row_axes)
        if any(axis in batch for axis in axes) and not theory.graph.instructions[i].is_source
    }

    def allowed(instruction: int, row: Row, axis: int | None) -> bool:
        if theory.graph.instructions[instruction].is_source or instruction in again:
            return True
        if axis is not None:
            return axis in batch
        return instruction not in divisible or ALL_REDUCE in row.pre

    return allowed


def data_parallel(theory: Theory) -> Constraints:
    """Whole parameters on every device, the batch divided: what DDP computes."""
    return Constraints({p.tensor: IDENTITY for p in theory.graph.parameters}, _batch_rows(theory))


def single_device(theory: Theory, forms: Mapping[int, Form]) -> Constraints:
    """Every instruction runs whole, as on one device; ``forms`` are kept where parameters must be stored so."""
    graph = theory.graph

    def allowed(instruction: int, _row: Row, axis: int | None) -> bool:
        found = graph.instructions[instruction]
        return axis is None or (found.is_source and found.outputs[0] in forms)

    return Constraints(dict(forms), allowed)


def zero_like(theory: Theory) -> Constraints:
    """The batch divided, each parameter stored sharded along its first divisible dim: ZeRO-3."""
    forms: dict[int, Form] = {}
    for p in theory.graph.parameters:
        shape = theory.graph.tensors[p.tensor].shape
        dims = [
            d for d in range(len(shape)) if (a := theory.axes.axis(p.tensor, d)) is not None and a.units >= 2
        ]
        forms[p.tensor] = all_gather(dims[0]) if dims else IDENTITY
    return Constraints(forms, _batch_rows(theory))


def tensor_parallel(theory: Theory) -> Constraints:
    """Nothing is sharded along the batch: Megatron-like where the rules allow it."""
    batch = batch_axes(theory)

    def allowed(_instruction: int, _row: Row, axis: int | None) -> bool:
        return axis not in batch

    return Constraints({}, allowed)
