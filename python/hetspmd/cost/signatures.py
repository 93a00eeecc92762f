"""The cost-relevant side of all Hoare triples: one *signature* for all that cost the same on any device.

FLOPs are the rule's; bytes are those of the tensors that a row cuts and of those that stay whole, each tensor read
once, results written once. Views (unless measured) and sources cost nothing, but for a trained parameter, whose
rows carry the optimizer's step on what the device stores, with the bytes of the parameter. Its second reading in
the backward (:mod:`hetspmd.trace.second_reads`) is a view, and never made.

In micro-batches a call of the loop is made in each turn, and each turn reads again what the turns do not divide:
weights, but not activations. ``*_each`` are the FLOPs and bytes of every further turn of a device. What the loop
leaves as a sum is copied in the first turn and added to in the others.

Where op times were measured, a signature also has the key of its row and that of the same call run whole
(:mod:`hetspmd.cost.op_keys`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from hetspmd.cost.op_keys import VIEW_KEY, call_key, memory_orders, parameter_key
from hetspmd.placement import is_sharded, sharded_dim
from hetspmd.program.micro_batches import MicroBatches
from hetspmd.rules.rule import Cut, Factor, TensorType, Triple
from hetspmd.rules.theory import Theory
from hetspmd.trace.graph import PARAMETER, SECOND_READ, Instruction

Array = npt.NDArray[np.float64]
Index = npt.NDArray[np.int64]

PICKING: Final = frozenset(
    {"aten.embedding", "aten.gather", "aten.index", "aten.index_select", "aten.select", "aten.slice"}
)
"""Ops that read no more of their first tensor than they write."""


@dataclass(frozen=True)
class Triples:
    """The cost-relevant side of all rows, one entry per distinct signature.

    flops (FLOPs), cut and whole (bytes); the same of each turn of the loop after the first, with ``_each``;
    ``calls_each`` of such a turn, and how many sums it adds to (``added``); axis (axis id; the number of axes where
    nothing is sharded), dtype (row of the rates, named by ``dtypes``), free (unless measured); ``updates``: the
    bytes are a parameter's that an optimizer updates; ``key`` and ``whole_key``: places in ``keys``, -1 where op
    times do not matter.
    ``signature[offset[i] + r]`` is that of row r of instruction i.
    """

    flops: Array
    cut: Array
    whole: Array
    flops_each: Array
    cut_each: Array
    whole_each: Array
    calls_each: Array
    added: Array
    axis: Index
    dtype: Index
    free: npt.NDArray[np.bool_]
    updates: npt.NDArray[np.bool_]
    key: Index
    whole_key: Index
    signature: Index
    offset: Index
    dtypes: tuple[str, ...]
    keys: tuple[str, ...]

    @cached_property
    def places(self) -> tuple[list[int], list[int]]:
        """``signature`` and ``offset`` as lists, of which single entries are taken faster."""
        return self.signature.tolist(), self.offset.tolist()

    def columns(self, axes: int) -> Array:
        """What the seconds of a signature depend on but for which axis it shards, shape (signatures, 14)."""
        parts = (
            self.flops,
            self.cut,
            self.whole,
            self.flops_each,
            self.cut_each,
            self.whole_each,
            self.calls_each,
            self.added,
            self.axis < axes,
            self.dtype,
            self.free,
            self.updates,
            self.key,
            self.whole_key,
        )
        return np.stack(parts, axis=1).astype(float)


def triples_of(theory: Theory, *, keyed: bool, batches: MicroBatches | None = None) -> Triples:
    """The triples of a theory (kept with it); ``keyed``: with the keys of measured ops; ``batches``: in a step in
    micro-batches."""
    kept: list[tuple[bool, object, Triples]] = theory.__dict__.setdefault("_triples", [])
    loop = None if batches is None else batches.loop
    for with_keys, of, triples in kept:
        if with_keys == keyed and of is loop:
            return triples
    triples = _triples(theory, row_keys(theory) if keyed else None, batches)
    kept.append((keyed, loop, triples))
    return triples


def row_keys(theory: Theory) -> list[tuple[str, ...]]:
    """Per instruction the keys of its rows; none for sources that are no trained parameters."""
    trained = {p.tensor for p in theory.graph.parameters if p.gradient is not None}
    orders = memory_orders(theory)
    call_keys: dict[tuple[object, ...], tuple[str, ...]] = {}
    keys: list[tuple[str, ...]] = []
    for instruction in theory.graph.instructions:
        rule, call = theory.rules.get(instruction.id), theory.calls.get(instruction.id)
        if instruction.op == PARAMETER and instruction.outputs[0] in trained:
            tensor = theory.graph.tensors[instruction.outputs[0]]
            type_ = TensorType(tensor.shape, tensor.dtype)
            forms = (row.post[0] for row in theory.rows[instruction.id])
            dims = (sharded_dim(form) if is_sharded(form) else None for form in forms)
            keys.append(tuple(parameter_key(type_, dim) for dim in dims))
            continue
        if rule is None or call is None or instruction.op == SECOND_READ:
            keys.append(())
            continue
        if rule.alias:
            keys.append((VIEW_KEY,) * len(theory.rows[instruction.id]))
            continue
        of_inputs = tuple(orders[t] for t in instruction.inputs)
        same = tuple(instruction.inputs.index(t) for t in instruction.inputs)
        rows = theory.rows[instruction.id]
        key = (id(call), of_inputs, same, rows)
        if key not in call_keys:
            call_keys[key] = tuple(call_key(call, rule, row, of_inputs, same) for row in rows)
        keys.append(call_keys[key])
    return keys


_Counts = tuple[float, float, float, float, float, float, float, float]
"""The first eight columns of :class:`Triples`."""
_NOTHING: Final[_Counts] = (0.0,) * 8
_Key = tuple[_Counts, int, int, bool, bool, int, int]


def _triples(theory: Theory, keys: list[tuple[str, ...]] | None, batches: MicroBatches | None) -> Triples:
    graph, blank = theory.graph, len(theory.axes.axes)
    traffic = _Traffic(theory, batches)
    trained = {p.tensor for p in graph.parameters if p.gradient is not None}
    dtypes: dict[str, int] = {"float32": 0}
    names: dict[str, int] = {}
    signatures: dict[_Key, int] = {}
    signature: list[int] = []
    offset = [0]
    for instruction in graph.instructions:
        rule = theory.rules.get(instruction.id)
        dtype = dtypes.setdefault(traffic.dtype(instruction), len(dtypes))
        counts = traffic.of(instruction)
        updates = instruction.op == PARAMETER and instruction.outputs[0] in trained
        of_rows = () if keys is None else tuple(names.setdefault(k, len(names)) for k in keys[instruction.id])
        for index, axis in enumerate(theory.row_axes[instruction.id]):
            place = blank if axis is None else axis
            timed = (of_rows[index], of_rows[0]) if of_rows else (-1, -1)
            if updates:
                size = float(graph.tensors[instruction.outputs[0]].nbytes)
                cut, whole = (0.0, size) if axis is None else (size, 0.0)
                key: _Key = ((0.0, cut, whole, *_NOTHING[3:]), place, dtype, False, True, *timed)
            else:
                free = (rule is None or rule.alias) and not counts[index][-1]
                key = (counts[index], place, dtype, free, False, *timed)
            signature.append(signatures.setdefault(key, len(signatures)))
        offset.append(len(signature))
    table = np.array([k[0] for k in signatures], dtype=float).reshape(-1, len(_NOTHING))
    whole_numbers = np.array([(k[1], k[2], k[5], k[6]) for k in signatures], dtype=np.int64).reshape(-1, 4)
    marks = np.array([(k[3], k[4]) for k in signatures], dtype=bool).reshape(-1, 2)
    return Triples(
        table[:, 0], table[:, 1], table[:, 2], table[:, 3], table[:, 4], table[:, 5], table[:, 6], table[:, 7],
        whole_numbers[:, 0], whole_numbers[:, 1], marks[:, 0],
        marks[:, 1], whole_numbers[:, 2], whole_numbers[:, 3], np.array(signature, dtype=np.int64),
        np.array(offset, dtype=np.int64), tuple(dtypes), tuple(names),
    )  # fmt: skip


class _Traffic:
    """FLOPs and bytes of instructions by their rows. Equal calls share theirs."""

    def __init__(self, theory: Theory, batches: MicroBatches | None) -> None:
        self.theory, self.graph, self.batches = theory, theory.graph, batches
        self._nbytes = [float(t.nbytes) for t in theory.graph.tensors]
        self._alike: dict[tuple[object, ...], list[_Counts]] = {}
        self._dtypes: dict[int, str] = {}

    def dtype(self, instruction: Instruction) -> str:
        """The dtype in which an instruction computes."""
        same = id(self.theory.calls.get(instruction.id, instruction))
        if same not in self._dtypes:
            self._dtypes[same] = _compute_dtype(self.theory, instruction)
        return self._dtypes[same]

    def of(self, instruction: Instruction) -> list[_Counts]:
        """The counts of each row."""
        # A tensor that is read twice counts once.
        inputs, rows = instruction.inputs, self.theory.rows[instruction.id]
        twice = inputs if len(set(inputs)) < len(inputs) else None
        added = self._added(instruction)
        same = (
            id(self.theory.calls.get(instruction.id, instruction)),
            id(rows),
            twice,
            self._in_time(instruction),
            added,
        )
        if same not in self._alike:
            self._alike[same] = [self._counts(instruction, row, added) for row in rows]
        return self._alike[same]

    def _in_time(self, instruction: Instruction) -> Triple | None:
        """The row in time of an instruction of the loop."""
        loop = None if self.batches is None else self.batches.loop
        return None if loop is None or loop.phases[instruction.id] != "in" else loop.rows[instruction.id]

    def _added(self, instruction: Instruction) -> tuple[int, ...]:
        """Which outputs are summed over the loop."""
        if self.batches is None:
            return ()
        return tuple(i for i, t in enumerate(instruction.outputs) if t in self.batches.summed)

    def _counts(self, instruction: Instruction, row: Triple, added: tuple[int, ...]) -> _Counts:
        rule = self.theory.rules.get(instruction.id)
        if rule is None:
            return _NOTHING
        factor = None if row.factor is None else rule.factors[row.factor]
        in_time = self._in_time(instruction)
        counts = [0.0] * len(_NOTHING)
        if not rule.alias:
            counts[0] = rule.flops
            _traffic(instruction, factor, self._nbytes, counts)
            if in_time is not None:
                over_turns = None if in_time.factor is None else rule.factors[in_time.factor]
                if over_turns is None:
                    counts[3:6] = counts[:3]
                else:
                    _traffic(instruction, factor, self._nbytes, counts, over_turns)
                counts[6] = 1.0
        for output in added:
            size = self._nbytes[instruction.outputs[output]]
            cut = factor is not None and isinstance(factor.outputs[output], Cut)
            counts[1 if cut else 2] += _COPIED * size
            counts[4 if cut else 5] += _ADDED * size
        counts[7] = float(len(added))
        return (counts[0], counts[1], counts[2], counts[3], counts[4], counts[5], counts[6], counts[7])


_COPIED, _ADDED = 2, 3
"""How often the bytes of a summand are read or written: to copy it, to add it to a sum."""


def _compute_dtype(theory: Theory, instruction: Instruction) -> str:
    """The first floating output's dtype, else the first floating input's, else the first output's."""
    tensors = theory.graph.tensors
    names = [tensors[t].dtype for t in (*instruction.outputs, *instruction.inputs) if t >= 0]
    for name in names:
        if name.startswith(("float", "bfloat", "complex")):
            return name
    return names[0] if names else "float32"


