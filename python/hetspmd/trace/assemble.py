"""From the draft to the immutable :class:`~hetspmd.trace.graph.Graph`: liveness, folding, numbering.

What depends on no parameter, input or randomness is folded to a constant: the constant keeps the small
program that computes it, not its value, so that a plan stays small. Calls that only create a tensor (zeros,
arange) stay instructions: every device makes its own part. Random bits are never folded.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hetspmd.errors import TraceError
from hetspmd.trace.compat.roles import InputRole, OutputRole
from hetspmd.trace.flat_bytes import flat_bytes
from hetspmd.trace.graph import (
    BUFFER,
    CONSTANT,
    INPUT,
    ITEM_SIZES,
    PARAMETER,
    TANGENT,
    Argument,
    Buffer,
    Constant,
    Graph,
    Input,
    Instruction,
    Output,
    Parameter,
    Phase,
    Ref,
    Static,
    Tensor,
    refs,
)
from hetspmd.trace.importer import Draft, DraftInstruction, Hole, Value, instruction_inputs

_CREATION = frozenset(
    {"full", "zeros", "ones", "empty", "arange", "scalar_tensor", "eye", "linspace", "empty_strided"}
)
_LARGEST_FOLDED = 256 * 2**20
"""Bytes of a constant that a plan holds; a larger one is computed in every step, where it can be sharded."""

_LARGEST_DATA = 64 * 2**20
"""Bytes of a plain tensor attribute that a plan may hold: its file has them as text."""


@dataclass(frozen=True)
class Naming:
    """Names and facts from outside the graph: ``parameters`` and ``buffers`` map a traced name to all names
    (tied ones); ``trainable`` holds the names that require a gradient; ``input_paths`` and ``input_leaves``
    are in the order of the traced inputs. ``updates`` maps returned tensors that are new values of parameters and
    buffers, by index, to their names; ``changed`` the positions of inputs that are written to, to the lines that
    do so."""

    parameters: Mapping[str, tuple[str, ...]]
    buffers: Mapping[str, tuple[str, ...]]
    trainable: frozenset[str]
    input_paths: Sequence[str]
    input_leaves: Sequence[int]
    statics: tuple[Static, ...]
    slots: Sequence[tuple[int | None, Any]]
    detached: Collection[int]
    updates: Mapping[int, str]
    changed: Mapping[int, str]
    has_loss: bool
    input_spec: str
    output_spec: str
    training: bool


def assemble(
    draft: Draft, inputs: Sequence[InputRole], outputs: Sequence[OutputRole], naming: Naming
) -> tuple[Graph, dict[int, frozenset[int]]]:
    """Number the draft. With it come the ids of the tensors that each region of torch.utils.checkpoint makes, by
    its number, without those of regions in it. Raises TraceError for roles that cannot be kept (a mutated
    input)."""
    assembler = _Assembler(draft, inputs, outputs, naming)
    return assembler.run(), assembler.regions()


@dataclass
class _Assembler:
    draft: Draft
    inputs: Sequence[InputRole]
    outputs: Sequence[OutputRole]
    naming: Naming
    tensors: list[Tensor] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    ids: dict[Value, int] = field(default_factory=dict)

    def run(self) -> Graph:
        returned, gradients, updated = self._results()
        by_output = {v: i for i in self.draft.instructions for v in i.outputs if v is not None}
        live = self._live(by_output)
        varying = self._varying()
        instructions = [i for i in self.draft.instructions if id(i) in live]
        needed = {v for i in instructions if id(i) in varying for v in instruction_inputs(i)}
        needed |= {v for v in self.draft.results if v is not None}
        folded = [
            v
            for i in instructions
            if id(i) not in varying and i.op.split(".")[1] not in _CREATION
            for v in i.outputs
            if v in needed and self._nbytes(v) <= _LARGEST_FOLDED
        ]
        constant_values = [*(v for v in self.draft.data if v in needed), *folded]

        parameters, buffers, batch, tangent = self._sources()
        for value in constant_values:
            many = value in by_output and len(by_output[value].outputs) > 1
            self._source(CONSTANT, value, f"{value[0].name}.{value[1]}" if many else value[0].name)
        wanted = self._needed_after_folding(set(constant_values), by_output)
        forward = self._ancestors([*returned, *updated.values()], by_output)
        for instruction in instructions:
            if id(instruction) in wanted:
                phase: Phase = "forward" if id(instruction) in forward else "backward"
                self._append(instruction, phase)
        constants = tuple(self._constant(v, by_output) for v in constant_values)
        graph_parameters = tuple(
            Parameter(
                p.names,
                p.tensor,
                self._id(gradients.get(p.name)),
                p.requires_grad,
                self._id(updated.get(p.name)),
            )
            for p in parameters
        )
        graph_buffers = tuple(Buffer(b.names, b.tensor, self._id(updated.get(b.name))) for b in buffers)
        leaves = tuple(
            Output(None, value)
            if slot is None
            else Output(self._id(returned[slot]), detached=place in self.naming.detached)
            for place, (slot, value) in enumerate(self.naming.slots)
        )
        loss = self._id(returned[0]) if self.naming.has_loss else None
        return Graph(
            tuple(self.tensors), tuple(self.instructions), graph_parameters, graph_buffers, tuple(batch),
            self.naming.statics, constants, leaves, loss, tangent, self.naming.input_spec,
            self.naming.output_spec, self.naming.training,
        )  # fmt: skip

    def regions(self) -> dict[int, frozenset[int]]:
        """The tensors of each region, by its number, without those of regions in it."""
        regions: dict[int, set[int]] = {}
        for instruction in self.draft.instructions:
            if instruction.region is not None:
                made = regions.setdefault(instruction.region, set())
                made.update(self.ids[v] for v in instruction.outputs if v in self.ids)
        return {number: frozenset(made) for number, made in sorted(regions.items()) if made}

    def _sources(self) -> tuple[list[Parameter], list[Buffer], list[Input], int | None]:
        """What the graph is given, by its placeholders: parameters, buffers, the batch, the tangent."""
        parameters: list[Parameter] = []
        buffers: list[Buffer] = []
        batch: list[Input] = []
        tangent: int | None = None
        for value, role in zip(self.draft.placeholders, self.inputs, strict=True):
            if role.kind == "parameter":
                names = self.naming.parameters[role.name]
                t = self._source(PARAMETER, value, names[0])
                parameters.append(Parameter(names, t, None, role.name in self.naming.trainable))
            elif role.kind == "buffer":
                names = self.naming.buffers[role.name]
                buffers.append(Buffer(names, self._source(BUFFER, value, names[0]), None))
            elif role.kind == "input":
                path = self.naming.input_paths[role.index]
                t = self._source(INPUT, value, path)
                batch.append(Input(path, self.naming.input_leaves[role.index], t))
            elif role.kind == "tangent":
                tangent = self._source(TANGENT, value, "tangent")
            else:
                raise TraceError(f"the traced graph has an input of an unknown kind: {role.name}")
        return parameters, buffers, batch, tangent

    def _results(self) -> tuple[list[Value], dict[str, Value], dict[str, Value]]:
        """Returned values by index, gradients, and updated buffers and parameters by (first) name."""
        returned: dict[int, Value] = {}
        gradients: dict[str, Value] = {}
        updated: dict[str, Value] = {}
        assignments: dict[str, Value] = {}
        for value, role in zip(self.draft.results, self.outputs, strict=True):
            if role.kind == "output" and value is not None:
                if (name := self.naming.updates.get(role.index)) is not None:
                    assignments[self._first(name)] = value
                else:
                    returned[role.index] = value
            elif role.kind == "gradient":
                if value is not None:
                    gradients[self.naming.parameters[role.name][0]] = value
            elif role.kind in ("buffer_mutation", "parameter_mutation") and value is not None:
                updated[self._first(role.name)] = value
            elif role.kind == "input_mutation":
                line = self.naming.changed.get(role.index)
                path = self.naming.input_paths[role.index]
                raise TraceError(
                    f"the model changes input {path} in place{f' at {line}' if line else ''}; a batch is not the "
                    f"model's to change: write to a copy, such as x = x.clone()"
                )
            elif value is not None and role.kind != "input_gradient":
                raise TraceError(f"the traced graph has an output of an unknown kind: {role.name}")
        return [returned[i] for i in sorted(returned)], gradients, updated | assignments

    def _first(self, name: str) -> str:
        """The first name, in the model, of the parameter or buffer that is traced under ``name``."""
        names = self.naming.buffers if name in self.naming.buffers else self.naming.parameters
        return names[name][0]

    def _live(self, by_output: Mapping[Value, DraftInstruction]) -> set[int]:
        wanted = [
            v
            for v, role in zip(self.draft.results, self.outputs, strict=True)
            if v is not None and role.kind != "input_gradient"
        ]
        return self._ancestors(wanted, by_output)

    def _ancestors(self, values: Sequence[Value], by_output: Mapping[Value, DraftInstruction]) -> set[int]:
        ancestors: set[int] = set()
        stack = list(values)
        while stack:
            instruction = by_output.get(stack.pop())
            if instruction is not None and id(instruction) not in ancestors:
                ancestors.add(id(instruction))
                stack.extend(instruction_inputs(instruction))
        return ancestors

    def _varying(self) -> set[int]:
        """Instructions that depend on a parameter, a buffer, the batch, the tangent or randomness."""
        values = set(self.draft.placeholders)
        varying: set[int] = set()
        for instruction in self.draft.instructions:
            if instruction.random or any(v in values for v in instruction_inputs(instruction)):
                varying.add(id(instruction))
                values.update(v for v in instruction.outputs if v is not None)
        return varying

    def _needed_after_folding(
        self, constants: set[Value], by_output: Mapping[Value, DraftInstruction]
    ) -> set[int]:
        needed: set[int] = set()
        stack = [
            v
            for v, role in zip(self.draft.results, self.outputs, strict=True)
            if v is not None and role.kind != "input_gradient"
        ]
        while stack:
            value = stack.pop()
            instruction = by_output.get(value)
            if value in constants or instruction is None or id(instruction) in needed:
                continue
            needed.add(id(instruction))
            stack.extend(instruction_inputs(instruction))
        return needed

    def _nbytes(self, value: Value) -> int:
        shape, dtype = self.draft.types[value]
        n = ITEM_SIZES[dtype]
        for extent in shape:
            n *= extent
        return n

    def _tensor(self, value: Value, name: str) -> int:
        shape, dtype = self.draft.types[value]
        self.ids[value] = len(self.tensors)
        self.tensors.append(Tensor(len(self.tensors), name, shape, dtype))
        return self.ids[value]

    def _source(self, op: str, value: Value, name: str) -> int:
        t = self._tensor(value, name)
        self.instructions.append(Instruction(len(self.instructions), name, op, (), (), (), (t,)))
        return t

    def _id(self, value: Value | None) -> int | None:
        return None if value is None else self.ids[value]

    def _build(
        self,
        draft: DraftInstruction,
        id_: int,
        ids: Mapping[Value, int],
        outputs: tuple[int, ...],
        phase: Phase,
    ) -> Instruction:
        def fill(value: Argument) -> Argument:
            if isinstance(value, Hole):
                return Ref(ids[value.value])
            return tuple(fill(v) for v in value) if isinstance(value, tuple) else value

        args = tuple(fill(a) for a in draft.args)
        kwargs = tuple((k, fill(v)) for k, v in draft.kwargs)
        inputs = tuple(refs(args)) + tuple(r for _, v in kwargs for r in refs(v))
        return Instruction(id_, draft.node.name, draft.op, args, kwargs, inputs, outputs, phase, draft.source)

    def _append(self, draft: DraftInstruction, phase: Phase) -> None:
        many = len(draft.outputs) > 1
        outputs = tuple(
            -1 if v is None else self._tensor(v, f"{draft.node.name}.{i}" if many else draft.node.name)
            for i, v in enumerate(draft.outputs)
        )
        self.instructions.append(self._build(draft, len(self.instructions), self.ids, outputs, phase))

    def _constant(self, value: Value, by_output: Mapping[Value, DraftInstruction]) -> Constant:
        tensor = self.ids[value]
        if value in self.draft.data:
            return Constant(tensor, data=_bytes_text(self.draft.data[value], value[0].name))
        wanted = self._ancestors([value], by_output)
        private: dict[Value, int] = {}
        program: list[Instruction] = []
        read = {v for i in self.draft.instructions if id(i) in wanted for v in instruction_inputs(i)}
        for source, data in self.draft.data.items():
            if source in read:
                program.append(self._embedded(source, data, private, len(program)))
        for instruction in self.draft.instructions:
            if id(instruction) not in wanted:
                continue
            outputs: list[int] = []
            for i, v in enumerate(instruction.outputs):
                if v is None:
                    outputs.append(-1)
                    continue
                if v == value:
                    private[v] = tensor
                else:
                    keep = self.ids.get(v)
                    private[v] = self._tensor(v, f"{tensor}:{instruction.node.name}.{i}")
                    if keep is not None:
                        self.ids[v] = keep
                outputs.append(private[v])
            program.append(self._build(instruction, len(program), private, tuple(outputs), "forward"))
        return Constant(tensor, tuple(program))

    def _embedded(self, value: Value, data: torch.Tensor, private: dict[Value, int], id_: int) -> Instruction:
        """Data that a constant's program reads, as a source with its bytes as the argument."""
        keep = self.ids.get(value)
        private[value] = self._tensor(value, value[0].name)
        if keep is not None:
            self.ids[value] = keep
        return Instruction(
            id_, value[0].name, CONSTANT, (_bytes_text(data, value[0].name),), (), (), (private[value],)
        )


def _bytes_text(tensor: torch.Tensor, name: str) -> str:
    if tensor.device.type == "meta":
        raise TraceError(
            f"{name} is a tensor attribute on the meta device without data; register it as a buffer, or build "
            "the model on a real device"
        )
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes > _LARGEST_DATA:
        raise TraceError(f"{name} is a plain tensor attribute of {nbytes} bytes; register it as a buffer")
    return base64.b64encode(bytes(flat_bytes(tensor).tolist())).decode()


def constant_data(text: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The tensor of a constant's ``data``, on the CPU."""
    raw = bytearray(base64.b64decode(text))
    if not raw:
        return torch.empty(list(shape), dtype=dtype)
    return torch.frombuffer(raw, dtype=dtype).reshape(list(shape)).clone()
