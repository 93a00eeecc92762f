"""Which of the ops that give a tensor another shape must copy it: those whose input's memory has other strides.

A transposed tensor that is flattened across the transposed dims is a copy, with bytes of its own, and so is an
expanded one. The strides are those of the single-device program: each op runs once on tensors without memory, of
the strides that it would be given. Slices of dims have strides in the same order, so that what is a view there is
one on every device. What a collective delivers is contiguous, whatever it was before.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch

from hetspmd.rules.theory import Theory
from hetspmd.trace.evaluate import as_list, run_instruction
from hetspmd.trace.graph import Graph, Instruction
from hetspmd.trace.values import torch_dtype
from hetspmd.trace.view_runs import is_view

Strides = tuple[int, ...]
_META = torch.device("meta")


@dataclass
class _Laid:
    """How a theory's tensors lie in memory, kept with it.

    strided  the tensors that are not contiguous on a single device
    run      by an op's call and the strides that it is given, what :func:`_run` says
    copied   the instructions that copy, by the tensors that collectives deliver of those
    """

    strided: frozenset[int] = frozenset()
    run: dict[tuple[Any, ...], tuple[list[Strides | None], bool]] = field(default_factory=dict)
    copied: dict[frozenset[int], frozenset[int]] = field(default_factory=dict)


def copied_views(theory: Theory, delivered: Set[int] = frozenset()) -> frozenset[int]:
    """The instructions that make no view, though their rule says so: reshapes of what lies in memory otherwise.
    ``delivered``: tensors that collectives deliver."""
    laid: _Laid | None = vars(theory).get("_laid")
    if laid is None:
        laid = vars(theory)["_laid"] = _Laid()
        laid.copied[frozenset()], laid.strided = _copied(theory, laid, frozenset())
    contiguous = laid.strided & delivered
    if contiguous not in laid.copied:
        laid.copied[contiguous], _ = _copied(theory, laid, contiguous)
    return laid.copied[contiguous]


def _copied(theory: Theory, laid: _Laid, contiguous: Set[int]) -> tuple[frozenset[int], frozenset[int]]:
    """The instructions that copy, where these tensors are contiguous, and the tensors that are not."""
    graph, copied = theory.graph, set[int]()
    strides: dict[int, Strides | None] = {}
    """Of each tensor; None of one that is contiguous."""
    with torch.no_grad():
        for instruction in graph.instructions:
            given = tuple([strides.get(t) for t in instruction.inputs])
            if instruction.is_source:
                continue
            key = id(theory.calls[instruction.id]), given
            if key not in laid.run:
                laid.run[key] = _run(graph, instruction, dict(zip(instruction.inputs, given, strict=True)))
            found, copies = laid.run[key]
            strides.update(zip(instruction.outputs, found, strict=True))
            strides.update((t, None) for t in instruction.outputs if t in contiguous)
            if copies and theory.rules[instruction.id].alias:
                copied.add(instruction.id)
    return frozenset(copied), frozenset(t for t, own in strides.items() if own is not None)


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