def _traffic(
    instruction: Instruction,
    factor: Factor | None,
    nbytes: list[float],
    counts: list[float],
    over_turns: Factor | None = None,
) -> None:
    """Add to ``counts`` the bytes of the tensors that a row cuts, and of those that stay whole; each tensor is read
    once. ``over_turns``: those of each further turn, which the row in time does not cut."""
    places = (1, 2) if over_turns is None else (4, 5)
    seen: set[int] = set()
    picks = ".".join(instruction.op.split(".")[:2]) in PICKING

    def add(place: object, in_time: object, size: float) -> None:
        if not isinstance(in_time, Cut):
            counts[places[0 if isinstance(place, Cut) else 1]] += size

    for i, tensor in enumerate(instruction.inputs):
        if tensor in seen:
            continue
        seen.add(tensor)
        size, of = nbytes[tensor], _inputs
        if picks and i == 0 and instruction.outputs[0] >= 0:
            size, of = min(size, nbytes[instruction.outputs[0]]), _outputs
        add(of(factor, i), of(over_turns, i), size)
    for i, tensor in enumerate(instruction.outputs):
        if tensor >= 0:
            add(_outputs(factor, i), _outputs(over_turns, i), nbytes[tensor])


def _inputs(factor: Factor | None, place: int) -> object:
    return None if factor is None else factor.inputs[place]


def _outputs(factor: Factor | None, place: int) -> object:
    return None if factor is None else factor.outputs[place]
