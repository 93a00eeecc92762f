"""One instruction as a program of its own, lowered as the runtime lowers it, with inputs to run it on.

The instruction's tensors become the inputs of a graph that holds nothing else; :class:`GraphWriter
<hetspmd.lower.emit.GraphWriter>` writes what rank 0 of two runs for one of its triples, so that local shapes,
rewritten arguments and random draws are those of a step.

Inputs are dense, in the memory order that they have in the model, and are cut from an arena larger than caches
(:class:`Arena`), each set from another place. Floats are uniform in [0.1, 1), so that nothing is denormal, infinite
or not a number; integers are uniform among those that the op may be given (:func:`index_bound`), so that lookups
spread; bools are fair coins.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from hetspmd.cost.op_keys import Order, dense_strides
from hetspmd.dist.communicator import LoneCommunicator
from hetspmd.dist.random import Randomness
from hetspmd.dist.runtime import Runtime
from hetspmd.lower.emit import GraphWriter, drop_unread
from hetspmd.placement import Placement
from hetspmd.profile.profile_thresholds import THRESHOLDS
from hetspmd.program.lengths import Lengths
from hetspmd.program.level_layout import LevelLayout, RankPlace
from hetspmd.program.program import Compute
from hetspmd.rules.rule import Call
from hetspmd.rules.theory import Theory, derive
from hetspmd.trace.graph import INPUT, ITEM_SIZES, Graph, Input, Instruction, Ref, Tensor, map_refs
from hetspmd.trace.values import torch_dtype


@dataclass(frozen=True)
class Alone:
    """An instruction in a graph of its own, which can be sent to another rank; ``orders`` are those of the inputs'
    memory."""

    graph: Graph
    orders: tuple[Order, ...]

    @property
    def theory(self) -> Theory:
        """The triples of the graph."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the model's own theory has named the ops without rules
            return derive(self.graph)


def alone(graph: Graph, instruction: Instruction, orders: Sequence[Order]) -> Alone:
    """The instruction without the rest of ``graph``; ``orders`` of all of its tensors."""
    inputs = list(dict.fromkeys(instruction.inputs))
    outputs = [t for t in instruction.outputs if t >= 0]
    place = {t: i for i, t in enumerate([*inputs, *outputs])}
    tensors = tuple(
        Tensor(i, f"e{i}", graph.tensors[t].shape, graph.tensors[t].dtype) for t, i in place.items()
    )

    def moved(reference: Ref) -> Ref:
        return Ref(place[reference.id])

    sources = [Instruction(i, f"e{i}", INPUT, (), (), (), (i,)) for i in range(len(inputs))]
    op = Instruction(
        len(inputs),
        "op",
        instruction.op,
        tuple(map_refs(a, moved) for a in instruction.args),
        tuple((k, map_refs(v, moved)) for k, v in instruction.kwargs),
        tuple(place[t] for t in instruction.inputs),
        tuple(place[t] if t >= 0 else -1 for t in instruction.outputs),
    )
    graph_inputs = tuple(Input(f"e{i}", i, i) for i in range(len(inputs)))
    subgraph = Graph(tensors, (*sources, op), (), (), graph_inputs, (), (), (), None, None, "", "")
    return Alone(subgraph, tuple(orders[t] for t in inputs))


class Arena:
    """Memory of ``nbytes`` per dtype, filled once, from which inputs are cut one behind the other, and again."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes
        self._flat: dict[torch.dtype, torch.Tensor] = {}
        self._at: dict[torch.dtype, int] = {}

    def take(self, shape: Sequence[int], order: Order, dtype: str) -> torch.Tensor:
        """A tensor of floats or bools that lies in memory as ``order`` says."""
        kind = torch_dtype(dtype)
        strides, count = dense_strides(shape, order)
        flat = self._flat.get(kind)
        if flat is None or flat.numel() < count:
            size = max(self.nbytes // kind.itemsize, count)
            low = THRESHOLDS.least_float
            tile = torch.rand(min(THRESHOLDS.tile_elements, size), device=self.device)
            tile = (tile < 0.5).to(kind) if kind == torch.bool else (low + (1 - low) * tile).to(kind)
            flat = self._flat[kind] = tile.repeat(-(-size // len(tile)))[:size]
            self._at[kind] = 0
        aligned = THRESHOLDS.aligned_elements
        start = self._at[kind] if self._at[kind] + count <= flat.numel() else 0
        self._at[kind] = start + -(-count // aligned) * aligned
        return flat.as_strided(tuple(shape), strides, start)


@dataclass(frozen=True)
class LocalOp:
    """``run(runtime, *inputs)`` is the local call; ``make(arena)`` gives inputs for it; ``nbytes`` of inputs,
    ``held`` of inputs and results."""

    run: Callable[..., Any]
    make: Callable[[Arena], list[torch.Tensor]]
    runtime: Runtime
    nbytes: int
    held: int


def local_op(theory: Theory, orders: Sequence[Order], row: int, held: int, device: torch.device) -> LocalOp:
    """The local call of a row of an instruction alone, on a device that holds ``held`` units of the row's axis."""
    graph = theory.graph
    instruction = graph.instructions[-1]
    triple, axis = theory.rows[instruction.id][row], theory.row_axes[instruction.id][row]
    whole = tuple((a.units, 0) for a in theory.axes.axes)
    units = tuple((held, u - held) if n == axis else (u, rest) for n, (u, rest) in enumerate(whole))
    layout, at = LevelLayout(theory, Lengths(2, units)), RankPlace(0)
    writer = GraphWriter(layout, at, device)
    writer.fused = frozenset({instruction.id})
    keys: dict[tuple[int, Placement], None] = dict.fromkeys(zip(instruction.inputs, triple.pre, strict=True))
    for n, key in enumerate(keys):
        writer.produced[key] = writer.graph.placeholder(f"x{n}")
    writer.write(Compute(instruction.id, triple))
    results = [(t, f) for t, f in zip(instruction.outputs, triple.post, strict=True) if t >= 0]
    writer.finish([writer.need(key) for key in results])
    drop_unread(writer.graph)
    shapes = {key: layout.shape(key, at) for key in (*keys, *results)}
    bounds = {key: _bound(theory.calls[instruction.id], instruction, key[0], shapes) for key in keys}
    dtypes = {key: graph.tensors[key[0]].dtype for key in shapes}

    def make(arena: Arena) -> list[torch.Tensor]:
        return [_content(arena, shapes[k], orders[k[0]], dtypes[k], bounds[k]) for k in keys]

    def nbytes(of: Sequence[tuple[int, Placement]]) -> int:
        return sum(math.prod(shapes[k]) * ITEM_SIZES[dtypes[k]] for k in of)

    runtime = Runtime(LoneCommunicator(), Randomness(0, 0, device))
    runtime.randomness.begin_step()
    run = fx.GraphModule(torch.nn.Module(), writer.graph).forward
    return LocalOp(run, make, runtime, nbytes(list(keys)), nbytes(list(shapes)))


