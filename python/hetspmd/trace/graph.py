"""The single-device training step as data: reference tensors, instructions and their roles.

A :class:`Graph` is immutable and independent of torch objects: dtypes are names, devices are the marker
:data:`DEVICE`, tensors in arguments are :class:`Ref`. All later stages read it, and plan files store it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, Literal

from hetspmd.codec.records import LEFT_OUT
from hetspmd.trace.host.facts import Host

Phase = Literal["forward", "backward"]

PARAMETER: Final = "hetspmd.parameter"
BUFFER: Final = "hetspmd.buffer"
INPUT: Final = "hetspmd.input"
TANGENT: Final = "hetspmd.tangent"
CONSTANT: Final = "hetspmd.constant"
SECOND_READ: Final = "aten.alias.default"
"""How the backward reads a parameter that the forward has read (:mod:`hetspmd.trace.second_reads`)."""
REBALANCE: Final = "hetspmd.rebalance.default"
"""The copy of a tensor for another segment, to whose lengths it moves (:mod:`hetspmd.trace.cuts`), and of a
parameter that is stored in lengths of its own (:mod:`hetspmd.trace.storage_axes`)."""
STORED: Final = "stored"
"""The keyword by which a parameter's source names the dim that is stored in lengths of its own."""
SOURCES: Final = (PARAMETER, BUFFER, INPUT, TANGENT, CONSTANT)


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference tensor inside an instruction's arguments, by tensor id."""

    id: int


@dataclass(frozen=True, slots=True)
class DType:
    """A torch dtype inside arguments, by name (``float32``)."""

    name: str


@dataclass(frozen=True, slots=True)
class Marker:
    """A torch object without state inside arguments: device, layout or memory format."""

    kind: Literal["device", "layout", "memory_format"]
    name: str


DEVICE: Final = Marker("device", "")

Argument = Any
"""None, bool, int, float, complex, str, Ref, DType, Marker, or a tuple of Arguments."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A reference tensor e of the single-device program."""

    id: int
    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        n = 1
        for extent in self.shape:
            n *= extent
        return n

    @property
    def nbytes(self) -> int:
        return self.numel * ITEM_SIZES[self.dtype]

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.shape))}]"


ITEM_SIZES: Final[dict[str, int]] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "complex64": 8, "complex128": 16,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "uint16": 2, "uint32": 4,
    "uint64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1, "complex32": 4,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of the single-device program.

    ``inputs`` lists the tensor ids in ``args`` and ``kwargs`` in order of appearance (a tensor that
    appears twice is listed twice); ``outputs`` the tensor ids it produces, -1 where an op returns None.
    """

    id: int
    name: str
    op: str
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    phase: Phase = "forward"
    source: str = ""

    @property
    def is_source(self) -> bool:
        return self.op in SOURCES

    def reading(self, others: Mapping[int, int]) -> Instruction:
        """The instruction with ``others`` in the place of the tensors that it reads, for those that have one."""
        if others.keys().isdisjoint(self.inputs):
            return self

        def changed(reference: Ref) -> Argument:
            return Ref(others.get(reference.id, reference.id))

        return replace(
            self,
            args=tuple(map_refs(a, changed) for a in self.args),
            kwargs=tuple((k, map_refs(a, changed)) for k, a in self.kwargs),
            inputs=tuple(others.get(t, t) for t in self.inputs),
        )


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter: ``names`` has more than one entry when it is tied; ``gradient`` is a tensor id or None.
    ``updated`` is the tensor id of the value that the forward leaves in it, or None if it writes none."""

    names: tuple[str, ...]
    tensor: int
    gradient: int | None
    requires_grad: bool
    updated: int | None = None

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer: ``updated`` is the tensor id of its value after the step, or None if never written."""

    names: tuple[str, ...]
    tensor: int
    updated: int | None

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor of the example batch; ``path`` names it (``input_ids`` or ``args[0]``); ``leaf`` is its
    position among the flattened ``(args, kwargs)``."""

    path: str
    leaf: int
    tensor: int


@dataclass(frozen=True, slots=True)
class Static:
    """A leaf of the example batch that is no tensor; it is part of the graph, and another value needs
    another plan."""

    path: str
    leaf: int
    value: bool | int | float | str | None


