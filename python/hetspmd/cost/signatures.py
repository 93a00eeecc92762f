"""The cost-relevant side of all Hoare triples: one *signature* for all that cost the same on any device.

FLOPs are the rule's; bytes are those of the tensors that a row cuts and of those that stay whole, each tensor read
once, results written once. Views (unless measured) and sources cost nothing, but for a trained parameter, whose
rows carry the optimizer's step on what the device stores, with the bytes of the parameter. Its second reading in
the backward (:mod:`hetspmd.trace.second_reads`) is a view, and never made.

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
from hetspmd.rules.rule import Cut, TensorType, Triple
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

    flops (FLOPs), cut and whole (bytes), axis (axis id; the number of axes where nothing is sharded), dtype
    (row of the rates, named by ``dtypes``), free (unless measured); ``updates``: the bytes are a parameter's that
    an optimizer updates; ``key`` and ``whole_key``: places in ``keys``, -1 where op times do not matter.
    ``signature[offset[i] + r]`` is that of row r of instruction i.
    """

    flops: Array
    cut: Array
    whole: Array
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
        """What the seconds of a signature depend on but for which axis it shards, shape (signatures, 9)."""
        parts = (
            self.flops,
            self.cut,
            self.whole,
            self.axis < axes,
            self.dtype,
            self.free,
            self.updates,
            self.key,
            self.whole_key,
        )
        return np.stack(parts, axis=1).astype(float)


def triples_of(theory: Theory, *, keyed: bool) -> Triples:
    """The triples of a theory (kept with it); ``keyed``: with the keys of measured ops."""
    name = "_keyed_triples" if keyed else "_triples"
    cached = theory.__dict__.get(name)
    if cached is None:
        cached = theory.__dict__[name] = _triples(theory, row_keys(theory) if keyed else None)
    triples: Triples = cached
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


_Key = tuple[float, float, float, int, int, bool, bool, int, int]


def _triples(theory: Theory, keys: list[tuple[str, ...]] | None) -> Triples:
    graph, blank = theory.graph, len(theory.axes.axes)
    nbytes = [float(t.nbytes) for t in graph.tensors]
    trained = {p.tensor for p in graph.parameters if p.gradient is not None}
    dtypes: dict[str, int] = {"float32": 0}
    names: dict[str, int] = {}
    signatures: dict[_Key, int] = {}
    signature: list[int] = []
    offset = [0]
    alike: dict[tuple[object, ...], tuple[int, list[tuple[float, float]]]] = {}
    for instruction in graph.instructions:
        rule = theory.rules.get(instruction.id)
        rows = theory.rows[instruction.id]
        # Equal calls share their rows; a tensor that is read twice counts once.
        inputs = instruction.inputs
        twice = inputs if len(set(inputs)) < len(inputs) else None
        same = id(theory.calls.get(instruction.id, instruction)), id(rows), twice
        if same not in alike:
            dtype = dtypes.setdefault(_compute_dtype(theory, instruction), len(dtypes))
            counts = rule is not None and not rule.alias
            traffic = [_traffic(theory, instruction, row, nbytes) for row in rows] if counts else []
            alike[same] = dtype, traffic
        dtype, traffic = alike[same]
        updates = instruction.op == PARAMETER and instruction.outputs[0] in trained
        of_rows = () if keys is None else tuple(names.setdefault(k, len(names)) for k in keys[instruction.id])
        for index, axis in enumerate(theory.row_axes[instruction.id]):
            place = blank if axis is None else axis
            timed = (of_rows[index], of_rows[0]) if of_rows else (-1, -1)
            if updates:
                size = nbytes[instruction.outputs[0]]
                cut, whole = (0.0, size) if axis is None else (size, 0.0)
                key: _Key = (0.0, cut, whole, place, dtype, False, True, *timed)
            elif rule is None or rule.alias:
                key = (0.0, 0.0, 0.0, place, dtype, True, False, *timed)
            else:
                key = (rule.flops, *traffic[index], place, dtype, False, False, *timed)
            signature.append(signatures.setdefault(key, len(signatures)))
        offset.append(len(signature))
    table = np.array([k[:3] for k in signatures], dtype=float).reshape(-1, 3)
    whole_numbers = np.array([(k[3], k[4], k[7], k[8]) for k in signatures], dtype=np.int64).reshape(-1, 4)
    marks = np.array([(k[5], k[6]) for k in signatures], dtype=bool).reshape(-1, 2)
    return Triples(
        table[:, 0], table[:, 1], table[:, 2], whole_numbers[:, 0], whole_numbers[:, 1], marks[:, 0],
        marks[:, 1], whole_numbers[:, 2], whole_numbers[:, 3], np.array(signature, dtype=np.int64),
        np.array(offset, dtype=np.int64), tuple(dtypes), tuple(names),
    )  # fmt: skip


def _compute_dtype(theory: Theory, instruction: Instruction) -> str:
    """The first floating output's dtype, else the first floating input's, else the first output's."""
    tensors = theory.graph.tensors
    names = [tensors[t].dtype for t in (*instruction.outputs, *instruction.inputs) if t >= 0]
    for name in names:
        if name.startswith(("float", "bfloat", "complex")):
            return name
    return names[0] if names else "float32"


def _traffic(
    theory: Theory, instruction: Instruction, row: Triple, nbytes: list[float]
) -> tuple[float, float]:
    """Bytes of the tensors that ``row`` cuts, and of those that stay whole; each tensor is read once."""
    rule = theory.rules[instruction.id]
    factor = None if row.factor is None else rule.factors[row.factor]
    cut = whole = 0.0
    seen: set[int] = set()
    picks = ".".join(instruction.op.split(".")[:2]) in PICKING
    for i, tensor in enumerate(instruction.inputs):
        if tensor in seen:
            continue
        seen.add(tensor)
        place, size = (None if factor is None else factor.inputs[i]), nbytes[tensor]
        if picks and i == 0 and instruction.outputs[0] >= 0:
            place = None if factor is None else factor.outputs[0]
            size = min(size, nbytes[instruction.outputs[0]])
        if isinstance(place, Cut):
            cut += size
        else:
            whole += size
    for i, tensor in enumerate(instruction.outputs):
        if tensor >= 0:
            if factor is not None and isinstance(factor.outputs[i], Cut):
                cut += nbytes[tensor]
            else:
                whole += nbytes[tensor]
    return cut, whole