def _content(arena: Arena, shape: Sequence[int], order: Order, dtype: str, bound: int) -> torch.Tensor:
    if dtype == "bool" or dtype.startswith(("float", "bfloat")):
        return arena.take(shape, order, dtype)
    kind = torch_dtype(dtype)
    if kind.is_complex:
        return torch.view_as_complex(
            arena.take((*shape, 2), None, str(kind.to_real()).removeprefix("torch."))
        )
    strides, count = dense_strides(shape, order)
    flat = torch.randint(0, bound, (count,), device=arena.device, dtype=kind)
    return flat.as_strided(tuple(shape), strides)


_INDEX: Final = {
    "aten.gather.default": (0, 1, 2),
    "aten.index_select.default": (0, 1, 2),
    "aten.scatter.src": (0, 1, 2),
    "aten.scatter.value": (0, 1, 2),
    "aten.scatter_add.default": (0, 1, 2),
    "aten.scatter_reduce.two": (0, 1, 2),
    "aten.index_add.default": (0, 1, 2),
    "aten.index_copy.default": (0, 1, 2),
    "aten.index_fill.int_Scalar": (0, 1, 2),
}
"""Positions of the tensor, the dim and the index along it."""
_CLASSES: Final = {
    "aten.nll_loss_forward.default": (0, 1),
    "aten.nll_loss2d_forward.default": (0, 1),
    "aten.nll_loss_backward.default": (1, 2),
    "aten.nll_loss2d_backward.default": (1, 2),
}
"""Positions of the log probabilities and of the classes."""


def index_bound(call: Call, position: int, inputs: Sequence[Sequence[int]], output: Sequence[int]) -> int:
    """The integers from 0 that input ``position`` of a call may hold, with these local shapes; 2 where it holds no
    indices (0 and 1 do everywhere)."""

    def shape(argument: int) -> Sequence[int]:
        place = call.tensor(argument)
        return () if place is None else inputs[place]

    if call.op == "aten.embedding.default" and call.tensor(1) == position:
        return shape(0)[0]
    if call.op == "aten.embedding_dense_backward.default" and call.tensor(1) == position:
        return output[0]
    if call.op in _INDEX:
        of, dim, index = _INDEX[call.op]
        if call.tensor(index) == position:
            whole = shape(of)
            return whole[call.arg(dim, "dim", 0)] if whole else 1
    if call.op in _CLASSES:
        of, classes = _CLASSES[call.op]
        if call.tensor(classes) == position:
            return shape(of)[min(1, len(shape(of)) - 1)]
    if call.op in ("aten.index.Tensor", "aten.index_put.default"):
        for dim, index in enumerate(call.arg(1, "indices", ())):
            if isinstance(index, Ref) and index.id == position:
                return shape(0)[dim]
    if call.op == "aten.max_pool2d_with_indices_backward.default" and call.tensor(7) == position:
        return shape(1)[-1] * shape(1)[-2]
    return 2


def _bound(
    call: Call, instruction: Instruction, tensor: int, shapes: dict[tuple[int, Placement], tuple[int, ...]]
) -> int:
    local = {t: shape for (t, _), shape in shapes.items()}
    inputs = [local[t] for t in instruction.inputs]
    output = local.get(instruction.outputs[0], ())
    return max(
        1,
        min(
            index_bound(call, position, inputs, output)
            for position, t in enumerate(instruction.inputs)
            if t == tensor
        ),
    )