@dataclass(frozen=True, slots=True)
class Constant:
    """A tensor that depends on no parameter, input or randomness.

    Either the result of running ``program`` (instructions that read only each other and data), or
    ``data``: raw little-endian bytes (base64) of the tensor.
    """

    tensor: int
    program: tuple[Instruction, ...] = ()
    data: str | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """A leaf of the model's flattened output: a tensor, which may be ``detached`` in a step that has gradients, or
    a value that is no tensor."""

    tensor: int | None
    value: bool | int | float | str | None = None
    detached: bool = field(default=False, metadata=LEFT_OUT)


@dataclass(frozen=True, slots=True)
class Recomputed:
    """A block of the forward that the backward computes again: its name, and each tensor's id with its copy's."""

    block: str
    tensors: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Graph:
    """The joint graph: forward, loss and backward, in execution order.

    ``tensors[i].id == i`` and ``instructions[i].id == i``; constants' private tensors have ids too.
    ``loss`` is the tensor id of the scalar loss (None: forward only); ``tangent`` its incoming gradient.
    ``input_spec`` (of ``(args, kwargs)``) and ``output_spec`` are pytree specs in torch's text form.
    ``segments[i]`` is the segment of instruction i (HAP 5.2); () where all are in one. ``autocast`` is the
    dtype of the ``torch.autocast`` under which the step was traced, "" without. ``host`` is what Python does
    beside it; ``left_behind`` are tensors that the model is left with, which depend on no parameter, input
    or randomness. Outputs beyond those of ``output_spec`` are what ``host`` writes; ``recomputed`` is what the
    backward computes again.
    """

    tensors: tuple[Tensor, ...]
    instructions: tuple[Instruction, ...]
    parameters: tuple[Parameter, ...]
    buffers: tuple[Buffer, ...]
    inputs: tuple[Input, ...]
    statics: tuple[Static, ...]
    constants: tuple[Constant, ...]
    outputs: tuple[Output, ...]
    loss: int | None
    tangent: int | None
    input_spec: str
    output_spec: str
    training: bool = True
    segments: tuple[int, ...] = ()
    autocast: str = ""
    host: Host = field(default_factory=Host)
    left_behind: tuple[Constant, ...] = ()
    recomputed: tuple[Recomputed, ...] = ()

    @property
    def segment_count(self) -> int:
        """How many segments there are."""
        return max(self.segments, default=0) + 1

    def segment(self, tensor: int) -> int:
        """The segment of a tensor: that of its producer; 0 for a constant's private tensor."""
        producer = self.producers.get(tensor)
        return self.segments[producer] if self.segments and producer is not None else 0

    def producer(self, tensor: int) -> Instruction:
        """The instruction that produces a tensor."""
        return self.instructions[self.producers[tensor]]

    @cached_property
    def producers(self) -> dict[int, int]:
        """Tensor id to the id of its producing instruction."""
        return {t: i.id for i in self.instructions for t in i.outputs if t >= 0}

    @cached_property
    def consumers(self) -> dict[int, tuple[int, ...]]:
        """Tensor id to the ids of the instructions that read it."""
        lists: dict[int, list[int]] = {}
        for instruction in self.instructions:
            for t in dict.fromkeys(instruction.inputs):
                lists.setdefault(t, []).append(instruction.id)
        return {t: tuple(ids) for t, ids in lists.items()}

    @cached_property
    def sources(self) -> frozenset[int]:
        """The ids of the instructions that are sources."""
        return frozenset(i.id for i in self.instructions if i.is_source)

    @cached_property
    def second_reads(self) -> dict[int, int]:
        """Instruction id to the tensor id of the parameter that it reads again: in the backward, of a
        parameter that the forward reads. A model's own views are no second readings."""
        forward = {
            p.tensor
            for p in self.parameters
            if any(self.instructions[r].phase == "forward" for r in self.consumers.get(p.tensor, ()))
        }
        return {
            i.id: i.inputs[0]
            for i in self.instructions
            if i.op == SECOND_READ and i.phase == "backward" and i.inputs[0] in forward
        }

    @cached_property
    def parameter_of(self) -> dict[int, int]:
        """Tensor id of a parameter, or of what is made of one parameter alone, to that of the parameter."""
        of = {p.tensor: p.tensor for p in self.parameters}
        for instruction in self.instructions:
            if len(read := {of.get(t, -1) for t in instruction.inputs}) == 1 and -1 not in read:
                of.update(dict.fromkeys([t for t in instruction.outputs if t >= 0], read.pop()))
        return of

    @property
    def updates(self) -> tuple[int, ...]:
        """Tensor ids of the values that the forward leaves in buffers and, behind them, in parameters."""
        return tuple(h.updated for h in self.holders if h.updated is not None)

    @property
    def holders(self) -> tuple[Buffer | Parameter, ...]:
        """The buffers and, behind them, the parameters."""
        return (*self.buffers, *self.parameters)

    @cached_property
    def stored_apart(self) -> dict[int, int]:
        """The tensor id of each parameter that is stored in lengths of its own to the dim so divided."""
        return {
            i.outputs[0]: dim
            for i in self.instructions
            if i.op == PARAMETER
            for name, dim in i.kwargs
            if name == STORED
        }

    def filled_outputs(self, values: Mapping[int, Any]) -> list[Any]:
        """The leaves of the model's output, with ``values`` of its tensors, which know ``detach()``."""
        tensors: list[Any] = [o.value if o.tensor is None else values[o.tensor] for o in self.outputs]
        return [t.detach() if o.detached else t for o, t in zip(self.outputs, tensors, strict=True)]

    def without_outputs(self) -> Graph:
        """The graph with its outputs other than the loss forgotten, and what only they needed removed."""
        return self.with_outputs(
            tuple(o if o.tensor in (None, self.loss) else Output(None) for o in self.outputs)
        )

    def with_outputs(self, outputs: tuple[Output, ...]) -> Graph:
        """The graph with these of its outputs, and without what only the others needed."""
        wanted: set[int | None] = {o.tensor for o in outputs}
        wanted |= {self.loss, *(p.gradient for p in self.parameters), *self.updates}
        keep: set[int] = set()
        for instruction in reversed(self.instructions):
            if instruction.is_source or any(t in wanted for t in instruction.outputs):
                keep.add(instruction.id)
                wanted.update(instruction.inputs)
        instructions = tuple(
            replace(i, id=n) for n, i in enumerate(j for j in self.instructions if j.id in keep)
        )
        segments = tuple(s for j, s in zip(self.instructions, self.segments, strict=False) if j.id in keep)
        made = {t for i in instructions for t in i.outputs}
        recomputed = (
            replace(block, tensors=tuple(pair for pair in block.tensors if made.issuperset(pair)))
            for block in self.recomputed
        )
        return replace(
            self,
            instructions=instructions,
            outputs=outputs,
            segments=segments,
            recomputed=tuple(block for block in recomputed if block.tensors),
        )

    def __str__(self) -> str:
        return "\n".join(instruction_text(self, i) for i in self.instructions)


