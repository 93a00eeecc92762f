"""What recomputation saves: the bytes that the forward then does not hold for the backward, block by block.

Bytes are those of the single device: a view holds what it looks at. What the graph holds without its copies follows
from the copies' originals.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hetspmd.trace.graph import Graph
from hetspmd.trace.recompute import is_view


def copying_instructions(graph: Graph) -> dict[int, str]:
    """The ids of the instructions that compute again, each with its block."""
    of = {copy: block.block for block in graph.recomputed for _, copy in block.tensors}
    return {
        i.id: block
        for i in graph.instructions
        if i.phase == "backward" and (block := next((of[t] for t in i.outputs if t in of), None)) is not None
    }


def saved_bytes(graph: Graph) -> dict[str, int]:
    """For each block that is computed again the bytes of the forward that the backward does not hold for it, less
    those that it holds for that alone."""
    copying = copying_instructions(graph)
    original = {copy: tensor for block in graph.recomputed for tensor, copy in block.tensors}
    home = {tensor: block.block for block in graph.recomputed for tensor, _ in block.tensors}
    own: list[int] = []
    read: dict[int, str] = {}
    for instruction in graph.instructions:
        if instruction.phase == "backward":
            if instruction.id not in copying:
                own += instruction.inputs
            else:
                read.update(dict.fromkeys(instruction.inputs, copying[instruction.id]))
    with_copies = _storages(graph, [t for t in (*own, *read) if t not in original])
    without = _storages(graph, [original.get(t, t) for t in own])
    saved = dict.fromkeys((block.block for block in graph.recomputed), 0)
    for storage, nbytes in without.items():
        if storage not in with_copies and storage in home:
            saved[home[storage]] += nbytes
    entering = {_storage(graph, t): block for t, block in read.items() if t not in original}
    for storage, nbytes in with_copies.items():
        if storage not in without and storage in entering:
            saved[entering[storage]] -= nbytes
    return saved


def _storages(graph: Graph, tensors: Iterable[int]) -> Mapping[int, int]:
    """The tensors of the forward, none of them a source, in whose memory these are, with their bytes."""
    found: dict[int, int] = {}
    for tensor in tensors:
        storage = _storage(graph, tensor)
        producer = graph.producer(storage)
        if producer.phase == "forward" and not producer.is_source:
            found[storage] = graph.tensors[storage].nbytes
    return found


def _storage(graph: Graph, tensor: int) -> int:
    while is_view(graph.producer(tensor)):
        tensor = graph.producer(tensor).inputs[0]
    return tensor
