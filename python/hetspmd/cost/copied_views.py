"""Which of the ops that give a tensor another shape must copy it: those whose input's memory has other strides.

A transposed tensor that is flattened across the transposed dims is a copy, with bytes of its own, and so is an
expanded one. The strides are those of the single-device program: each op runs once on tensors without memory, of
the strides that it would be given. Slices of dims have strides in the same order, so that what is a view there is
one on every device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hetspmd.rules.theory import Theory
from hetspmd.trace.evaluate import as_list, run_instruction
from hetspmd.trace.graph import Graph, Instruction
from hetspmd.trace.values import torch_dtype
from hetspmd.trace.view_runs import is_view

Strides = tuple[int, ...]
_META = torch.device("meta")


def copied_views(theory: Theory) -> frozenset[int]:
    """The instructions that make no view, though their rule says so: reshapes of what lies in memory otherwise."""
    kept: frozenset[int] | None = vars(theory).get("_copied_views")
    if kept is None:
        kept = vars(theory)["_copied_views"] = _copied(theory)
    return kept


def _copied(theory: Theory) -> frozenset[int]:
    graph, copied = theory.graph, set[int]()
    strides: dict[int, Strides | None] = {}
    """Of each tensor; None of one that is contiguous."""
    known: dict[tuple[Any, ...], tuple[list[Strides | None], bool]] = {}
    with torch.no_grad():
        for instruction in graph.instructions:
            given = tuple([strides.get(t) for t in instruction.inputs])
            if instruction.is_source:
                continue
            key = id(theory.calls[instruction.id]), given
            if key not in known:
                known[key] = _run(graph, instruction, dict(zip(instruction.inputs, given, strict=True)))
            found, copies = known[key]
            strides.update(zip(instruction.outputs, found, strict=True))
            if copies and theory.rules[instruction.id].alias:
                copied.add(instruction.id)
    return frozenset(copied)


def _run(
    graph: Graph, instruction: Instruction, strides: Mapping[int, Strides | None]
) -> tuple[list[Strides | None], bool]:
    """The strides of what an instruction makes, and whether the first of them has memory of its own."""
    given = {}
    for t, own in strides.items():
        tensor = graph.tensors[t]
        dtype = torch_dtype(tensor.dtype)
        if own is None:
            given[t] = torch.empty(tensor.shape, dtype=dtype, device=_META)
        else:
            given[t] = torch.empty_strided(tensor.shape, own, dtype=dtype, device=_META)
    try:
        if is_view(instruction.op):
            first = given[instruction.inputs[0]]
            results = [first.reshape(graph.tensors[instruction.outputs[0]].shape)]
        else:
            results = as_list(run_instruction(instruction, given, _META), len(instruction.outputs))
    except Exception:
        # An op may have no kernel for tensors without memory. Its results are then as they most often are.
        return [None] * len(instruction.outputs), False
    found = [None if not isinstance(r, torch.Tensor) or r.is_contiguous() else r.stride() for r in results]
    storages = {t.untyped_storage()._cdata for t in given.values()}
    return found, isinstance(results[0], torch.Tensor) and results[0].untyped_storage()._cdata not in storages
