"""The graphs of one accelerator of a plan across machines, as they are written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from hetspmd.cluster.machines import inside_cluster
from hetspmd.cost.coalesce import bucket_bytes
from hetspmd.lower import emit
from hetspmd.lower.level_writer import NestedWriter
from hetspmd.lower.program import Groups, LocalGraphs, LocalTensor, numbered
from hetspmd.placement import REPLICATE, is_sharded
from hetspmd.program.layout import Region
from hetspmd.program.level_layout import AcceleratorPlace, NestedLayout
from hetspmd.program.levels import Key, Nested, nest
from hetspmd.rules.theory import Theory
from hetspmd.trace.evaluate import constant_value

if TYPE_CHECKING:
    from hetspmd.plan.plan import Plan

__all__ = ["MachineEmitter", "nested_of"]


def nested_of(plan: Plan) -> Nested:
    """What each accelerator does by a plan across machines."""
    assert plan.inside is not None
    cluster, active = plan.cluster, plan.active
    sizes = bucket_bytes(cluster.part(active)), bucket_bytes(inside_cluster(cluster, active))
    return nest(plan.theory, plan.program, plan.inside.program, *sizes)


class MachineEmitter:
    """Writes the graphs of one accelerator of a machine on ``device``.

    ``machines`` and ``ranks`` are the numbers of the active machines and of their accelerators in the cluster,
    where they are others than their places (for the text of the graphs alone).
    """

    def __init__(
        self,
        theory: Theory,
        nested: Nested,
        layout: NestedLayout,
        at: AcceleratorPlace,
        device: torch.device,
        machines: Sequence[int] = (),
        ranks: Sequence[int] = (),
    ) -> None:
        self.theory, self.graph, self.nested = theory, theory.graph, nested
        self.layout, self.at, self.device = layout, at, device
        self.machines = tuple(machines or range(len(layout.accelerators)))
        self.ranks = tuple(ranks or range(layout.world))
        self.constants: dict[str, torch.Tensor] = {}

    def emit(self) -> LocalGraphs:
        """The graphs; constants are computed. Raises PlanError if the rows of an instruction cannot be had at
        once."""
        graph, nested = self.graph, self.nested
        forward = self._forward()
        backward = self._backward() if nested.gradients else None
        saved = [forward.copied(key) if compact else forward.need(key) for key, compact in nested.saved]
        forward.finish(
            (
                None if nested.loss is None else forward.need(nested.loss),
                [forward.need(key) for key in nested.outputs],
                [forward.need(key) for key in nested.buffers],
                saved if backward is not None else [],
            )
        )
        updated = tuple(i for i, b in enumerate(graph.buffers) if b.updated is not None)
        written = tuple(i for i, p in enumerate(graph.parameters) if p.updated is not None)
        differentiable = tuple(i for i, p in enumerate(graph.parameters) if p.gradient is not None)
        return LocalGraphs(
            self.layout.rank(self.at),
            self.layout.world,
            self.device,
            tuple(self._stored(p.tensor) for p in graph.parameters),
            tuple(self._local((b.tensor, REPLICATE, REPLICATE)) for b in graph.buffers),
            tuple(self._local((i.tensor, REPLICATE, REPLICATE)) for i in graph.inputs),
            tuple(self._local(key) for key in nested.outputs),
            updated if nested.buffers else (),
            written if nested.buffers else (),
            differentiable if nested.gradients else (),
            forward.graph,
            None if backward is None else backward.graph,
            self.constants,
            graph,
            lambda key: self.layout.shape((key[0], key[1], key[2]), self.at),
            self._groups(),
        )

    def _groups(self) -> Groups:
        places = zip(self.ranks, self.layout.places, strict=True)
        inside = [rank for rank, place in places if place.machine == self.at.machine]
        return Groups(numbered("rank", inside), numbered("machine", self.machines))

    def _stored(self, tensor: int) -> LocalTensor:
        """A parameter: each accelerator holds its machine's part, which counts as the first one's."""
        form = self.nested.stored.get(tensor, REPLICATE)
        key = (tensor, form, REPLICATE)
        extents: tuple[int, ...] = ()
        if is_sharded(form):
            of_machines = self.layout.outer.extents(tensor, form)
            extents = tuple(of_machines[p.machine] if p.inside == 0 else 0 for p in self.layout.places)
        meta = self.graph.tensors[tensor]
        region = self.layout.outer_region(key, self.at)
        return LocalTensor(tensor, form, meta.shape, meta.dtype, extents, region)

    def _local(self, key: Key) -> LocalTensor:
        """A tensor that is whole, or divided along dim 0 on both levels."""
        meta = self.graph.tensors[key[0]]
        if not is_sharded(key[1]):
            return LocalTensor(key[0], REPLICATE, meta.shape, meta.dtype, (), None)
        extents = tuple(self.layout.shape(key, place)[0] for place in self.layout.places)
        rank = self.layout.rank(self.at)
        region = Region(0, sum(extents[:rank]), extents[rank])
        return LocalTensor(key[0], key[1], meta.shape, meta.dtype, extents, region)

    def _writer(self) -> NestedWriter:
        return NestedWriter(self.theory, self.layout, self.at, self.device)

    def _forward(self) -> NestedWriter:
        writer, graph = self._writer(), self.graph
        for prefix, tensors in (
            ("parameter", [p.tensor for p in graph.parameters]),
            ("buffer", [b.tensor for b in graph.buffers]),
            ("batch", [i.tensor for i in graph.inputs]),
        ):
            for tensor in tensors:
                name = f"{prefix}_{emit.identifier(graph.tensors[tensor].name)}"
                key = (tensor, self.nested.stored.get(tensor, REPLICATE), REPLICATE)
                writer.produced[key] = writer.typed(writer.graph.placeholder(name), key)
        self._constants(writer)
        writer.start()
        for step in self.nested.forward:
            writer.write(step)
        return writer

    def _backward(self) -> NestedWriter:
        writer = self._writer()
        tangent = writer.graph.placeholder("tangent")
        saved = writer.graph.placeholder("saved")
        if self.graph.tangent is not None:
            writer.produced[(self.graph.tangent, REPLICATE, REPLICATE)] = tangent
        self._constants(writer)
        writer.start()

        def take(index: int, key: Key) -> fx.Node:
            return writer.typed(writer.call(writer.name(key), emit.take_saved, (saved, index)), key)

        for index, (key, _) in enumerate(self.nested.saved):
            writer.produced[key] = lambda index=index, key=key: take(index, key)  # type: ignore[misc]  # bound
        for step in self.nested.backward:
            writer.write(step)
        writer.finish([writer.need(key) for key in self.nested.gradients])
        return writer

    def _constants(self, writer: NestedWriter) -> None:
        for constant in self.graph.constants:
            key = (constant.tensor, REPLICATE, REPLICATE)
            writer.produced[key] = lambda constant=constant: self._attribute(writer, constant)  # type: ignore[misc]  # bound

    def _attribute(self, writer: NestedWriter, constant: Any) -> fx.Node:
        name = f"constant_{emit.identifier(self.graph.tensors[constant.tensor].name)}"
        if name not in self.constants:
            self.constants[name] = constant_value(self.graph, constant, self.device)
        return writer.graph.create_node("get_attr", name, name=name)
