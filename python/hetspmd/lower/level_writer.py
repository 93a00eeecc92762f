"""The steps of a plan across machines, written into a local graph of one accelerator.

Ops run by two rows at once, the machine's and the accelerator's; collectives inside are the machine's own, and
those between machines go in three steps (:mod:`hetspmd.dist.levels`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import fx

from hetspmd.errors import PlanError
from hetspmd.lower import calls, emit
from hetspmd.placement import PARTIAL, REPLICATE, is_sharded, placement_text, sharded_dim
from hetspmd.program.level_layout import AcceleratorPlace, Leg, NestedLayout
from hetspmd.program.levels import (
    Across,
    Both,
    InsideCollective,
    Key,
    NestedStep,
    Together,
    between,
    provider,
    reads_of,
    within,
    written_by,
)
from hetspmd.program.program import Communicate
from hetspmd.rules.kernels import reader_of
from hetspmd.rules.theory import Theory
from hetspmd.trace.evaluate import local_op
from hetspmd.trace.values import to_torch, torch_dtype

__all__ = ["NestedWriter"]

aten = torch.ops.aten


class NestedWriter:
    """Writes the steps of one local graph for one accelerator; all of them write the same in the same order."""

    def __init__(
        self, theory: Theory, layout: NestedLayout, at: AcceleratorPlace, device: torch.device
    ) -> None:
        self.theory, self.layout, self.at, self.device = theory, layout, at, device
        self.graph = fx.Graph()
        self.runtime = self.graph.placeholder("runtime")
        self.within: fx.Node | None = None
        self.produced: dict[Key, fx.Node | emit.Lazy] = {}
        self._pending: list[Key] = []

    def start(self) -> None:
        """All inputs are there."""
        self.within = self.call("within", calls.within, (self.runtime,))

    def name(self, key: Key) -> str:
        """An identifier for a value."""
        parts = [
            f"{level}{sharded_dim(form)}"
            for level, form in (("shard", key[1]), ("part", key[2]))
            if is_sharded(form)
        ]
        return "_".join([emit.identifier(self.theory.graph.tensors[key[0]].name), *parts])

    def typed(self, node: fx.Node, key: Key) -> fx.Node:
        """The node, with the shape and dtype of the value on this accelerator."""
        node.meta[emit.SHAPE] = self.layout.shape(key, self.at)
        node.meta[emit.DTYPE] = self.theory.graph.tensors[key[0]].dtype
        return emit.valued(node, key)

    def call(
        self, name: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> fx.Node:
        """A call_function node."""
        return self.graph.create_node("call_function", target, args, kwargs or {}, name=name)

    def need(self, key: Key) -> fx.Node:
        """A value, itself or derived. Raises PlanError if it is not there."""
        base = provider(self.produced, key)
        if base is None:
            name = self.theory.graph.tensors[key[0]].name
            raise PlanError(
                f"the program reads {name} | {placement_text(key[1])}, {placement_text(key[2])}, which is not there"
            )
        node = self.produced[base]
        if not isinstance(node, fx.Node):
            node = self.produced[base] = node()
        if base[1] != key[1]:
            node = self._derived(node, (key[0], key[1], base[2]), self.layout.outer_region, self.at.machine)
        if base[2] != key[2]:
            node = self._derived(node, key, self.layout.inner_region, self.at.inside)
        self.produced[key] = node
        return node

    def _derived(self, whole: fx.Node, key: Key, region_of: Any, first: int) -> fx.Node:
        """A slice of what is whole on a level, or its mask: the first one has it, the others zeros."""
        region = region_of(key, self.at)
        if region is not None:
            stop = region.start + region.extent
            return self.call(self.name(key), aten.slice.Tensor, (whole, region.dim, region.start, stop))
        if first == 0:
            return whole
        kwargs = {"dtype": torch_dtype(self.theory.graph.tensors[key[0]].dtype), "device": self.device}
        shape = list(self.layout.shape(key, self.at))
        return self.call(f"{self.name(key)}_zero", aten.zeros.default, (shape,), kwargs)

    def copied(self, key: Key) -> fx.Node:
        """A slice in memory of its own, made as soon as the whole is there, which then need not be kept."""
        base = provider(self.produced, key)
        whole = None if base is None or base == key else self.need(base)
        last = list(self.graph.nodes)[-1]
        node = self.need(key)
        kwargs = {"memory_format": torch.contiguous_format}
        copy = self.call(f"{self.name(key)}_saved", aten.clone.default, (node,), kwargs)
        made, at = list(self.graph.nodes), whole or node
        for new in made[made.index(last) + 1 :]:
            at.append(new)
            at = new
        return copy

    def write(self, step: NestedStep) -> None:
        """Append a step."""
        if isinstance(step, Both):
            self._compute(step)
        elif isinstance(step, InsideCollective):
            self._inside(step)
        elif isinstance(step, Across):
            self._across(step)
        else:
            self._together(step)

    def _arrives(self, key: Key, pending: fx.Node) -> None:
        self.produced[key] = lambda: emit.valued(self.call(self.name(key), calls.wait, (pending,)), key)
        self._pending.append(key)

    def _inside_arguments(self, step: InsideCollective) -> tuple[Any, ...]:
        """The dims and extents with which a collective inside is started."""
        source = (step.tensor, step.outer, step.source)
        target = (step.tensor, step.outer, step.target)
        machine, extents = self.at.machine, self.layout.extents
        if step.kind == "all_to_all":
            dims = sharded_dim(step.source), sharded_dim(step.target)
            return (*dims, extents(source, machine), extents(target, machine))
        if step.kind == "all_reduce":
            return ()
        cut = source if is_sharded(step.source) else target
        return sharded_dim(cut[2]), extents(cut, machine)

    def _inside(self, step: InsideCollective) -> None:
        source = (step.tensor, step.outer, step.source)
        target = (step.tensor, step.outer, step.target)
        given = (self.within, step.kind, self.need(source), *self._inside_arguments(step))
        pending = self.call(f"{self.name(source)}_{step.kind}_inside", calls.start, given)
        pending.meta["transfer"] = step
        self._arrives(target, pending)

    def _across(self, step: Across) -> None:
        source, target = (
            (step.tensor, step.source, step.collected),
            (step.tensor, step.target, step.handed_out),
        )
        if self.layout.is_nothing(step):
            self.produced[target] = self.need(source)
            return
        args, leg = self._leg(step)
        given = (self.runtime, step.kind, self.need(source), args, leg)
        pending = self.call(f"{self.name(source)}_{step.kind}_across", calls.start_across, given)
        pending.meta["transfer"] = step
        self._arrives(target, pending)

    def _together(self, step: Together) -> None:
        sources = [self.need(key) for key in reads_of(self.theory.graph, step)]
        if inside := within(step):
            given = (self.within, step.kind, sources, [self._inside_arguments(m) for m in inside])
            pending = self.call(f"bucket_{step.kind}_inside", calls.start_bucket, given)
            targets = [(m.tensor, m.outer, m.target) for m in inside]
        else:
            legs = [self._leg(m) for m in between(step)]
            arguments, parts = [args for args, _ in legs], [leg for _, leg in legs]
            pending = self.call(
                f"bucket_{step.kind}_across",
                calls.start_bucket_across,
                (self.runtime, step.kind, sources, arguments, parts),
            )
            targets = [(m.tensor, m.target, m.handed_out) for m in between(step)]
        pending.meta["transfer"] = step
        for index, target in enumerate(targets):
            self.produced[target] = partial(self._taken, pending, index, target)
            self._pending.append(target)

    def _taken(self, pending: fx.Node, index: int, key: Key) -> fx.Node:
        return emit.valued(self.call(self.name(key), calls.take, (pending, index)), key)

    def _leg(self, step: Across) -> tuple[tuple[Any, ...], Leg]:
        """The arguments of a collective's start, and what is collected and handed out for it."""
        source = (step.tensor, step.source, step.collected)
        target = (step.tensor, step.target, step.handed_out)
        machine, layout = self.at.machine, self.layout
        move = Communicate(step.tensor, step.kind, step.source, step.target)
        args = emit._arguments(layout.outer, move)

        def cut(key: Key) -> Any:
            if key[2] == PARTIAL:
                return "sum"
            return (sharded_dim(key[2]), layout.extents(key, machine)) if is_sharded(key[2]) else None

        def whole(key: Key) -> list[int]:
            return list(layout.shape((key[0], key[1], REPLICATE), self.at))

        return args, (cut(source), whole(source), cut(target), whole(target))

    def _compute(self, step: Both) -> None:
        theory = self.theory
        instruction = theory.graph.instructions[step.instruction]
        inputs = [self.need(key) for key in reads_of(theory.graph, step)]
        if (reader := reader_of(instruction.op)) is not None:
            inputs = [self.call(f"{node.name}_dense", reader, (node,)) for node in inputs]
        local = self.layout.call(step.instruction, step.outer, step.inner, self.at)
        if local is None:
            raise PlanError(
                f"{instruction.name} cannot run by {step.outer} on machines and {step.inner} inside at once; "
                "compile the plan again"
            )
        target, args, kwargs = local

        def torch_value(value: Any) -> Any:
            return emit._fill(to_torch(value, self.device), inputs)

        local_args = tuple(torch_value(a) for a in args)
        local_kwargs = {k: torch_value(v) for k, v in kwargs.items()}
        name = emit.identifier(instruction.name)
        keys = written_by(theory.graph, step)
        function: Any = local_op(target, self.device) if isinstance(target, str) else target
        if theory.rules[instruction.id].random and isinstance(target, str):
            shape = list(theory.graph.tensors[keys[0][0]].shape)
            regions = [(r.dim, r.start, r.extent) for r in self.layout.regions(keys[0], self.at)]
            alike = self.layout.drawn_alike(instruction.id, step.outer, step.inner)
            given = (self.runtime, instruction.id, shape, regions, alike, function, local_args, local_kwargs)
            node = self.call(name, calls.draw_nested, given)
        else:
            node = self.call(name, function, local_args, local_kwargs)
        node.meta["instruction"] = instruction.id
        single = len(instruction.outputs) == 1 and not emit._returns_many(instruction)
        for index, key in enumerate(keys):
            if key[0] >= 0 and key not in self.produced:
                made = node if single else self.call(self.name(key), emit.item, (node, index))
                self.produced[key] = self.typed(made, key)

    def finish(self, results: Any) -> None:
        """Wait for the collectives whose results nothing reads, and write the output."""
        for key in self._pending:
            self.need(key)
        self.graph.output(results)
