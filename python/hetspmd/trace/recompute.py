"""Recomputation of activations: what the forward computes of a block is computed again where the backward reads it.

:func:`with_recomputation` copies instructions of the forward into the backward. A copy stands right before the
first instruction of the backward that reads its result, itself or by other copies, so that the last block comes
first and one block's activations are held at a time. It reads what is held: sources, what enters the block, and
what leaves it, since that is held as what enters the next one, and so is what it is a view of.

- Random instructions are not copied: what they draw is held, so that the copies read the same values on any
  sharding. Of a dropout it is the mask, one byte for each element; what it drops is multiplied by the mask again.
- Integers that floating-point numbers decide (the experts of a token, where the largest is) are held: a copy whose
  sums were rounded otherwise might decide otherwise. What is small beside what it is made of (a norm's statistics)
  is held, since that takes little.
- What updates a buffer is not read by the backward, and is not computed again.
- Copies and their tensors are new ones. They are of the backward, and nothing merges calls of the two phases.
- A parameter that a copy reads is read by the backward (:mod:`hetspmd.trace.second_reads`), so that a program may
  gather it again for the copy and for the gradients of its block.

Instructions that the backward makes of the forward's results alone (a mask, a transpose) would compute a block
again where they stand. They are put off until the backward needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from hetspmd.trace.graph import Graph, Instruction, Recomputed, Ref, Tensor
from hetspmd.trace.second_reads import with_second_reads, without_second_reads
from hetspmd.trace.values import is_random, torch_op

AGAIN: Final = "again"
"""What follows the name of a tensor in that of its copy."""
_DROPOUT: Final = "aten.native_dropout.default"
_MASKED: Final = "aten.native_dropout_backward.default"
"""Its input, times a mask, times a number."""
_SMALL: Final = 1 / 32
"""The part of the bytes of the largest tensor that an instruction reads, up to which its results are held."""


@dataclass(frozen=True)
class Block:
    """A part of the forward that may be computed again: its name, and the tensors that its instructions make, of
    which
    those ``held`` are not computed again."""

    name: str
    tensors: frozenset[int]
    held: frozenset[int] = frozenset()


Chooser = Callable[[Graph, Sequence[Block]], Sequence[Block]]
"""Which blocks of a graph are computed again; it is given the regions of torch.utils.checkpoint that the model
has."""


def own_regions(_graph: Graph, regions: Sequence[Block]) -> Sequence[Block]:
    """The regions of torch.utils.checkpoint alone."""
    return regions


def with_recomputation(graph: Graph, blocks: Sequence[Block]) -> Graph:
    """The graph in which the backward computes these blocks again; of a tensor in several blocks the first counts.

    The graph is one without second readings of parameters, and of one segment. Tensors keep their ids; the copies
    come last. The same graph where the backward reads nothing that the blocks need not hold.
    """
    if graph.tangent is None or not blocks:
        return graph
    return _Pass(graph, blocks).run()


def recomputed(graph: Graph, blocks: Sequence[Block]) -> Graph:
    """:func:`with_recomputation` of a graph with second readings, which are made anew."""
    return with_second_reads(with_recomputation(without_second_reads(graph), blocks))


@dataclass
class _Pass:
    graph: Graph
    blocks: Sequence[Block]
    tensors: list[Tensor] = field(init=False)
    out: list[Instruction] = field(default_factory=list)
    copies: dict[int, int] = field(default_factory=dict)
    """Of each tensor that is computed again its copy."""

    def __post_init__(self) -> None:
        graph = self.graph
        self.tensors = list(graph.tensors)
        self.block_of: dict[int, int] = {}
        for number, block in reversed(list(enumerate(self.blocks))):
            self.block_of.update((t, number) for t in block.tensors if self._is_forward(t))
        self.held = self._held()
        self.put_off: set[int] = set()
        """Instructions of the backward that wait until what they make is read."""

    def run(self) -> Graph:
        graph, after = self.graph, self._after_tangent()
        results = {p.gradient for p in graph.parameters}
        for instruction in graph.instructions:
            if instruction.phase == "forward":
                self._emit(instruction)
                continue
            needed = list(self._needed(instruction))
            if needed and instruction.id not in after and results.isdisjoint(instruction.outputs):
                self.put_off.add(instruction.id)
                continue
            for each in needed:
                self._make(each)
            self._emit(instruction.reading(self.copies))
        return replace(
            graph,
            tensors=tuple(self.tensors),
            instructions=tuple(self.out),
            recomputed=(*graph.recomputed, *self._recomputed()),
        )

    def _is_forward(self, tensor: int) -> bool:
        producer = self.graph.producers.get(tensor)  # a constant's private tensors have none
        instruction = None if producer is None else self.graph.instructions[producer]
        return instruction is not None and instruction.phase == "forward" and not instruction.is_source

    def _held(self) -> set[int]:
        """The tensors of blocks that are not computed again: those that leave their block or the step, those of
        :meth:`_is_kept`, and what all of them are views of."""
        graph = self.graph
        results = {graph.loss, *graph.updates, *(o.tensor for o in graph.outputs)}
        held = {
            tensor
            for tensor in self.block_of
            if tensor in results
            or tensor in self.blocks[self.block_of[tensor]].held
            or self._is_kept(graph.producer(tensor), tensor)
            or any(self._is_outside(reader, tensor) for reader in graph.consumers.get(tensor, ()))
        }
        for tensor in sorted(held, key=graph.producers.__getitem__, reverse=True):
            while is_view(graph.producer(tensor)):
                tensor = graph.producer(tensor).inputs[0]
                if tensor in held or tensor not in self.block_of:
                    break
                held.add(tensor)
        return held

    def _is_kept(self, producer: Instruction, tensor: int) -> bool:
        """Whether what an instruction makes is held for what it is: random, decided, or small."""
        if is_random(producer):
            dropped = producer.op == _DROPOUT and tensor == producer.outputs[0]
            return not dropped or producer.outputs[1] < 0
        if is_view(producer):
            return False
        made, read = self.graph.tensors[tensor], [self.graph.tensors[t] for t in producer.inputs]
        decided = _is_integer(made) and any(_is_floating(t) for t in read)
        return decided or made.nbytes <= _SMALL * max((t.nbytes for t in read), default=0)

    def _is_outside(self, reader: int, tensor: int) -> bool:
        """Whether an instruction of the forward stands outside of the block that makes a tensor."""
        instruction = self.graph.instructions[reader]
        home = self.block_of[tensor]
        return instruction.phase == "forward" and all(
            self.block_of.get(t) != home for t in instruction.outputs if t >= 0
        )

    def _after_tangent(self) -> set[int]:
        """The instructions that depend on the loss's incoming gradient."""
        graph, there = self.graph, {self.graph.tangent}
        after: set[int] = set()
        for instruction in graph.instructions:
            if not there.isdisjoint(instruction.inputs):
                after.add(instruction.id)
                there.update(t for t in instruction.outputs if t >= 0)
        return after

    def _is_missing(self, tensor: int) -> bool:
        """Whether a tensor has to be made before the backward can read it."""
        if tensor in self.copies:
            return False
        return (tensor in self.block_of and tensor not in self.held) or self.graph.producers[
            tensor
        ] in self.put_off

    def _needed(self, instruction: Instruction) -> Iterator[Instruction]:
        """The instructions that have to be made for one of the backward, in order."""
        graph = self.graph
        found: set[int] = set()
        stack = list(instruction.inputs)
        while stack:
            tensor = stack.pop()
            if self._is_missing(tensor) and (producer := graph.producers[tensor]) not in found:
                found.add(producer)
                stack += self._read_by_copy(graph.instructions[producer])
        return (graph.instructions[i] for i in sorted(found))

    def _read_by_copy(self, instruction: Instruction) -> tuple[int, ...]:
        if instruction.phase == "forward" and instruction.op == _DROPOUT:
            return instruction.inputs[0], instruction.outputs[1]
        return instruction.inputs

    def _make(self, instruction: Instruction) -> None:
        """Make what was put off, or a copy of an instruction of the forward."""
        if instruction.phase == "backward":
            self.put_off.discard(instruction.id)
            self._emit(instruction.reading(self.copies))
            return
        if instruction.op == _DROPOUT:
            instruction = _dropped_again(instruction)
        read = instruction.reading(self.copies)
        outputs = tuple(self._copy(t) if t >= 0 else -1 for t in instruction.outputs)
        name = f"{instruction.name} {AGAIN}"
        self._emit(replace(read, name=name, outputs=outputs, phase="backward"))

    def _copy(self, tensor: int) -> int:
        source = self.graph.tensors[tensor]
        copy = len(self.tensors)
        self.tensors.append(Tensor(copy, f"{source.name} {AGAIN}", source.shape, source.dtype))
        if tensor not in self.held:
            self.copies[tensor] = copy
        return copy

    def _emit(self, instruction: Instruction) -> None:
        self.out.append(replace(instruction, id=len(self.out)))

    def _recomputed(self) -> Iterator[Recomputed]:
        """Each block with what of it is computed again."""
        for number, block in enumerate(self.blocks):
            pairs = tuple((t, c) for t, c in sorted(self.copies.items()) if self.block_of[t] == number)
            if pairs:
                yield Recomputed(block.name, pairs)


def _dropped_again(dropout: Instruction) -> Instruction:
    """A dropout's product with the mask that it has drawn."""
    p: Any = dropout.args[1] if len(dropout.args) > 1 else dict(dropout.kwargs)["p"]
    value, mask = dropout.inputs[0], dropout.outputs[1]
    scale = 0.0 if p == 1 else 1.0 / (1.0 - p)
    args: tuple[Any, ...] = (Ref(value), Ref(mask), scale)
    inputs, outputs = (value, mask), dropout.outputs[:1]
    return replace(dropout, op=_MASKED, args=args, kwargs=(), inputs=inputs, outputs=outputs)


def _is_integer(tensor: Tensor) -> bool:
    return tensor.dtype.startswith(("int", "uint"))


def _is_floating(tensor: Tensor) -> bool:
    return tensor.dtype.startswith(("float", "bfloat"))


def is_view(instruction: Instruction) -> bool:
    """Whether what an instruction makes has the memory of its first input."""
    if instruction.is_source or instruction.op.startswith("hetspmd.") or len(instruction.outputs) != 1:
        return False
    op: Any = torch_op(instruction.op)
    return instruction.op == "aten._unsafe_view.default" or op._schema.returns[0].alias_info is not None
