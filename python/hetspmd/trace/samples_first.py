"""Flattened dims with the samples first, so that slices of them are slices of the samples.

A model that puts tokens before samples, as :class:`torch.nn.MultiheadAttention` does inside, flattens [tokens,
samples, features] to [tokens * samples, features] for its matrix products. A sample's rows are then no slice of the
flattened dim, and neither devices nor micro-batches could divide the samples there. But matrix products, sums and
pointwise ops do not ask in which order rows come. :func:`with_samples_first` therefore flattens [samples, tokens,
features]: where dims are flattened, a permutation puts the samples first, and where the flattened dim is split
again, one puts them back. What lies between computes the same on the rows in another order.

This is done for all tensors that share a flattened dim, or for none: each op that touches the dim must be one that
:mod:`hetspmd.trace.row_ops` knows not to mind, and no such tensor may be an input, a constant or a result of the
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Final

from hetspmd.trace.graph import Graph, Instruction, Ref, Tensor
from hetspmd.trace.recompute import Block
from hetspmd.trace.row_ops import Member, same_rows
from hetspmd.trace.sample_dims import sample_dims
from hetspmd.trace.view_runs import RESHAPES, SWAPS, is_view, order_of, refined, view_runs

_PERMUTE: Final = "aten.permute.default"


def with_samples_first(graph: Graph, regions: Sequence[Block]) -> tuple[Graph, list[Block]]:
    """The graph in which flattened dims have the samples first wherever that can be, and its regions of
    torch.utils.checkpoint. Tensors keep their ids; the new ones come last. The same graph where nothing changes.
    """
    change = _change(graph)
    if not change.made:
        return graph, list(regions)
    return _Rewrite(graph, change, regions).run()


@dataclass(frozen=True, slots=True)
class _Unflattened:
    """The other side of a view of a flattened dim: its shape, with its dims split where flattened ones begin, those
    of its dims that are flattened to one, and how many of them come before the samples."""

    shape: tuple[int, ...]
    dims: tuple[int, ...]
    before: int


@dataclass
class _Change:
    """The views of flattened dims, by instruction: those that make them, and those that split them."""

    made: dict[int, list[_Unflattened]] = field(default_factory=dict)
    split: dict[int, list[_Unflattened]] = field(default_factory=dict)

    def add(self, other: _Change) -> None:
        """Both changes, unless a view would make and split flattened dims."""
        made, split = {*self.made, *other.made}, {*self.split, *other.split}
        if made.isdisjoint(split):
            for instruction, parts in other.made.items():
                self.made.setdefault(instruction, []).extend(parts)
            for instruction, parts in other.split.items():
                self.split.setdefault(instruction, []).extend(parts)


def _change(graph: Graph) -> _Change:
    fixed = _fixed(graph)
    seen: set[Member] = set()
    change = _Change()
    for tensor, place in sample_dims(graph).items():
        member = tensor, place.dim
        if place.outer > 1 and member not in seen:
            component = _Component(graph, place.outer, fixed)
            if component.may_change(member):
                change.add(component.change)
            seen |= component.members
    return change


def _fixed(graph: Graph) -> set[int]:
    """The tensors that must stay as they are: sources, and what the step results in."""
    results: set[int | None] = {o.tensor for o in graph.outputs} | {graph.loss} | set(graph.updates)
    results |= {p.gradient for p in graph.parameters}
    return {t for t in results if t is not None} | {
        t for i in graph.sources for t in graph.instructions[i].outputs
    }


class _Component:
    """All tensors that share one flattened dim, of ``outer`` indices before the samples."""

    def __init__(self, graph: Graph, outer: int, fixed: set[int]) -> None:
        self.graph, self.outer, self.fixed = graph, outer, fixed
        self.members: set[Member] = set()
        self.change = _Change()

    def may_change(self, first: Member) -> bool:
        """Whether the order of the dim of which ``first`` is a member matters to nothing, and something flattens
        it."""
        waiting, free = [first], True
        self.members.add(first)
        while waiting:
            tensor, dim = waiting.pop()
            free &= tensor not in self.fixed
            for instruction in self._around(tensor):
                others = self._others(instruction, tensor, dim)
                free &= others is not None
                new = set(others or ()) - self.members
                self.members |= new
                waiting += sorted(new)
        return free and bool(self.change.made)

    def _around(self, tensor: int) -> list[Instruction]:
        graph = self.graph
        producer = graph.producers.get(tensor)
        ids = ({producer} - {None}) | set(graph.consumers.get(tensor, ()))
        return [graph.instructions[i] for i in sorted(i for i in ids if i is not None)]

    def _others(self, instruction: Instruction, tensor: int, dim: int) -> list[Member] | None:
        """What else has the dim in an instruction that reads or makes a tensor; None where its order matters."""
        if is_view(instruction.op):
            return self._view(instruction, tensor, dim)
        tied = same_rows(self.graph, instruction, tensor, dim)
        return None if tied is None else [m for m in tied if m != (tensor, dim)]

    def _view(self, instruction: Instruction, tensor: int, dim: int) -> list[Member] | None:
        x, y = instruction.inputs[0], instruction.outputs[0]
        other = y if tensor == x else x
        flat, shape = self.graph.tensors[tensor].shape, self.graph.tensors[other].shape
        kept = next((r for r in view_runs(flat, shape) if dim in r.source), None)
        if kept is not None and kept.keeps:
            return [(other, kept.target[0])]
        shape = refined(shape, flat)
        dims = next((r.target for r in view_runs(flat, shape) if r.source == (dim,)), ())
        counts = [n for n in range(len(dims)) if prod(shape[d] for d in dims[:n]) == self.outer]
        if not counts or instruction.op not in RESHAPES:
            return None
        views = self.change.split if tensor == x else self.change.made
        views.setdefault(instruction.id, []).append(_Unflattened(shape, dims, counts[0]))
        return []


class _Rewrite:
    def __init__(self, graph: Graph, change: _Change, regions: Sequence[Block]) -> None:
        self.graph, self.change, self.regions = graph, change, regions
        self.tensors = list(graph.tensors)
        self.instructions: list[Instruction] = []
        self.orders: dict[int, tuple[int, tuple[int, ...]]] = {}
        """Of a tensor that is another one with its dims in another order: that one, and its dim for each."""
        self.permuted: dict[tuple[int, tuple[int, ...], str], int] = {}
        self.beside: dict[int, int] = {}
        """Of each new tensor that of the graph which is made beside it."""

    def run(self) -> tuple[Graph, list[Block]]:
        for instruction in self.graph.instructions:
            if instruction.id in self.change.made:
                self._flattening(instruction, self.change.made[instruction.id])
            elif instruction.id in self.change.split:
                self._splitting(instruction, self.change.split[instruction.id])
            else:
                self._append(instruction)
                self._note(instruction)
        graph = replace(self.graph, tensors=tuple(self.tensors), instructions=tuple(self.instructions))
        graph = self._without_unread(graph)
        left = {t for i in graph.instructions for t in i.outputs}
        return graph, [self._region(region, left) for region in self.regions]

    def _region(self, region: Block, left: set[int]) -> Block:
        """The region with the new tensors beside its own, and without those that are gone."""
        new = {t for t, beside in self.beside.items() if beside in region.tensors}
        return replace(region, tensors=(region.tensors | new) & left)

    def _flattening(self, view: Instruction, parts: Sequence[_Unflattened]) -> None:
        """The view, of its input with the samples before the other dims that are flattened with them."""
        x, shape = view.inputs[0], parts[0].shape
        if shape != self.tensors[x].shape:
            x = self._made(view, x, shape, view.op, shape)
        self._append(view.reading({view.inputs[0]: self._in_order(x, _order(parts), view)}))

    def _splitting(self, view: Instruction, parts: Sequence[_Unflattened]) -> None:
        """A view that finds the samples first, and a permutation that puts them back."""
        y, shape, order = view.outputs[0], parts[0].shape, _order(parts)
        first_shape = tuple(shape[d] for d in order)
        first = self._made(view, view.inputs[0], first_shape, view.op, first_shape)
        back = tuple(order.index(d) for d in range(len(order)))
        if shape == self.tensors[y].shape:
            self._append(_call(view, _PERMUTE, first, back, y))
            self._note_order(y, first, back)
        else:
            self._append(
                _call(view, view.op, self._made(view, first, shape, _PERMUTE, back), self.tensors[y].shape, y)
            )

    def _in_order(self, tensor: int, order: tuple[int, ...], reader: Instruction) -> int:
        """A tensor with its dims in another order, for a reader. A permutation of a permutation is one."""
        source, first = self.orders.get(tensor, (tensor, tuple(range(len(order)))))
        order = tuple(first[d] for d in order)
        if order == tuple(range(len(order))):
            return source
        key = source, order, reader.phase
        if key not in self.permuted:
            shape = tuple(self.tensors[source].shape[d] for d in order)
            self.permuted[key] = self._made(reader, source, shape, _PERMUTE, order)
        return self.permuted[key]

    def _note(self, instruction: Instruction) -> None:
        if instruction.op in SWAPS:
            (source,), (output,) = instruction.inputs, instruction.outputs
            order = order_of(instruction, len(self.tensors[source].shape))
            assert order is not None
            self._note_order(output, source, order)

    def _note_order(self, tensor: int, source: int, order: tuple[int, ...]) -> None:
        root, first = self.orders.get(source, (source, tuple(range(len(order)))))
        self.orders[tensor] = root, tuple(first[d] for d in order)

    def _made(
        self, view: Instruction, source: int, shape: tuple[int, ...], op: str, argument: tuple[int, ...]
    ) -> int:
        """A new tensor, which is a view of ``source``, for an instruction of the graph."""
        new = len(self.tensors)
        old = self.tensors[view.outputs[0]]
        self.tensors.append(Tensor(new, f"{old.name} samples first", shape, old.dtype))
        self.beside[new] = view.outputs[0]
        self._append(_call(view, op, source, argument, new))
        return new

    def _append(self, instruction: Instruction) -> None:
        self.instructions.append(replace(instruction, id=len(self.instructions)))

    def _without_unread(self, graph: Graph) -> Graph:
        """Without the transpositions that nothing reads any more."""
        read = _fixed(graph)
        kept: list[Instruction] = []
        for instruction in reversed(graph.instructions):
            unread = instruction.op in SWAPS and read.isdisjoint(instruction.outputs)
            if not unread or instruction.outputs[0] not in self.graph.consumers:
                read.update(instruction.inputs)
                kept.append(instruction)
        return replace(graph, instructions=tuple(replace(i, id=n) for n, i in enumerate(reversed(kept))))


def _order(parts: Sequence[_Unflattened]) -> tuple[int, ...]:
    """The order of dims in which the samples come before those that are flattened with them."""
    order = list(range(len(parts[0].shape)))
    for part in parts:
        for place, dim in zip(part.dims, (*part.dims[part.before :], *part.dims[: part.before]), strict=True):
            order[place] = dim
    return tuple(order)


def _call(like: Instruction, op: str, source: int, argument: tuple[int, ...], output: int) -> Instruction:
    """A call of a view, in the place of another."""
    return replace(like, op=op, args=(Ref(source), argument), kwargs=(), inputs=(source,), outputs=(output,))
