"""Whether a graph that was read from a file is one: ids, order, roles and the bytes of its constants.

What the ops are is the business of :mod:`hetspmd.plan.ops_check`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from typing import Any, Final

from hetspmd.errors import PlanError
from hetspmd.placement import DIMS
from hetspmd.plan.host_check import check_host
from hetspmd.trace.compat.trees import spec_from_text
from hetspmd.trace.graph import (
    BUFFER,
    CONSTANT,
    INPUT,
    ITEM_SIZES,
    PARAMETER,
    REBALANCE,
    STORED,
    TANGENT,
    Argument,
    Buffer,
    Constant,
    DType,
    Graph,
    Instruction,
    Marker,
    Parameter,
    Tensor,
    refs,
)

_LARGEST: Final = 2**62


def check_graph(graph: Graph) -> None:
    """Raise PlanError, naming the place, unless the graph is in order."""
    _Check(graph).run()


def _fail(where: str, problem: str) -> PlanError:
    return PlanError(f"the plan's graph is damaged: {where} {problem}; compile the plan again")


class _Check:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.producers: dict[int, Instruction] = {}

    def run(self) -> None:
        graph = self.graph
        for place, tensor in enumerate(graph.tensors):
            self._tensor(place, tensor)
        for place, instruction in enumerate(graph.instructions):
            self._instruction(place, instruction)
        self._sources()
        self._parameters()
        for constant in graph.constants:
            self._constant(constant)
        for constant in graph.left_behind:
            self._exists(constant.tensor, "what the model is left with")
            self._constant(constant, apart=True)
        check_host(graph)
        self._results()
        self._leaves()
        self._segments()
        self._recomputed()
        if graph.autocast and graph.autocast not in ITEM_SIZES:
            raise _fail("autocast", f"is {graph.autocast!r}, which is no dtype")

    def _tensor(self, place: int, tensor: Tensor) -> None:
        where = f"tensor {place}"
        if tensor.id != place:
            raise _fail(where, f"has the id {tensor.id}")
        if tensor.dtype not in ITEM_SIZES:
            raise _fail(where, f"has the dtype {tensor.dtype!r}, which there is not")
        if min(tensor.shape, default=0) < 0 or tensor.numel > _LARGEST:
            raise _fail(where, f"has the shape {list(tensor.shape)}")

    def _exists(self, tensor: int, where: str) -> Tensor:
        if not 0 <= tensor < len(self.graph.tensors):
            raise _fail(where, f"names tensor {tensor} of {len(self.graph.tensors)}")
        return self.graph.tensors[tensor]

    def _instruction(self, place: int, instruction: Instruction) -> None:
        where = f"instruction {place} ({instruction.name})"
        if instruction.id != place:
            raise _fail(where, f"has the id {instruction.id}")
        if instruction.is_source:
            self._source(instruction, where)
        for tensor in self._call(instruction, where):
            by = self.producers.get(tensor)
            if by is None:
                raise _fail(where, f"reads {self._exists(tensor, where).name} before it is there")
            if instruction.phase == "forward" and (by.phase != "forward" or by.op == TANGENT):
                raise _fail(where, f"is of the forward and reads {by.name}, which is of the backward")
        for tensor in self._outputs(instruction, where):
            if tensor in self.producers:
                raise _fail(where, f"makes {self.graph.tensors[tensor].name} a second time")
            self.producers[tensor] = instruction

    def _source(self, instruction: Instruction, where: str) -> None:
        """A source has no arguments; a parameter's may name the dim that is stored in lengths of its own."""
        kwargs, outputs = instruction.kwargs, instruction.outputs
        if instruction.args or instruction.inputs or len(outputs) != 1 or instruction.phase != "forward":
            raise _fail(where, "is a source that computes something")
        if kwargs:
            dims = range(min(len(self._exists(outputs[0], where).shape), DIMS))
            allowed = [((STORED, dim),) for dim in dims]
            if instruction.op != PARAMETER or kwargs not in allowed or isinstance(kwargs[0][1], bool):
                raise _fail(where, "is a source that is given what it does not take")

    def _call(self, instruction: Instruction, where: str) -> tuple[int, ...]:
        """What a call reads, which it must list as it names it."""
        named = (*refs(instruction.args), *(r for _, v in instruction.kwargs for r in refs(v)))
        if named != instruction.inputs:
            raise _fail(where, f"lists the inputs {list(instruction.inputs)} and has {list(named)}")
        for argument in _leaves((*instruction.args, *(v for _, v in instruction.kwargs))):
            if isinstance(argument, DType) and argument.name not in ITEM_SIZES:
                raise _fail(where, f"has the dtype {argument.name!r}, which there is not")
            if isinstance(argument, Marker) and argument.kind != "device" and not argument.name:
                raise _fail(where, f"has a {argument.kind} without a name")
        if instruction.op == REBALANCE and (len(instruction.inputs), len(instruction.outputs)) != (1, 1):
            raise _fail(where, "copies several tensors")
        return named

    def _outputs(self, instruction: Instruction, where: str) -> list[int]:
        outputs = [t for t in instruction.outputs if t != -1]
        for tensor in outputs:
            self._exists(tensor, where)
        if len(set(outputs)) != len(outputs):
            raise _fail(where, "makes a tensor twice")
        return outputs

    def _sources(self) -> None:
        graph = self.graph
        for op, what, tensors in (
            (PARAMETER, "parameters", [p.tensor for p in graph.parameters]),
            (BUFFER, "buffers", [b.tensor for b in graph.buffers]),
            (INPUT, "inputs", [i.tensor for i in graph.inputs]),
            (TANGENT, "tangents", [] if graph.tangent is None else [graph.tangent]),
            (CONSTANT, "constants", [c.tensor for c in graph.constants]),
        ):
            outputs = [i.outputs[0] for i in graph.instructions if i.op == op]
            if sorted(outputs) != sorted(tensors):
                raise _fail(f"the list of {what}", "has others than the instructions that read them")

    def _parameters(self) -> None:
        seen: set[str] = set()
        everything: list[Parameter | Buffer] = [*self.graph.parameters, *self.graph.buffers]
        for named in everything:
            if not named.names or not all(named.names) or not seen.isdisjoint(named.names):
                raise _fail(f"a tensor called {list(named.names)}", "has no name, or another one's")
            seen.update(named.names)
            if len(set(named.names)) != len(named.names):
                raise _fail(named.name, "has one name twice")
        for p in self.graph.parameters:
            if p.gradient is not None:
                self._alike(f"the gradient of {p.name}", p.gradient, p.tensor)
                if not p.requires_grad:
                    raise _fail(p.name, "has a gradient and requires none")
                if self.graph.loss is None or self.graph.tangent is None or not self.graph.training:
                    raise _fail(p.name, "has a gradient, and there is no loss or no backward")
        for b in self.graph.buffers:
            if b.updated is not None:
                self._alike(f"the new value of {b.name}", b.updated, b.tensor)
                self._forward(f"the new value of {b.name}", b.updated)

    def _alike(self, where: str, tensor: int, of: int) -> None:
        actual, like = self._exists(tensor, where), self._exists(of, where)
        if (actual.shape, actual.dtype) != (like.shape, like.dtype):
            raise _fail(where, f"is {actual}, not {like}")

    def _forward(self, where: str, tensor: int) -> None:
        by = self.producers.get(tensor)
        if by is None or by.phase != "forward" or by.op == TANGENT:
            raise _fail(where, f"is {self._exists(tensor, where).name}, which the forward does not make")

    def _constant(self, constant: Constant, *, apart: bool = False) -> None:
        """``apart``: its program has the tensors of the graph's own instructions."""
        tensor = self.graph.tensors[constant.tensor]
        where = f"constant {tensor.name}"
        if (constant.data is None) != bool(constant.program):
            raise _fail(where, "has not one of data and program")
        if constant.data is not None:
            self._data(where, tensor, constant.data)
            return
        there: set[int] = set()
        for place, instruction in enumerate(constant.program):
            at = f"{where}, instruction {place} ({instruction.name})"
            if instruction.id != place:
                raise _fail(at, f"has the id {instruction.id}")
            outputs = self._outputs(instruction, at)
            if instruction.op == CONSTANT:
                text = instruction.args[0] if len(instruction.args) == 1 else None
                if not isinstance(text, str) or instruction.kwargs or len(outputs) != 1:
                    raise _fail(at, "is no data")
                self._data(at, self.graph.tensors[outputs[0]], text)
            elif instruction.is_source:
                raise _fail(at, "is no constant")
            elif not there.issuperset(self._call(instruction, at)):
                raise _fail(at, "reads a tensor before it is there")
            for output in outputs:
                if output in there or (not apart and output in self.producers and output != constant.tensor):
                    raise _fail(at, "makes a tensor a second time")
                there.add(output)
        if constant.tensor not in there:
            raise _fail(where, "is not computed by its program")

    def _data(self, where: str, tensor: Tensor, text: str) -> None:
        try:
            size = len(base64.b64decode(text, validate=True))
        except (binascii.Error, ValueError) as error:
            raise _fail(where, f"has data that is no base64 ({error})") from error
        if size != tensor.nbytes:
            raise _fail(where, f"has {size} bytes, and {tensor} has {tensor.nbytes}")

    def _results(self) -> None:
        graph = self.graph
        if graph.loss is not None:
            if self._exists(graph.loss, "the loss").numel != 1:
                raise _fail("the loss", f"is {graph.tensors[graph.loss]}, which is not one number")
            self._forward("the loss", graph.loss)
            if graph.tangent is not None:
                self._alike("the loss's gradient", graph.tangent, graph.loss)
        elif graph.tangent is not None:
            raise _fail("the loss's gradient", "is there, and no loss")
        for index, output in enumerate(graph.outputs):
            if output.tensor is not None:
                self._exists(output.tensor, f"output {index}")
                self._forward(f"output {index}", output.tensor)
                if output.value is not None:
                    raise _fail(f"output {index}", "is a tensor and a value")

    def _leaves(self) -> None:
        graph = self.graph
        numbers = {n.tensor for n in graph.host.numbers}
        leaves = [i.leaf for i in graph.inputs if not (i.leaf == -1 and i.tensor in numbers)]
        places = sorted(leaves + [s.leaf for s in graph.statics])
        if places != list(range(len(places))):
            raise _fail("the list of inputs", f"has the places {places}")
        spec = _spec("input_spec", graph.input_spec)
        if spec is not None:
            if spec.num_leaves != len(places):
                raise _fail("input_spec", f"has {spec.num_leaves} leaves, the graph takes {len(places)}")
            if not _is_call(spec):
                raise _fail("input_spec", "is not of positional and keyword arguments")
        spec = _spec("output_spec", graph.output_spec)
        count = len(graph.outputs) - len(graph.host.kept)
        if spec is not None and spec.num_leaves != count:
            raise _fail("output_spec", f"has {spec.num_leaves} leaves, the graph {count} outputs")

    def _recomputed(self) -> None:
        """Copies are of the backward, and alike what the forward has."""
        for block in self.graph.recomputed:
            where = f"what is computed again of {block.block}"
            for tensor, copy in block.tensors:
                self._alike(where, copy, tensor)
                self._forward(where, tensor)
                if (by := self.producers.get(copy)) is None or by.phase != "backward":
                    raise _fail(
                        where, f"names {self.graph.tensors[copy].name}, which the backward does not make"
                    )

    def _segments(self) -> None:
        segments, count = self.graph.segments, len(self.graph.instructions)
        if not segments:
            copies = any(i.op == REBALANCE for i in self.graph.instructions)
            if copies and not self.graph.stored_apart:
                raise _fail("segments", "are missing, and tensors are copied between them")
            return
        if len(segments) != count:
            raise _fail("segments", f"are given for {len(segments)} instructions of {count}")
        # A forward alone may have nothing of a segment that training has.
        if min(segments) < 0 or max(segments) >= count:
            raise _fail("segments", "are not numbered from 0")


def _is_call(spec: Any) -> bool:
    try:
        args, kwargs = spec.unflatten(range(spec.num_leaves))
    except Exception:  # a container's own code, given what it was not made for
        return False
    return type(args) is tuple and type(kwargs) is dict and all(type(k) is str for k in kwargs)


def _leaves(value: Argument) -> Iterable[Argument]:
    if isinstance(value, tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _spec(name: str, text: str) -> Any:
    """The spec; None where it has a container that this process has not met, which a model's library will bring."""
    try:
        return spec_from_text(text)
    except PlanError as error:
        if isinstance(error.__cause__, NotImplementedError):
            return None
        raise _fail(name, f"cannot be read: {error}") from error
