"""The graphs of one rank of a program of one level, as they are written.

Values that cross from forward to backward are saved in the forms that :mod:`hetspmd.program.saved_tensors` says.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from hetspmd.lower.emit import GraphWriter, identifier, take_saved
from hetspmd.lower.program import Groups, LocalGraphs, LocalTensor, numbered
from hetspmd.placement import PARTIAL, REPLICATE, Placement, is_sharded, sharded_dim
from hetspmd.program.buckets import Scheduled
from hetspmd.program.layout import Layout
from hetspmd.program.lengths import Lengths
from hetspmd.program.program import Compute, Program
from hetspmd.program.saved_tensors import crossing
from hetspmd.program.schedule import Key, Schedule, reads, schedule
from hetspmd.rules.theory import Theory
from hetspmd.trace.evaluate import constant_value
from hetspmd.trace.graph import BUFFER, CONSTANT, INPUT, PARAMETER, TANGENT

__all__ = ["FlatEmitter"]


class FlatEmitter:
    """Writes the graphs of ``rank``, among the ranks that run a program of one level, on ``device``.

    Small collectives share buckets of at most ``bucket_bytes`` bytes, the same on every rank. ``ranks`` are the
    numbers of the program's ranks in the cluster, where they are others (for the text of the graphs alone).
    """

    def __init__(
        self,
        theory: Theory,
        program: Program,
        lengths: Lengths,
        rank: int,
        device: torch.device,
        bucket_bytes: int,
        ranks: Sequence[int] = (),
    ) -> None:
        self.theory, self.graph, self.program = theory, theory.graph, program
        self.rank, self.device, self.bucket_bytes = rank, device, bucket_bytes
        self.ranks = tuple(ranks or range(lengths.world))
        self.layout = Layout(self.graph, theory.axes, lengths)
        self.world = lengths.world
        self.stored: dict[int, Placement] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}

    def emit(self) -> LocalGraphs:
        """The graphs; constants are computed. Raises PlanError if the program reads what it has not produced."""
        plan = schedule(self.theory, self.program, self.bucket_bytes)
        for step in plan.forward:
            if isinstance(step, Compute) and self.graph.instructions[step.instruction].is_source:
                self.stored[self.graph.instructions[step.instruction].outputs[0]] = step.row.post[0]
        forward = self._forward(plan)
        results = [(r.tensor, r.form) for r in self.program.gradients]
        backward: GraphWriter | None = None
        taken: list[tuple[Key, bool]] = []
        if results:
            backward, taken = self._backward(plan, forward, results)
        saved = [forward.compact(key) if compact else forward.need(key) for key, compact in taken]
        loss = self.program.loss
        forward.finish(
            (
                None if loss is None else forward.need((loss.tensor, loss.form)),
                [forward.need((r.tensor, r.form)) for r in self.program.outputs],
                [forward.need((r.tensor, r.form)) for r in self.program.buffers],
                saved,
            )
        )
        buffers = self.graph.buffers
        updated = tuple(i for i, b in enumerate(buffers) if b.updated is not None)
        written = tuple(i for i, p in enumerate(self.graph.parameters) if p.updated is not None)
        differentiable = tuple(i for i, p in enumerate(self.graph.parameters) if p.gradient is not None)
        return LocalGraphs(
            self.rank,
            self.world,
            self.device,
            tuple(self._local(p.tensor, self.stored.get(p.tensor, REPLICATE)) for p in self.graph.parameters),
            tuple(self._local(b.tensor, REPLICATE) for b in buffers),
            tuple(self._local(i.tensor, REPLICATE) for i in self.graph.inputs),
            tuple(self._local(r.tensor, r.form) for r in self.program.outputs),
            updated if self.program.buffers else (),
            written if self.program.buffers else (),
            differentiable if self.program.gradients else (),
            forward.graph,
            None if backward is None else backward.graph,
            self.constants,
            self.graph,
            lambda key: self.layout.shape(key[0], key[1], self.rank),
            Groups(numbered("rank", self.ranks)),
        )

    def _local(self, tensor: int, form: Placement) -> LocalTensor:
        meta = self.graph.tensors[tensor]
        extents = self.layout.extents(tensor, form) if is_sharded(form) else ()
        region = self.layout.region(tensor, form, self.rank)
        return LocalTensor(tensor, form, meta.shape, meta.dtype, extents, region)

    def _writer(self) -> GraphWriter:
        return GraphWriter(self.theory, self.layout, self.rank, self.device)

    def _forward(self, plan: Schedule) -> GraphWriter:
        writer = self._writer()
        names: dict[int, str] = {}
        for prefix, tensors in (
            ("parameter", [p.tensor for p in self.graph.parameters]),
            ("buffer", [b.tensor for b in self.graph.buffers]),
            ("batch", [i.tensor for i in self.graph.inputs]),
        ):
            for tensor in tensors:
                names[tensor] = f"{prefix}_{identifier(self.graph.tensors[tensor].name)}"
                key = (tensor, self.stored.get(tensor, REPLICATE))
                writer.produced[key] = writer.typed(writer.graph.placeholder(names[tensor]), key)
        for step in plan.forward:
            if not self._source(writer, step):
                writer.write(step)
        return writer

    def _backward(
        self, plan: Schedule, forward: GraphWriter, results: list[Key]
    ) -> tuple[GraphWriter, list[tuple[Key, bool]]]:
        crosses = crossing(self.graph, plan, self.program.gradients)
        whole = crosses.whole | (crosses.masks if self.rank == 0 else {})
        writer = self._writer()
        tangent = writer.graph.placeholder("tangent")
        saved = writer.graph.placeholder("saved")
        if self.graph.tangent is not None:
            writer.produced[(self.graph.tangent, REPLICATE)] = tangent
        taken: list[tuple[Key, bool]] = []

        def take(key: Key, compact: bool) -> fx.Node:
            taken.append((key, compact))
            suffix = f"_shard{sharded_dim(key[1])}" if is_sharded(key[1]) else ""
            node = writer.call(f"{writer.name(key[0])}{suffix}", take_saved, (saved, len(taken) - 1))
            return writer.typed(node, key)

        for key in whole:
            writer.produced[key] = lambda key=key: take(key, False)  # type: ignore[misc]  # key is bound
        for key in (k for k in crosses.slices if (k[0], REPLICATE) not in whole):
            writer.produced[key] = lambda key=key: take(key, True)  # type: ignore[misc]  # key is bound
        for step in plan.forward:
            self._source(writer, step, only=CONSTANT)
        for step in plan.backward:
            if not self._source(writer, step):
                self._masks(writer, forward, reads(self.graph, step))
                writer.write(step)
        self._masks(writer, forward, results)
        writer.finish([writer.need(key) for key in results])
        return writer, taken

    def _masks(self, writer: GraphWriter, forward: GraphWriter, keys: tuple[Key, ...] | list[Key]) -> None:
        """Masks of forward values: a rank other than 0 needs nothing of the value itself."""
        for key in keys:
            if key[1] == PARTIAL and not writer.has(key) and forward.has(key) and self.rank != 0:
                writer.derived[key] = writer.derived.get(key) or writer.zeros(key[0])

    def _source(self, writer: GraphWriter, step: Scheduled, only: str | None = None) -> bool:
        """Handle a source step; False for any other step."""
        if not isinstance(step, Compute):
            return False
        instruction = self.graph.instructions[step.instruction]
        if instruction.op not in (PARAMETER, BUFFER, INPUT, TANGENT, CONSTANT):
            return False
        if instruction.op == CONSTANT and only in (None, CONSTANT):
            (tensor,) = instruction.outputs
            writer.produced[(tensor, REPLICATE)] = lambda: self._attribute(writer, (tensor, REPLICATE))
            extent = self.graph.tensors[tensor].shape
            for dim in range(len(extent)):
                axis = self.theory.axes.axis(tensor, dim)
                if axis is not None and axis.units >= 2:
                    key = (tensor, 2 + dim)
                    writer.produced[key] = lambda key=key: self._attribute(writer, key)  # type: ignore[misc]  # key is bound
        return True

    def _attribute(self, writer: GraphWriter, key: Key) -> fx.Node:
        """A constant in a form, as an attribute of the graph's module."""
        tensor, form = key
        suffix = f"_shard{sharded_dim(form)}" if is_sharded(form) else ""
        name = f"constant_{identifier(self.graph.tensors[tensor].name)}{suffix}"
        if name not in self.constants:
            value = self._value(tensor)
            region = self.layout.region(tensor, form, self.rank)
            if region is not None:
                value = value.narrow(region.dim, region.start, region.extent).clone()
            self.constants[name] = value
        return writer.graph.create_node("get_attr", name, name=name)

    def _value(self, tensor: int) -> torch.Tensor:
        if tensor not in self._values:
            (constant,) = (c for c in self.graph.constants if c.tensor == tensor)
            self._values[tensor] = constant_value(self.graph, constant, self.device)
        return self._values[tensor]
