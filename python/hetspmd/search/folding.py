"""Alike layers of a model that a search may take as one.

The elements of a list of modules (``nn.ModuleList``, ``nn.Sequential``) are alike if they run the same ops on
tensors of the same shapes, with the same triples, in the same order, forward and backward. A search among the
programs in which alike layers are alike has one variable where a search among all programs has one for each
layer, and takes a fraction of its time (rust/core/src/fold.rs). Its programs are programs of the whole space. Its
bound is of these programs alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from hetspmd.search.space import Space

RUNS: Final = 8
"""Alike layers are folded into so many runs of neighbours: what a program does in some layers and not in others, it
does in whole runs."""

LAYERS_OF_A_RUN: Final = 2
"""Layers that each run must have: of fewer a search takes no less time. A list of fewer layers than runs of as many
is folded into fewer runs, where that is asked for."""

_Signature = tuple[object, ...]


def alike_instructions(space: Space, *, few: bool = False) -> npt.NDArray[np.int64] | None:
    """For each instruction the one that stands for it; None where there are too few alike layers to fold. ``few``:
    two will do."""
    own = np.arange(len(space.rows))
    found = False
    for layers in _alike_layers(space):
        runs = min(RUNS, len(layers) // LAYERS_OF_A_RUN)
        if runs < (1 if few else RUNS):
            continue
        found = True
        ends = [k * len(layers) // runs for k in range(runs + 1)]
        for start, end in pairwise(ends):
            for layer in layers[start:end]:
                own[layer] = layers[start]
    return own if found else None


def _alike_layers(space: Space) -> Iterable[list[list[int]]]:
    """Lists of alike layers, each layer a list of its instructions in order."""
    layers: dict[tuple[str, int], list[int]] = defaultdict(list)
    signatures: dict[tuple[str, int], list[_Signature]] = defaultdict(list)
    graph = space.theory.graph
    before: tuple[str, str] = ("", "")
    for i, instruction in enumerate(graph.instructions):
        path = instruction.source or (instruction.name if instruction.is_source else "")
        if path:
            before = instruction.phase, path
        elif before[0] == instruction.phase:
            # Sums of gradients have no module: they follow what they sum.
            path = before[1]
        element = _element(path)
        if element is None:
            continue
        container, index, rest = element
        layers[container, index].append(i)
        signatures[container, index].append((instruction.phase, rest, *_signature(space, i)))
    alike: dict[_Signature, list[tuple[int, list[int]]]] = defaultdict(list)
    for (container, index), instructions in layers.items():
        alike[container, *signatures[container, index]].append((index, instructions))
    return [[instructions for _, instructions in sorted(group)] for group in alike.values() if len(group) > 1]


def _element(path: str) -> tuple[str, int, str] | None:
    """The outermost list that a module is in, the number of the element, and the rest of the path."""
    parts = path.split(".")
    for n, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[:n]), int(part), ".".join(parts[n + 1 :])
    return None


def _signature(space: Space, i: int) -> _Signature:
    """What alike instructions have in common."""
    theory, instruction = space.theory, space.theory.graph.instructions[i]
    outputs = tuple(t for t in instruction.outputs if t >= 0)
    tensors = tuple(
        (theory.graph.tensors[t].shape, theory.graph.tensors[t].dtype, id(space.moves[t]), space.forms[t])
        for t in outputs
    )
    rows = tuple((theory.rows[i][k].pre, theory.rows[i][k].post) for k in space.rows[i])
    return instruction.op, rows, tensors, i in theory.graph.second_reads
