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
- A block inside of another one is computed again by that one's run, and once more by its own when the backward
  comes to it. Of the outer run only what enters and leaves the inner blocks is held meanwhile. What has three
  blocks around it has three copies at most, and fewer where nothing reads what an outer run makes.
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
    """The graph in which the backward computes these blocks again: what lies in several, one inside of the other,
    once for each. Of blocks that overlap otherwise the first counts.

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
    """A *run* computes what a block contains: run 0 is the forward, run n that of the n-th of the blocks around an
    instruction, counted from the outermost."""

    graph: Graph
    blocks: Sequence[Block]
    tensors: list[Tensor] = field(init=False)
    out: list[Instruction] = field(default_factory=list)
    copies: dict[tuple[int, int], int] = field(default_factory=dict)
    """Of each tensor and run of it but the forward the copy that the run makes."""

    def __post_init__(self) -> None:
        graph = self.graph
        self.tensors = list(graph.tensors)
        self.blocks = _laminar([self._of_forward(block) for block in self.blocks])
        self.around: dict[int, list[int]] = {}
        """Of each tensor the blocks that it is in, from the outermost."""
        for number, block in sorted(enumerate(self.blocks), key=lambda pair: -len(pair[1].tensors)):
            for tensor in block.tensors:
                self.around.setdefault(tensor, []).append(number)
        self.last = self._last_runs()
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
            for each, number in needed:
                self._make(each, number)
            self._emit(self._reading(instruction))
        return replace(
            graph,
            tensors=tuple(self.tensors),
            instructions=tuple(self.out),
            recomputed=(*graph.recomputed, *self._recomputed()),
        )

    def _of_forward(self, block: Block) -> Block:
        return replace(block, tensors=frozenset(filter(self._is_forward, block.tensors)))

    def _is_forward(self, tensor: int) -> bool:
        producer = self.graph.producers.get(tensor)  # a constant's private tensors have none
        instruction = None if producer is None else self.graph.instructions[producer]
        return instruction is not None and instruction.phase == "forward" and not instruction.is_source

    def _last_runs(self) -> dict[int, int]:
        """Of each tensor of the blocks the run whose result the backward reads: that of the innermost block that it
        does not leave. It is run 0 for what leaves the step and for what :meth:`_is_kept` says, and what is held as
        a view is held as a whole."""
        graph = self.graph
        results = {graph.loss, *graph.updates, *(o.tensor for o in graph.outputs)}
        last: dict[int, int] = {}
        for tensor in sorted(self.around, key=graph.producers.__getitem__, reverse=True):
            around = self.around[tensor]
            producer, readers = graph.producer(tensor), graph.consumers.get(tensor, ())
            if tensor in results or self._is_kept(producer, tensor):
                last[tensor] = 0
            else:
                runs = [len(around), *(self._common(reader, tensor) for reader in readers)]
                runs += (n for n, block in enumerate(around) if tensor in self.blocks[block].held)
                runs += (last[view] for reader in readers for view in self._views(reader, tensor))
                last[tensor] = min(runs)
        return last

    def _views(self, reader: int, tensor: int) -> Iterator[int]:
        """What an instruction makes of a tensor in blocks that is a view of it, and in blocks itself."""
        instruction = self.graph.instructions[reader]
        if is_view(instruction) and instruction.inputs[0] == tensor and instruction.outputs[0] in self.around:
            yield instruction.outputs[0]

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

    def _common(self, reader: int, tensor: int) -> int:
        """How many of the blocks around a tensor are around an instruction of the forward that reads it, too."""
        instruction, around = self.graph.instructions[reader], self.around[tensor]
        if instruction.phase != "forward":
            return len(around)
        of = (self.around.get(t, ()) for t in instruction.outputs if t >= 0)
        return max((len(set(around).intersection(blocks)) for blocks in of), default=0)

    def _after_tangent(self) -> set[int]:
        """The instructions that depend on the loss's incoming gradient."""
        graph, there = self.graph, {self.graph.tangent}
        after: set[int] = set()
        for instruction in graph.instructions:
            if not there.isdisjoint(instruction.inputs):
                after.add(instruction.id)
                there.update(t for t in instruction.outputs if t >= 0)
        return after

    def _run_read(self, tensor: int, number: int) -> int:
        """The run that makes what run ``number`` of an instruction reads of a tensor."""
        return min(number, self.last.get(tensor, 0))

    def _is_missing(self, tensor: int, number: int) -> bool:
        """Whether what a run makes of a tensor has to be made before it can be read."""
        if number:
            return (tensor, number) not in self.copies
        return self.graph.producers[tensor] in self.put_off

    def _needed(self, instruction: Instruction) -> Iterator[tuple[Instruction, int]]:
        """The instructions that have to be made for one of the backward, with their runs, in order: a run reads
        what earlier ones have made."""
        graph, every = self.graph, len(self.blocks)
        found: set[tuple[bool, int, int]] = set()
        stack = [(tensor, every) for tensor in instruction.inputs]
        while stack:
            tensor, reader = stack.pop()
            number, producer = self._run_read(tensor, reader), graph.producers[tensor]
            made = producer in self.put_off, number, producer
            if self._is_missing(tensor, number) and made not in found:
                found.add(made)
                own = every if producer in self.put_off else number
                stack += [(t, own) for t in self._read_by_copy(graph.instructions[producer])]
        return ((graph.instructions[producer], number) for _, number, producer in sorted(found))

    def _read_by_copy(self, instruction: Instruction) -> tuple[int, ...]:
        if instruction.phase == "forward" and instruction.op == _DROPOUT:
            return instruction.inputs[0], instruction.outputs[1]
        return instruction.inputs

    def _make(self, instruction: Instruction, number: int) -> None:
        """Make what was put off, or in a run a copy of an instruction of the forward."""
        if instruction.phase == "backward":
            self.put_off.discard(instruction.id)
            self._emit(self._reading(instruction))
            return
        if instruction.op == _DROPOUT:
            instruction = _dropped_again(instruction)
        read = self._reading(instruction, number)
        outputs = tuple(self._copy(t, number) if t >= 0 else -1 for t in instruction.outputs)
        self._emit(replace(read, name=_again(instruction.name, number), outputs=outputs, phase="backward"))

    def _reading(self, instruction: Instruction, number: int | None = None) -> Instruction:
        """A run of an instruction; without a number one of the backward, which reads what the last runs make."""
        runs = {
            t: self._run_read(t, len(self.blocks) if number is None else number) for t in instruction.inputs
        }
        return instruction.reading({t: self.copies[t, run] for t, run in runs.items() if run})

    def _copy(self, tensor: int, number: int) -> int:
        source = self.graph.tensors[tensor]
        copy = len(self.tensors)
        self.tensors.append(Tensor(copy, _again(source.name, number), source.shape, source.dtype))
        if number <= self.last.get(tensor, 0):
            self.copies[tensor, number] = copy
        return copy

    def _emit(self, instruction: Instruction) -> None:
        self.out.append(replace(instruction, id=len(self.out)))

    def _recomputed(self) -> Iterator[Recomputed]:
        """Each block with what its run makes."""
        made: dict[int, list[tuple[int, int]]] = {}
        for (tensor, number), copy in sorted(self.copies.items()):
            made.setdefault(self.around[tensor][number - 1], []).append((tensor, copy))
        for block, pairs in sorted(made.items()):
            yield Recomputed(self.blocks[block].name, tuple(pairs))


def _laminar(blocks: Sequence[Block]) -> list[Block]:
    """The blocks, of which two either lie one in the other or have nothing in common: of what is in two others the
    first counts."""
    apart: list[Block] = []
    for block in blocks:
        tensors = block.tensors
        for other in apart:
            if not (tensors < other.tensors or other.tensors < tensors):
                tensors -= other.tensors
        apart.append(replace(block, tensors=tensors))
    return apart


def _again(name: str, number: int) -> str:
    """The name of what a run makes again."""
    return f"{name} {AGAIN}" if number == 1 else f"{name} {AGAIN} {number}"


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
