"""The graphs of one rank that runs a program, of one level or of two, as they are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import cached_property
from typing import Any

import torch
from torch import fx

from hetspmd.lower.attention import fused_attentions
from hetspmd.lower.emit import Awaited, GraphWriter, identifier, take_saved
from hetspmd.lower.local_program import Groups, LocalGraphs, LocalInterface, LocalTensor, numbered
from hetspmd.placement import REPLICATE, is_sharded, sharded_dim
from hetspmd.program.layout import Region
from hetspmd.program.level_layout import LevelKey, LevelLayout, RankPlace
from hetspmd.program.levels import LocalSteps
from hetspmd.trace.evaluate import constant_value


class ActiveEmitter:
    """Writes the graphs of the rank at a place on ``device``.

    ``devices`` and ``ranks`` are the numbers in the cluster of the devices that run the program and of their
    accelerators, where they are others than their places (for the text of the graphs alone). ``awaited``: which
    collectives have arrived before another one starts.
    """

    def __init__(
        self,
        steps: LocalSteps[Any, Any],
        layout: LevelLayout,
        at: RankPlace,
        device: torch.device,
        devices: Sequence[int] = (),
        ranks: Sequence[int] = (),
        awaited: Awaited | None = None,
    ) -> None:
        self.steps, self.layout, self.at, self.device = steps, layout, at, device
        self.graph, self.awaited = layout.graph, awaited or {}
        self.devices = tuple(devices or range(len(layout.accelerators)))
        self.ranks = tuple(ranks or range(layout.world))
        self.constants: dict[str, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}

    @cached_property
    def fused(self) -> frozenset[int]:
        """Attentions with dropout that may be given to fused kernels, by instruction."""
        return fused_attentions(self.layout, self.at, (*self.steps.forward, *self.steps.backward))

    def emit(self) -> LocalGraphs:
        """The graphs; constants are computed. Raises PlanError if the program reads what it has not produced, or if
        the rows of an instruction cannot be had at once on two levels."""
        steps, graph, layout = self.steps, self.graph, self.layout
        forward = self._forward()
        backward: GraphWriter | None = None
        taken: list[LevelKey] = []
        if steps.gradients:
            backward, taken = self._backward()
        # In one order on all ranks, whatever each of them takes, as it is the order of waits.
        nodes = {key: forward.compact(key) if copied else forward.need(key) for key, copied in self._saved()}
        saved = [nodes[key] for key in taken]
        loss = None if steps.loss is None else forward.need(steps.loss)
        outputs = [forward.need(key) for key in steps.outputs]
        forward.finish((loss, outputs, [forward.need(key) for key in steps.buffers], saved))
        interface = self.interface()
        return LocalGraphs(
            **{field.name: getattr(interface, field.name) for field in fields(LocalInterface)},
            forward=forward.graph,
            backward=None if backward is None else backward.graph,
            constants=self.constants,
            reference=graph,
            local_shape=lambda key: layout.shape(key, self.at),
            groups=self.groups(),
        )

    def interface(self) -> LocalInterface:
        """What the graphs are given and what they return."""
        steps, graph, layout = self.steps, self.graph, self.layout
        updated = tuple(i for i, b in enumerate(graph.buffers) if b.updated is not None)
        written = tuple(i for i, p in enumerate(graph.parameters) if p.updated is not None)
        differentiable = tuple(i for i, p in enumerate(graph.parameters) if p.gradient is not None)
        return LocalInterface(
            rank=layout.rank(self.at),
            world=layout.world,
            device=self.device,
            parameters=tuple(self._stored(p.tensor) for p in graph.parameters),
            buffers=tuple(self._local(layout.whole(b.tensor)) for b in graph.buffers),
            inputs=tuple(self._local(layout.whole(i.tensor)) for i in graph.inputs),
            outputs=tuple(self._local(key) for key in steps.outputs),
            updated=updated if steps.buffers else (),
            written=written if steps.buffers else (),
            differentiable=differentiable if steps.gradients else (),
        )

    def groups(self) -> Groups:
        """Who takes part in the collectives."""
        if self.layout.levels == 1:
            return Groups(numbered("rank", self.ranks))
        places = zip(self.ranks, self.layout.places, strict=True)
        inside = [rank for rank, place in places if place.machine == self.at.machine]
        return Groups(numbered("rank", inside), numbered("machine", self.devices))

    def _stored(self, tensor: int) -> LocalTensor:
        """A parameter: each accelerator holds its machine's part, which counts as the first one's."""
        form = self.steps.stored.get(tensor, REPLICATE)
        extents: tuple[int, ...] = ()
        if is_sharded(form):
            of_devices = self.layout.outer.extents(tensor, form)
            extents = tuple(of_devices[p.machine] if p.inside == 0 else 0 for p in self.layout.places)
        meta = self.graph.tensors[tensor]
        region = self.layout.outer.region(tensor, form, self.at.machine)
        return LocalTensor(tensor, form, meta.shape, meta.dtype, extents, region)

    def _local(self, key: LevelKey) -> LocalTensor:
        """A tensor that is whole, or divided along the same dim on every level."""
        meta, form = self.graph.tensors[key[0]], key[1]
        if not is_sharded(form):
            return LocalTensor(key[0], form, meta.shape, meta.dtype, (), None)
        dim = sharded_dim(form)
        extents = tuple(self.layout.shape(key, place)[dim] for place in self.layout.places)
        rank = self.layout.rank(self.at)
        region = Region(dim, sum(extents[:rank]), extents[rank])
        return LocalTensor(key[0], form, meta.shape, meta.dtype, extents, region)

    def _writer(self) -> GraphWriter:
        writer = GraphWriter(self.layout, self.at, self.device)
        writer.fused, writer.awaited = self.fused, self.awaited
        for constant in self.graph.constants:
            writer.constants[constant.tensor] = lambda key: self._attribute(writer, key)
        return writer

    def _forward(self) -> GraphWriter:
        writer, graph = self._writer(), self.graph
        for prefix, tensors in (
            ("parameter", [p.tensor for p in graph.parameters]),
            ("buffer", [b.tensor for b in graph.buffers]),
            ("batch", [i.tensor for i in graph.inputs]),
        ):
            for tensor in tensors:
                name = f"{prefix}_{identifier(graph.tensors[tensor].name)}"
                key = self.layout.whole(tensor, self.steps.stored.get(tensor, REPLICATE))
                writer.produced[key] = writer.typed(writer.graph.placeholder(name), key)
        writer.start()
        for step in self.steps.forward:
            writer.write(step)
        return writer

    def _saved(self) -> list[tuple[LevelKey, bool]]:
        """What the backward may take of the forward here. Of what is saved whole for masks, the first rank needs no
        slice beside it."""
        whole = {key for key, copied in self.steps.saved if not copied}
        first = self.at == RankPlace(0)
        return [
            (key, copied)
            for key, copied in self.steps.saved
            if not (copied and first and self.layout.whole(key[0]) in whole)
        ]

    def _backward(self) -> tuple[GraphWriter, list[LevelKey]]:
        """The backward, and what it takes of the forward."""
        writer = self._writer()
        tangent = writer.graph.placeholder("tangent")
        saved = writer.graph.placeholder("saved")
        if self.graph.tangent is not None:
            writer.produced[self.layout.whole(self.graph.tangent)] = tangent
        writer.start()
        taken: list[LevelKey] = []

        def take(key: LevelKey) -> fx.Node:
            taken.append(key)
            node = writer.call(writer.name(key), take_saved, (saved, len(taken) - 1))
            return writer.typed(node, key)

        for key, _ in self._saved():
            writer.produced[key] = lambda key=key: take(key)  # type: ignore[misc]  # key is bound
        for step in self.steps.backward:
            writer.write(step)
        writer.finish([writer.need(key) for key in self.steps.gradients])
        return writer, taken

    def _attribute(self, writer: GraphWriter, key: LevelKey) -> fx.Node:
        """A constant in a form, as an attribute of the graph's module."""
        name = f"constant_{writer.name(key)}"
        if name not in self.constants:
            whole = value = self._value(key[0])
            for region in self.layout.regions(key, self.at):
                value = value.narrow(region.dim, region.start, region.extent)
            self.constants[name] = whole if value is whole else value.clone()
        return writer.graph.create_node("get_attr", name, name=name)

    def _value(self, tensor: int) -> torch.Tensor:
        if tensor not in self._values:
            (constant,) = (c for c in self.graph.constants if c.tensor == tensor)
            self._values[tensor] = constant_value(self.graph, constant, self.device)
        return self._values[tensor]
