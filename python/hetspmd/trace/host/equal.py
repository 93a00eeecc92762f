"""Whether two graphs compute the same: names aside, and constants by value.

:func:`digest` is equal for such graphs. :func:`differ_in_numbers` says that one graph is the other with
numbers as inputs, so that it computes the same at these numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

import torch

from hetspmd.trace.graph import (
    BUFFER,
    INPUT,
    PARAMETER,
    SOURCES,
    TANGENT,
    Argument,
    Graph,
    Instruction,
    Ref,
    map_refs,
)
from hetspmd.trace.host.constants import evaluate, instruction_value
from hetspmd.trace.host.plain import fingerprint
from hetspmd.trace.values import is_random

_OVERLOADS: Final = {
    "aten.mul.Scalar": "aten.mul.Tensor",
    "aten.add.Scalar": "aten.add.Tensor",
    "aten.sub.Scalar": "aten.sub.Tensor",
    "aten.div.Scalar": "aten.div.Tensor",
    "aten.masked_fill.Scalar": "aten.masked_fill.Tensor",
    "aten.eq.Scalar": "aten.eq.Tensor",
    "aten.ne.Scalar": "aten.ne.Tensor",
    "aten.lt.Scalar": "aten.lt.Tensor",
    "aten.le.Scalar": "aten.le.Tensor",
    "aten.gt.Scalar": "aten.gt.Tensor",
    "aten.ge.Scalar": "aten.ge.Tensor",
}
"""Ops of a tensor and a number, as they are of two tensors."""


def varying(graph: Graph) -> set[int]:
    """Tensors that depend on a parameter, buffer, input, tangent or randomness."""
    tensors: set[int] = set()
    for instruction in graph.instructions:
        source = instruction.op in (PARAMETER, BUFFER, INPUT, TANGENT)
        if source or is_random(instruction) or any(t in tensors for t in instruction.inputs):
            tensors.update(t for t in instruction.outputs if t >= 0)
    return tensors


def digest(graph: Graph) -> str:
    """Equal for graphs that compute the same in the same order."""
    hasher = hashlib.sha256()
    for line in _lines(graph):
        hasher.update(repr(line).encode())
    return hasher.hexdigest()


def _lines(graph: Graph) -> Iterator[object]:
    changing, values = varying(graph), evaluate(graph)
    number: dict[int, object] = {}
    for kind, sources in (
        ("parameter", [(p.names, p.tensor, p.requires_grad) for p in graph.parameters]),
        ("buffer", [(b.names, b.tensor, False) for b in graph.buffers]),
        ("input", [((i.path,), i.tensor, False) for i in graph.inputs]),
    ):
        for names, tensor, gradient in sources:
            number[tensor] = (kind, names)
            yield kind, names, gradient, _meta(graph, tensor)
    if graph.tangent is not None:
        number[graph.tangent] = "tangent"

    def identity(tensor: int | None) -> object:
        if tensor is None or tensor < 0:
            return None
        if tensor not in number:
            value = values(tensor)
            number[tensor] = fingerprint(value) if value is not None else ("unread", _meta(graph, tensor))
        return number[tensor]

    for index, instruction in enumerate(graph.instructions):
        if instruction.op in SOURCES or not any(t in changing for t in instruction.outputs):
            continue
        for tensor in instruction.outputs:
            if tensor >= 0:
                number[tensor] = len(number)
        yield (
            instruction.op,
            instruction.phase,
            [map_refs(a, lambda r: ("ref", identity(r.id))) for a in instruction.args],
            [(k, map_refs(v, lambda r: ("ref", identity(r.id)))) for k, v in instruction.kwargs],
            [_meta(graph, t) for t in instruction.outputs if t >= 0],
            graph.segments[index] if graph.segments else 0,
        )
    yield [identity(h.updated) for h in graph.holders], [identity(p.gradient) for p in graph.parameters]
    yield [(identity(o.tensor), type(o.value).__name__, o.value) for o in graph.outputs]
    yield (
        identity(graph.loss),
        graph.input_spec,
        graph.output_spec,
        graph.training,
        graph.autocast,
        graph.statics,
    )
    yield graph.host.kept, graph.host.numbers


def _meta(graph: Graph, tensor: int) -> object:
    return graph.tensors[tensor].shape, graph.tensors[tensor].dtype


def differ_in_numbers(plain: Graph, other: Graph, numbers: Mapping[int, int | float]) -> bool:
    """Whether ``other`` is ``plain`` with ``numbers``, values by tensor id, in place of literals. It may
    have more outputs: numbers that forward leaves behind."""
    values = _numeric(other, numbers)
    own = [i for i in plain.instructions if i.op not in SOURCES]
    others = [i for i in other.instructions if i.op not in SOURCES and i.outputs[0] not in values]
    same = _sources(plain, other)
    if same is None or len(own) != len(others):
        return False
    for a, b in zip(own, others, strict=True):
        if not _matches(plain, other, a, b, same, values):
            return False
        same.update(zip(b.outputs, a.outputs, strict=True))
    own_ends, other_ends = (
        [
            g.loss,
            *(p.gradient for p in g.parameters),
            *(h.updated for h in g.holders),
            *(o.tensor for o in g.outputs[:count]),
        ]
        for g, count in ((plain, len(plain.outputs)), (other, len(plain.outputs)))
    )
    literal = all(p.value == q.value for p, q in zip(plain.outputs, other.outputs, strict=False))
    return literal and own_ends == [None if t is None else same.get(t) for t in other_ends]


def _close(a: float, b: float) -> bool:
    """Whether two numbers are equal up to a rounding to float32."""
    return a == b or abs(a - b) <= 2e-7 * abs(b)


def number_values(graph: Graph, numbers: Mapping[int, int | float]) -> dict[int, float]:
    """The values of tensors without dims that depend on ``numbers``, by tensor id, and nothing else."""
    return {t: float(v) for t, v in _numeric(graph, numbers).items()}


def _numeric(graph: Graph, numbers: Mapping[int, int | float]) -> dict[int, torch.Tensor]:
    """The values of tensors without dims that depend on numbers and nothing else."""
    widths = {t: torch.int64 if isinstance(v, int) else torch.float64 for t, v in numbers.items()}
    values = {t: torch.tensor(v, dtype=widths[t]) for t, v in numbers.items()}
    for instruction in graph.instructions:
        one = len(instruction.outputs) == 1 and graph.tensors[instruction.outputs[0]].shape == ()
        if instruction.is_source or not one or not instruction.inputs:
            continue
        if all(t in values for t in instruction.inputs) and not is_random(instruction):
            values[instruction.outputs[0]] = instruction_value(instruction, values)
    return values


def _sources(plain: Graph, other: Graph) -> dict[int, int] | None:
    """The other graph's sources as the plain one's; None if they are not the same."""
    sources: dict[int, int] = {}
    pairs = [
        (
            [(p.names, p.tensor) for p in graph.parameters],
            [(b.names, b.tensor) for b in graph.buffers],
            [((i.path,), i.tensor) for i in graph.inputs if i.leaf >= 0],
        )
        for graph in (plain, other)
    ]
    for own, others in zip(*pairs, strict=True):
        if [names for names, _ in own] != [names for names, _ in others]:
            return None
        sources.update((b, a) for (_, a), (_, b) in zip(own, others, strict=True))
    if plain.tangent is not None and other.tangent is not None:
        sources[other.tangent] = plain.tangent
    own_values, other_values = evaluate(plain), evaluate(other)
    constants = [[c.tensor for c in graph.constants] for graph in (plain, other)]
    by_text = {fingerprint(own_values(t)): t for t in constants[0]}
    for tensor in constants[1]:
        text = fingerprint(other_values(tensor))
        if text in by_text:
            sources[tensor] = by_text[text]
    return sources


def _ordered(
    a: Instruction, b: Instruction, values: Mapping[int, torch.Tensor]
) -> tuple[Instruction, Instruction]:
    """The two calls with a number last: Python gives ``2 * x`` and ``2 - x`` to x, a tensor takes x as its
    argument."""
    first = b.args[0] if b.args else None
    if not (isinstance(first, Ref) and first.id in values and len(b.args) == 2):
        return a, b
    if b.op in ("aten.mul.Tensor", "aten.add.Tensor"):
        return a, replace(b, args=(b.args[1], first))
    if b.op == "aten.sub.Tensor" and a.op in ("aten.rsub.Scalar", "aten.rsub.Tensor"):
        return replace(a, op=b.op), replace(b, args=(b.args[1], first))
    return a, b


def _matches(
    plain: Graph,
    other: Graph,
    a: Instruction,
    b: Instruction,
    same: Mapping[int, int],
    values: Mapping[int, torch.Tensor],
) -> bool:
    a, b = _ordered(a, b, values)
    metas = [[_meta(g, t) if t >= 0 else None for t in i.outputs] for g, i in ((plain, a), (other, b))]
    ops = [_OVERLOADS.get(i.op, i.op) for i in (a, b)]
    if metas[0] != metas[1] or ops[0] != ops[1] or a.phase != b.phase or len(a.args) != len(b.args):
        return False

    def alike(x: Argument, y: Argument) -> bool:
        if isinstance(y, Ref):
            if y.id in values:
                literal = isinstance(x, (int, float)) and not isinstance(x, bool)
                return literal and _close(float(values[y.id]), float(x))
            return isinstance(x, Ref) and same.get(y.id) == x.id
        if isinstance(x, tuple) and isinstance(y, tuple):
            return len(x) == len(y) and all(map(alike, x, y))
        return type(x) is type(y) and bool(x == y)

    pairs = zip(a.kwargs, b.kwargs, strict=False)
    return (
        all(map(alike, a.args, b.args))
        and len(a.kwargs) == len(b.kwargs)
        and all(k == m and alike(v, w) for (k, v), (m, w) in pairs)
    )
