"""Writing one local graph: steps become torch.fx nodes.

A value is a key ``(tensor, form)``. It is there because a step produced it, or it is derived for free from
replicated: a slice for shard(d), for partial the tensor itself on rank 0 and zeros elsewhere. A
collective is written as its start where its step stands, and as its wait where its result is first read.

A node's ``meta`` says what it is the work of, for :mod:`hetspmd.record.record`: ``instruction`` (its id) or
``transfer`` (what a start carries); other nodes are waits, slices and copies. :data:`SHAPE` and :data:`DTYPE`
are those of values here, and :data:`VALUE` says which, for :mod:`hetspmd.lower.fuse`, which says in
:data:`ALSO` what other instructions a call does.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from hetspmd.cluster.collective_kinds import KINDS
from hetspmd.errors import PlanError
from hetspmd.lower import calls
from hetspmd.placement import PARTIAL, REPLICATE, is_sharded, placement_text, sharded_dim
from hetspmd.program.buckets import Bucket, Scheduled
from hetspmd.program.layout import Layout
from hetspmd.program.program import Communicate, Compute
from hetspmd.program.schedule import Key, reads
from hetspmd.rules.kernels import reader_of
from hetspmd.rules.rule import localize
from hetspmd.rules.theory import Theory
from hetspmd.trace.evaluate import local_op
from hetspmd.trace.graph import Instruction, Ref
from hetspmd.trace.values import to_torch, torch_dtype

Lazy = Callable[[], fx.Node]

aten = torch.ops.aten

SHAPE, DTYPE, ALSO, VALUE = "shape", "dtype", "also", "value"


class GraphWriter:
    """Writes the steps of one local graph for one rank."""

    def __init__(self, theory: Theory, layout: Layout, rank: int, device: torch.device) -> None:
        self.theory, self.layout, self.rank, self.device = theory, layout, rank, device
        self.world = layout.lengths.world
        self.graph = fx.Graph()
        self.runtime = self.graph.placeholder("runtime")
        self.produced: dict[Key, fx.Node | Lazy] = {}
        self.derived: dict[Key, fx.Node] = {}
        self._pending: list[Key] = []

    def name(self, tensor: int) -> str:
        """The tensor's name as an identifier."""
        return identifier(self.theory.graph.tensors[tensor].name)

    def get(self, key: Key) -> fx.Node | None:
        """A value of this graph, None if it is not there."""
        found = self.produced.get(key)
        if found is not None:
            if not isinstance(found, fx.Node):
                found = self.produced[key] = found()
            return found
        found = self.derived.get(key)
        if found is None:
            found = self._derive(key)
        return found

    def need(self, key: Key) -> fx.Node:
        """As :meth:`get`; raises PlanError if the value is not there."""
        found = self.get(key)
        if found is None:
            tensor = self.theory.graph.tensors[key[0]].name
            raise PlanError(f"the program reads {tensor} | {placement_text(key[1])}, which is not there")
        return found

    def has(self, key: Key) -> bool:
        """Whether the value is there, itself or derived."""
        return key in self.produced or (key[0], REPLICATE) in self.produced

    def _derive(self, key: Key) -> fx.Node | None:
        tensor, form = key
        if form == REPLICATE or (tensor, REPLICATE) not in self.produced:
            return None
        if form == PARTIAL:
            node = self.need((tensor, REPLICATE)) if self.rank == 0 else self.zeros(tensor)
        else:
            node = self.narrow(self.need((tensor, REPLICATE)), key)
        self.derived[key] = node
        return node

    def zeros(self, tensor: int) -> fx.Node:
        """The summand of a rank that contributes nothing."""
        meta = self.theory.graph.tensors[tensor]
        kwargs = {"dtype": torch_dtype(meta.dtype), "device": self.device}
        return self.call(f"{self.name(tensor)}_zero", aten.zeros.default, (list(meta.shape),), kwargs)

    def narrow(self, whole: fx.Node, key: Key) -> fx.Node:
        """This rank's slice of a whole tensor; a lone rank's is the whole."""
        if self.world == 1:
            return whole
        region = self.layout.region(*key, self.rank)
        assert region is not None
        stop = region.start + region.extent
        args = (whole, region.dim, region.start, stop)
        return self.call(f"{self.name(key[0])}_shard{region.dim}", aten.slice.Tensor, args)

    def call(
        self, name: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> fx.Node:
        """A call_function node."""
        return self.graph.create_node("call_function", target, args, kwargs or {}, name=name)

    def typed(self, node: fx.Node, key: Key) -> fx.Node:
        """The node, with the shape and dtype of the value here."""
        node.meta[SHAPE] = self.layout.shape(*key, self.rank)
        node.meta[DTYPE] = self.theory.graph.tensors[key[0]].dtype
        return valued(node, key)

    def write(self, step: Scheduled) -> None:
        """Append a step."""
        if isinstance(step, Bucket):
            self._coalesce(step)
        elif isinstance(step, Communicate):
            self._communicate(step)
        else:
            self._compute(step)

    def _communicate(self, step: Communicate) -> None:
        target = (step.tensor, step.target)
        if target in self.produced:
            return
        source = self.need((step.tensor, step.source))
        if self.world == 1 or (
            KINDS[step.kind].keeps_dim and self.layout.agrees(step.tensor, step.source, step.target)
        ):
            self.produced[target] = source
            return
        args = _arguments(self.layout, step)
        name = self.name(step.tensor)
        pending = self.call(f"{name}_{step.kind}", calls.start, (self.runtime, step.kind, source, *args))
        pending.meta["transfer"] = step
        suffix = "whole" if step.target == REPLICATE else f"shard{sharded_dim(step.target)}"
        self.produced[target] = lambda: valued(self.call(f"{name}_{suffix}", calls.wait, (pending,)), target)
        self._pending.append(target)

    def _coalesce(self, bucket: Bucket) -> None:
        members = {
            (m.tensor, m.target): m for m in bucket.members if (m.tensor, m.target) not in self.produced
        }
        if len(members) < 2 or self.world == 1:
            for member in members.values():
                self._communicate(member)
            return
        sources = [self.need((m.tensor, m.source)) for m in members.values()]
        args = [_arguments(self.layout, m) for m in members.values()]
        given = (self.runtime, bucket.kind, sources, args)
        pending = self.call(f"bucket_{bucket.kind}", calls.start_bucket, given)
        pending.meta["transfer"] = Bucket(tuple(members.values()))
        for index, target in enumerate(members):
            suffix = "whole" if target[1] == REPLICATE else f"shard{sharded_dim(target[1])}"
            name = f"{self.name(target[0])}_{suffix}"
            self.produced[target] = partial(self._taken, name, pending, index, target)
            self._pending.append(target)

    def _taken(self, name: str, pending: fx.Node, index: int, key: Key) -> fx.Node:
        return valued(self.call(name, calls.take, (pending, index)), key)

    def _compute(self, step: Compute) -> None:
        theory, row = self.theory, step.row
        instruction = theory.graph.instructions[step.instruction]
        if instruction.is_source:
            raise PlanError(f"{instruction.name} is a source and cannot be computed")
        inputs = [self.need(key) for key in reads(theory.graph, step)]
        if (reader := reader_of(instruction.op)) is not None:
            inputs = [self.call(f"{node.name}_dense", reader, (node,)) for node in inputs]
        rule, call = theory.rules[instruction.id], theory.calls[instruction.id]
        start, stop = self._units(step)
        target, args, kwargs = localize(call, rule, row, self.rank, self.world, start, stop)

        def torch_value(value: Any) -> Any:
            return _fill(to_torch(value, self.device), inputs)

        local_args = tuple(torch_value(a) for a in args)
        local_kwargs = {k: torch_value(v) for k, v in kwargs.items()}
        single = len(instruction.outputs) == 1 and not _returns_many(instruction)
        name = identifier(instruction.name)
        if isinstance(target, str):
            function = local_op(target, self.device)
            if rule.random:
                node = self._draw(step, instruction, name, function, local_args, local_kwargs)
            else:
                node = self.call(name, function, local_args, local_kwargs)
        else:
            node = self.call(name, target, local_args, local_kwargs)
        node.meta["instruction"] = instruction.id
        for index, key in self._outputs(step, instruction):
            if key not in self.produced:
                value = node if single else self.call(self.name(key[0]), item, (node, index))
                self.produced[key] = self.typed(value, key)

    def _draw(
        self,
        step: Compute,
        instruction: Instruction,
        name: str,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> fx.Node:
        first, form = instruction.outputs[0], step.row.post[0]
        region = self.layout.region(first, form, self.rank)
        shape = list(self.theory.graph.tensors[first].shape)
        where = None if region is None else (region.dim, region.start, region.extent)
        return self.call(
            name, calls.draw, (self.runtime, instruction.id, shape, where, function, args, kwargs)
        )

    def _outputs(self, step: Compute, instruction: Instruction) -> list[tuple[int, Key]]:
        return [
            (i, (t, f))
            for i, (t, f) in enumerate(zip(instruction.outputs, step.row.post, strict=True))
            if t >= 0
        ]

    def _units(self, step: Compute) -> tuple[int, int]:
        if step.row.factor is None:
            return 0, 0
        rows = self.theory.rows[step.instruction]
        try:
            axis = self.theory.row_axes[step.instruction][rows.index(step.row)]
        except ValueError:
            axis = None
        if axis is None:
            name = self.theory.graph.instructions[step.instruction].name
            raise PlanError(
                f"{name} has no row {step.row}; the plan was made with other rules, compile it again"
            )
        size = self.theory.rules[step.instruction].factors[step.row.factor].size
        return self.layout.units(axis, size, self.rank)

    def compact(self, key: Key) -> fx.Node:
        """A copy of a slice made as soon as the whole is there, so that the whole need not be kept."""
        if self.world == 1:
            return self.need(key)
        slice_ = self.derived.get(key)
        if slice_ is None:
            whole = self.need((key[0], REPLICATE))
            with self.graph.inserting_after(whole):
                slice_ = self.derived[key] = self.narrow(whole, key)
        kwargs = {"memory_format": torch.contiguous_format}
        with self.graph.inserting_after(slice_):
            return self.call(f"{self.name(key[0])}_saved", aten.clone.default, (slice_,), kwargs)

    def finish(self, results: Any) -> None:
        """Wait for the collectives whose results nothing on this rank reads, and write the output."""
        for key in self._pending:
            self.need(key)
        self.graph.output(results)


def valued(node: fx.Node, key: tuple[int, ...]) -> fx.Node:
    """The node, which says of which tensor in which form it is the value, for :mod:`hetspmd.verify.locate`."""
    node.meta[VALUE] = key
    return node


def drop_unread(graph: fx.Graph) -> None:
    """Erase the results of ops with several, and the runtime inside a machine, where nothing reads them."""
    for node in reversed(graph.nodes):
        if node.target in (item, calls.within) and not node.users:
            graph.erase_node(node)


def instructions(node: fx.Node) -> tuple[int, ...]:
    """Ids of all instructions that a call does."""
    own = node.meta.get("instruction")
    return (*(() if own is None else (own,)), *node.meta.get(ALSO, ()))


def item(values: Any, index: int) -> Any:
    """One output of an op that has several, or of its stand-in that has one."""
    return values if isinstance(values, torch.Tensor) else values[index]


def take_saved(saved: list[torch.Tensor | None], index: int) -> torch.Tensor:
    """A saved value, which the list no longer holds."""
    value, saved[index] = saved[index], None
    assert value is not None
    return value


def _fill(value: Any, inputs: list[fx.Node]) -> Any:
    """Refs to input nodes, in torch arguments."""
    if isinstance(value, Ref):
        return inputs[value.id]
    if isinstance(value, (list, tuple)):
        return [_fill(v, inputs) for v in value]
    return value


def _returns_many(instruction: Instruction) -> bool:
    """Whether the op returns a list or tuple even of one tensor."""
    returns = local_op(instruction.op)._schema.returns
    return len(returns) != 1 or str(returns[0].type) != "Tensor"


def _arguments(layout: Layout, step: Communicate) -> tuple[Any, ...]:
    """The dims and extents with which a collective is started."""
    ends = (end for end in (step.source, step.target) if is_sharded(end))
    cuts = [(sharded_dim(end), layout.extents(step.tensor, end)) for end in ends]
    return KINDS[step.kind].arguments(cuts)


def identifier(name: str) -> str:
    """A Python identifier that reads like ``name``."""
    text = re.sub(r"\W+", "_", name).strip("_")
    return f"v{text}" if not text or text[0].isdigit() else text