def refs(value: Argument) -> Iterator[int]:
    """Tensor ids in an argument, in order of appearance."""
    if isinstance(value, Ref):
        yield value.id
    elif isinstance(value, tuple):
        for item in value:
            yield from refs(item)


def map_refs(value: Argument, replace: Callable[[Ref], Any]) -> Any:
    """The argument with each Ref replaced; tuples stay tuples."""
    if isinstance(value, Ref):
        return replace(value)
    if isinstance(value, tuple):
        return tuple(map_refs(item, replace) for item in value)
    return value


def value_text(value: Argument, name: Callable[[int], str]) -> str:
    """An argument as people read it, with ``name`` of each tensor's id."""
    if isinstance(value, Ref):
        return name(value.id)
    if isinstance(value, DType):
        return value.name
    if isinstance(value, Marker):
        return value.name or value.kind
    if isinstance(value, tuple):
        return "[" + ", ".join(value_text(v, name) for v in value) + "]"
    return repr(value)


def instruction_text(graph: Graph, instruction: Instruction) -> str:
    """``e3: float32[8, 16] = aten.mm.default(e1, e2)``."""
    outs = ", ".join(str(graph.tensors[t]) if t >= 0 else "_" for t in instruction.outputs)
    arguments = [*(("", a) for a in instruction.args), *((f"{k}=", v) for k, v in instruction.kwargs)]
    parts = [key + value_text(value, lambda t: graph.tensors[t].name) for key, value in arguments]
    return f"{outs} = {instruction.op}({', '.join(parts)})"
