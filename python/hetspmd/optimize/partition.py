"""Segments of a graph, each with sharding ratios of its own, and few bytes across (HAP 5.2).

HAP divides by the user's layers or by METIS. Here the forward instructions are joined to *pieces*, a layer or
another module each, in the order of execution, weighted with the seconds that they and their backward take. An edge
between two pieces weighs as many bytes as tensors that can be sharded cross it, of forward and backward. Recursive
bisection halves a run of pieces: at the place in execution order where the fewest bytes cross among those that
balance the seconds, and then by the algorithm of Kernighan and Lin (Bell System Technical Journal 1970), as
networkx has it, where its exchanges of pieces leave fewer bytes across and the halves balanced.

An instruction of the backward is in the segment of what it differentiates, a parameter, buffer, input or constant
in that of its first reader. :func:`segmented` is the theory of the graph with cuts between the segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import networkx as nx

from hetspmd.optimize.thresholds import THRESHOLDS
from hetspmd.rules.theory import Theory, derive
from hetspmd.trace.cuts import with_cuts
from hetspmd.trace.graph import PARAMETER, Graph


def partition(
    theory: Theory, seconds: Sequence[float], count: int, uneven: float = THRESHOLDS.uneven_halves
) -> tuple[int, ...]:
    """The segment of each instruction, numbered in the order of execution; at most ``count``.

    ``seconds`` of each instruction are what the segments share evenly, but for the part ``uneven`` in each
    bisection (:attr:`~hetspmd.optimize.thresholds.Thresholds.uneven_halves`). The same arguments give the same
    segments.
    """
    pieces = _pieces(theory.graph)
    weighted = _weighted(theory, pieces, seconds)
    parts = _bisected(weighted, sorted(weighted), count, uneven)
    parts.sort(key=min)
    of = {piece: n for n, part in enumerate(parts) for piece in part}
    return tuple(of[piece] for piece in pieces)


def segmented(theory: Theory, segments: Sequence[int]) -> Theory:
    """The theory of the same step with instruction i in ``segments[i]``."""
    axes, shapes = theory.axes, theory.graph.tensors

    def divisible(tensor: int) -> bool:
        dim_axes = (axes.axis(tensor, dim) for dim in range(len(shapes[tensor].shape)))
        return any(axis is not None and axis.units >= 2 for axis in dim_axes)

    return derive(with_cuts(theory.graph, segments, divisible), quiet=True)


def segments_like(graph: Graph, segmented: Graph) -> tuple[int, ...]:
    """The segments of ``graph``, of the same model as ``segmented``, which has some: parameters and modules are
    where they are there. An instruction that tells no module (of a forward that is traced alone) is where the
    parameter that it reads is, or where what ran before it is."""
    votes: dict[str, dict[int, int]] = {}
    for instruction, segment in zip(segmented.instructions, segmented.segments, strict=True):
        if not instruction.is_source and instruction.source:
            counts = votes.setdefault(_key(instruction.source), {})
            counts[segment] = counts.get(segment, 0) + 1
    of_key = {key: min(counts, key=lambda s: (-counts[s], s)) for key, counts in votes.items()}
    stored = {p.name: segmented.segment(p.tensor) for p in segmented.parameters}
    weights = {p.tensor: stored.get(p.name, 0) for p in graph.parameters}
    segments: list[int] = []
    last = 0
    for instruction in graph.instructions:
        read = [t for t in instruction.inputs if t in weights]
        if instruction.source and _key(instruction.source) in of_key:
            last = of_key[_key(instruction.source)]
        elif read and not instruction.is_source:
            last = weights[read[-1]]
        segments.append(last)
        if read and len(read) == len(instruction.inputs):  # a view of a parameter
            weights.update(dict.fromkeys(instruction.outputs, weights[read[-1]]))
    _place_sources(graph, segments)
    for parameter in graph.parameters:
        readers = graph.consumers.get(parameter.tensor, ())
        place = segments[graph.producers[parameter.tensor]] = weights[parameter.tensor]
        if readers and place not in {segments[r] for r in readers}:
            segments[readers[0]] = place
    _place_second_reads(graph, segments)
    return tuple(segments)


@cache
def _key(source: str) -> str:
    """The module path up to its first number: what belongs to one layer."""
    names = source.split(".")
    first = next((n for n, name in enumerate(names) if name.isdigit()), len(names))
    return ".".join(names[: first + 1])


def _pieces(graph: Graph) -> list[int]:
    """The piece of each instruction. Pieces are numbered in the order of their first instruction of the forward; a
    layer is one, whenever it runs, and so is each run of instructions of one module that is no layer."""
    of_key: dict[str, list[int]] = {}
    pieces: list[int] = []
    count, last = 0, ""
    backward: list[int] = []
    for i, instruction in enumerate(graph.instructions):
        pieces.append(max(count - 1, 0))
        if instruction.phase == "backward" and not instruction.is_source:
            backward.append(i)
            continue
        key = _key(instruction.source)
        if instruction.is_source or not key:
            continue
        layer = key.rpartition(".")[2].isdigit()
        if key not in of_key or (not layer and key != last):
            of_key.setdefault(key, []).append(count)
            count += 1
        pieces[i] = of_key[key][-1]
        last = key
    near = max(count - 1, 0)
    for i in backward:
        # What sums up gradients stays where the last of them comes from.
        producer_pieces = [
            pieces[p] for t in graph.instructions[i].inputs if not _given(graph, p := graph.producers[t])
        ]
        near = max(producer_pieces, default=near)
        candidates = of_key.get(_key(graph.instructions[i].source), [near])
        pieces[i] = near = min(candidates, key=lambda piece: (abs(piece - near), piece))
    _place_sources(graph, pieces)
    _place_second_reads(graph, pieces)
    return pieces


def _given(graph: Graph, instruction: int) -> bool:
    return instruction in graph.sources


def _place_sources(graph: Graph, places: list[int]) -> None:
    """Put what is given to the step where it is first read."""
    for instruction in graph.instructions:
        if instruction.is_source:
            readers = graph.consumers.get(instruction.outputs[0], ())
            places[instruction.id] = places[readers[0]] if readers else 0


def _place_second_reads(graph: Graph, places: list[int]) -> None:
    for reading, parameter in graph.second_reads.items():
        places[reading] = places[graph.producers[parameter]]


def _weighted(theory: Theory, pieces: Sequence[int], seconds: Sequence[float]) -> nx.Graph:
    """The graph of pieces, with ``seconds`` of nodes and ``bytes`` of edges."""
    graph, axes = theory.graph, theory.axes
    piece_graph = nx.Graph()
    piece_graph.add_nodes_from(range(max(pieces, default=0) + 1), seconds=0.0)
    for instruction, piece in zip(graph.instructions, pieces, strict=True):
        if not instruction.is_source:
            piece_graph.nodes[piece]["seconds"] += float(seconds[instruction.id])
    for t, readers in sorted(graph.consumers.items()):
        producer = graph.instructions[graph.producers[t]]
        here = pieces[producer.id]
        elsewhere = {pieces[r] for r in readers} - {here}
        if not elsewhere or (producer.is_source and producer.op != PARAMETER):
            continue
        dims = (axes.axis(t, d) for d in range(len(graph.tensors[t].shape)))
        if not any(axis is not None and axis.units >= 2 for axis in dims):
            continue
        for there in sorted(elsewhere):
            before = piece_graph.get_edge_data(here, there, {"bytes": 0})["bytes"]
            piece_graph.add_edge(here, there, bytes=before + graph.tensors[t].nbytes)
    return piece_graph


def _bisected(graph: nx.Graph, nodes: list[int], parts: int, uneven: float) -> list[set[int]]:
    if parts < 2 or len(nodes) < 2:
        return [set(nodes)]
    own = nx.Graph()
    own.add_nodes_from((n, graph.nodes[n]) for n in nodes)
    own.add_weighted_edges_from(sorted(graph.subgraph(nodes).edges(data="bytes")), weight="bytes")
    left, right = _halved(own, nodes, (parts + 1) // 2 / parts, uneven)
    return [
        *_bisected(graph, sorted(left), (parts + 1) // 2, uneven),
        *_bisected(graph, sorted(right), parts // 2, uneven),
    ]


def _halved(graph: nx.Graph, nodes: list[int], part: float, uneven: float) -> tuple[set[int], set[int]]:
    """Two halves, of which the first should take ``part`` of the seconds."""
    seconds: dict[int, float] = {n: graph.nodes[n]["seconds"] for n in nodes}
    total = sum(seconds.values()) or 1.0

    def off(half: set[int]) -> float:
        return abs(sum(seconds[n] for n in sorted(half)) / total - part)

    def across(half: set[int]) -> int:
        return int(nx.cut_size(graph, half, weight="bytes"))

    splits = [(set(nodes[:n]), set(nodes[n:])) for n in range(1, len(nodes))]
    least = min(off(left) for left, _ in splits)
    tolerated = max(least, uneven * min(part, 1 - part))
    chosen = min(
        (s for s in splits if off(s[0]) <= tolerated), key=lambda s: (across(s[0]), off(s[0]), len(s[0]))
    )
    halves = nx.community.kernighan_lin_bisection(graph, chosen, weight="bytes", seed=0)
    one, other = sorted(map(set, halves), key=min)
    if across(one) < across(chosen[0]) and off(one) <= tolerated:
        return one, other
    return chosen
