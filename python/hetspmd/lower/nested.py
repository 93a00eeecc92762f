"""Lowering of a plan across machines: the local graphs of one accelerator.

An accelerator's part of a tensor is a part of its machine's part. Lengths inside are even, in whole units: those of
the machine where the outer form divides the same dim, those of the whole axis elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from hetspmd.balance.lengths import Lengths, apportion
from hetspmd.cost.machines import machine_of
from hetspmd.errors import PlanError
from hetspmd.forms import ALL_REDUCE, IDENTITY, all_gather, form_text, is_sharded, sharded_dim
from hetspmd.lower import emit
from hetspmd.lower.constants import constant_value, local_op
from hetspmd.lower.idle import lower_idle
from hetspmd.lower.layout import Layout, Region
from hetspmd.lower.program import LocalProgram, LocalTensor
from hetspmd.rules.kernels import reader_of
from hetspmd.rules.nested import Level, localize_drawn, localize_nested, runs_whole
from hetspmd.rules.rule import LocalCall, Row
from hetspmd.rules.theory import Theory
from hetspmd.run import collectives, machines
from hetspmd.run.random import divisible
from hetspmd.synth.nested import Across, Both, Inside, Key, Nested, NestedStep, nest, provider
from hetspmd.synth.program import Communicate, Program, Result
from hetspmd.trace.values import to_torch, torch_dtype

if TYPE_CHECKING:
    from hetspmd.plan import Plan

aten = torch.ops.aten


@dataclass(frozen=True)
class Place:
    """An accelerator: the ``inside``-th of the ``machine``-th of the active machines."""

    machine: int
    inside: int


class NestedLayout:
    """Where parts lie: ``accelerators`` of each active machine, whose lengths ``outer`` holds."""

    def __init__(self, theory: Theory, lengths: Lengths, accelerators: Sequence[int]) -> None:
        self.theory, self.graph, self.axes = theory, theory.graph, theory.axes
        self.accelerators = tuple(accelerators)
        self.outer = Layout(theory.graph, theory.axes, lengths)
        self._even: dict[tuple[int, int], tuple[int, ...]] = {}

    @property
    def world(self) -> int:
        """Accelerators in all."""
        return sum(self.accelerators)

    @property
    def places(self) -> list[Place]:
        """All accelerators in rank order."""
        return [Place(v, a) for v, k in enumerate(self.accelerators) for a in range(k)]

    def rank(self, at: Place) -> int:
        """The rank of an accelerator among all."""
        return sum(self.accelerators[: at.machine]) + at.inside

    def even(self, units: int, machine: int) -> tuple[int, ...]:
        """Units divided evenly among the accelerators of a machine."""
        count = self.accelerators[machine]
        key = (units, count)
        if key not in self._even:
            self._even[key] = apportion(units, (1 / count,) * count)
        return self._even[key]

    def extents(self, key: Key, machine: int) -> tuple[int, ...]:
        """Elements per accelerator of the machine along the dim that the inner form divides."""
        tensor, outer, inner = key
        axis = self.axes.sharded(tensor, inner)
        if axis is None:
            raise PlanError(f"{self.graph.tensors[tensor].name} is never divided as {form_text(inner)}")
        unit = self.graph.tensors[tensor].shape[sharded_dim(inner)] // axis.units
        units = self.outer.lengths.units[axis.id][machine] if outer == inner else axis.units
        return tuple(n * unit for n in self.even(units, machine))

    def inner_region(self, key: Key, at: Place) -> Region | None:
        """The part of its machine's part that an accelerator holds; None for all of it."""
        if not is_sharded(key[2]):
            return None
        extents = self.extents(key, at.machine)
        return Region(sharded_dim(key[2]), sum(extents[: at.inside]), extents[at.inside])

    def outer_region(self, key: Key, at: Place) -> Region | None:
        """The part of the tensor that the accelerator's machine holds; None for all of it."""
        return self.outer.region(key[0], key[1], at.machine)

    def regions(self, key: Key, at: Place) -> tuple[Region, ...]:
        """The parts one after the other: the machine's, then the accelerator's of that."""
        found = (self.outer_region(key, at), self.inner_region(key, at))
        return tuple(region for region in found if region is not None)

    def shape(self, key: Key, at: Place) -> tuple[int, ...]:
        """The local shape."""
        shape = list(self.graph.tensors[key[0]].shape)
        for region in self.regions(key, at):
            shape[region.dim] = region.extent
        return tuple(shape)

    def levels(self, instruction: int, outer: Row, inner: Row, at: Place) -> tuple[Level, Level]:
        """Both rows with the units that the machine and the accelerator hold."""
        start, stop = self._units(instruction, outer, lambda axis: self.outer.lengths.range(axis, at.machine))
        first = Level(outer, (start, stop))

        def inside(axis: int) -> tuple[int, int]:
            low, units = 0, self.axes.axes[axis].units
            if inner == outer:
                low, high = self.outer.lengths.range(axis, at.machine)
                units = high - low
            stops = [low, *(low + n for n in accumulate(self.even(units, at.machine)))]
            return stops[at.inside], stops[at.inside + 1]

        return first, Level(inner, self._units(instruction, inner, inside))

    def _units(self, instruction: int, row: Row, held: Any) -> tuple[int, int]:
        if row.factor is None:
            return 0, 0
        rows = self.theory.rows[instruction]
        axis = self.theory.row_axes[instruction][rows.index(row)] if row in rows else None
        if axis is None:
            name = self.graph.instructions[instruction].name
            raise PlanError(f"{name} has no row {row}; the plan was made with other rules, compile it again")
        scale = self.theory.rules[instruction].factors[row.factor].size // self.axes.axes[axis].units
        start, stop = held(axis)
        return start * scale, stop * scale

    def call(self, instruction: int, outer: Row, inner: Row, at: Place) -> LocalCall | None:
        """What an accelerator calls; None where the two rows cannot be had at once."""
        theory = self.theory
        levels = self.levels(instruction, outer, inner, at)
        call, rule = theory.calls[instruction], theory.rules[instruction]
        if rule.random and self.drawn_alike(instruction, outer, inner):
            if not divisible(call.op):
                return None
            level = levels[1] if runs_whole(outer) else levels[0]
            return localize_drawn(call, rule, level, self.rank(at), self.world)
        return localize_nested(call, rule, *levels, self.rank(at), self.world)

    def drawn_alike(self, instruction: int, outer: Row, inner: Row) -> bool:
        """Whether a random instruction draws slices of which several accelerators have the same."""
        return bool(self.theory.rules[instruction].random) and is_sharded(outer.post[0]) != is_sharded(
            inner.post[0]
        )


def lower_nested(plan: Plan, rank: int, device: torch.device) -> LocalProgram:
    """The local program of a rank of a plan across machines, be it idle."""
    assert plan.inside is not None
    theory, cluster = plan.theory, plan.cluster
    machine = machine_of(cluster)[rank]
    if machine not in plan.active:
        outputs = tuple(
            r if r.form == all_gather(0) else Result(r.tensor, IDENTITY) for r in plan.program.outputs
        )
        left = Program(
            plan.program.steps, plan.program.loss, outputs, plan.program.gradients, plan.program.buffers
        )
        return lower_idle(theory, left, plan.lengths, device)
    counts = [cluster.accelerators[j] for j in plan.active]
    layout = NestedLayout(theory, plan.lengths, counts)
    at = Place(plan.active.index(machine), rank - machine_of(cluster).index(machine))
    nested = nest(theory, plan.program, plan.inside.program)
    return lower_place(theory, nested, layout, at, device)


def lower_place(
    theory: Theory, nested: Nested, layout: NestedLayout, at: Place, device: torch.device
) -> LocalProgram:
    """The local program of one accelerator. Raises PlanError if the rows of an instruction cannot be had at
    once."""
    return _Lowering(theory, nested, layout, at, device).run()


class _Lowering:
    def __init__(
        self, theory: Theory, nested: Nested, layout: NestedLayout, at: Place, device: torch.device
    ) -> None:
        self.theory, self.graph, self.nested = theory, theory.graph, nested
        self.layout, self.at, self.device = layout, at, device
        self.constants: dict[str, torch.Tensor] = {}

    def run(self) -> LocalProgram:
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
        differentiable = tuple(i for i, p in enumerate(graph.parameters) if p.gradient is not None)
        return LocalProgram(
            self.layout.rank(self.at), self.layout.world, self.device,
            tuple(self._stored(p.tensor) for p in graph.parameters),
            tuple(self._local((b.tensor, IDENTITY, IDENTITY)) for b in graph.buffers),
            tuple(self._local((i.tensor, IDENTITY, IDENTITY)) for i in graph.inputs),
            tuple(self._local(key) for key in nested.outputs),
            updated if nested.buffers else (),
            differentiable if nested.gradients else (),
            self._module(forward, "Forward"),
            None if backward is None else self._module(backward, "Backward"),
        )  # fmt: skip

    def _stored(self, tensor: int) -> LocalTensor:
        """A parameter: each accelerator holds its machine's part, which counts as the first one's."""
        form = self.nested.stored.get(tensor, IDENTITY)
        key = (tensor, form, IDENTITY)
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
            return LocalTensor(key[0], IDENTITY, meta.shape, meta.dtype, (), None)
        extents = tuple(self.layout.shape(key, place)[0] for place in self.layout.places)
        rank = self.layout.rank(self.at)
        region = Region(0, sum(extents[:rank]), extents[rank])
        return LocalTensor(key[0], key[1], meta.shape, meta.dtype, extents, region)

    def _writer(self) -> NestedWriter:
        return NestedWriter(self.theory, self.layout, self.at, self.device)

    def _module(self, writer: NestedWriter, name: str) -> fx.GraphModule:
        wanted = {str(n.target) for n in writer.graph.nodes if n.op == "get_attr"}
        root = {k: v for k, v in self.constants.items() if k in wanted}
        writer.graph.lint()
        return fx.GraphModule(root, writer.graph, name)

    def _forward(self) -> NestedWriter:
        writer, graph = self._writer(), self.graph
        for prefix, tensors in (
            ("parameter", [p.tensor for p in graph.parameters]),
            ("buffer", [b.tensor for b in graph.buffers]),
            ("batch", [i.tensor for i in graph.inputs]),
        ):
            for tensor in tensors:
                name = f"{prefix}_{emit.identifier(graph.tensors[tensor].name)}"
                key = (tensor, self.nested.stored.get(tensor, IDENTITY), IDENTITY)
                writer.produced[key] = writer.graph.placeholder(name)
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
            writer.produced[(self.graph.tangent, IDENTITY, IDENTITY)] = tangent
        self._constants(writer)
        writer.start()

        def take(index: int, key: Key) -> fx.Node:
            return writer.call(writer.name(key), emit.take_saved, (saved, index))

        for index, (key, _) in enumerate(self.nested.saved):
            writer.produced[key] = lambda index=index, key=key: take(index, key)  # type: ignore[misc]  # bound
        for step in self.nested.backward:
            writer.write(step)
        writer.finish([writer.need(key) for key in self.nested.gradients])
        return writer

    def _constants(self, writer: NestedWriter) -> None:
        for constant in self.graph.constants:
            key = (constant.tensor, IDENTITY, IDENTITY)
            writer.produced[key] = lambda constant=constant: self._attribute(writer, constant)  # type: ignore[misc]  # bound

    def _attribute(self, writer: NestedWriter, constant: Any) -> fx.Node:
        name = f"constant_{emit.identifier(self.graph.tensors[constant.tensor].name)}"
        if name not in self.constants:
            self.constants[name] = constant_value(self.graph, constant, self.device)
        return writer.graph.create_node("get_attr", name, name=name)


class NestedWriter:
    """Writes the steps of one local graph for one accelerator; all of them write the same in the same order."""

    def __init__(self, theory: Theory, layout: NestedLayout, at: Place, device: torch.device) -> None:
        self.theory, self.layout, self.at, self.device = theory, layout, at, device
        self.graph = fx.Graph()
        self.runtime = self.graph.placeholder("runtime")
        self.within: fx.Node | None = None
        self.produced: dict[Key, fx.Node | emit.Lazy] = {}
        self._pending: list[Key] = []

    def start(self) -> None:
        """All inputs are there."""
        self.within = self.call("within", machines.within, (self.runtime,))

    def name(self, key: Key) -> str:
        """An identifier for a value."""
        parts = [
            f"{level}{sharded_dim(form)}"
            for level, form in (("shard", key[1]), ("part", key[2]))
            if is_sharded(form)
        ]
        return "_".join([emit.identifier(self.theory.graph.tensors[key[0]].name), *parts])

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
                f"the program reads {name} | {form_text(key[1])}, {form_text(key[2])}, which is not there"
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
        elif isinstance(step, Inside):
            self._inside(step)
        else:
            self._across(step)

    def _arrives(self, key: Key, pending: fx.Node) -> None:
        self.produced[key] = lambda: self.call(self.name(key), collectives.wait, (pending,))
        self._pending.append(key)

    def _inside(self, step: Inside) -> None:
        source = (step.tensor, step.outer, step.source)
        target = (step.tensor, step.outer, step.target)
        machine, extents = self.at.machine, self.layout.extents
        args: tuple[Any, ...] = ()
        if step.kind == "all_to_all":
            dims = sharded_dim(step.source), sharded_dim(step.target)
            args = (*dims, extents(source, machine), extents(target, machine))
        elif step.kind != "all_reduce":
            cut = source if is_sharded(step.source) else target
            args = (sharded_dim(cut[2]), extents(cut, machine))
        start = machines.STARTS[step.kind]
        pending = self.call(
            f"{self.name(source)}_{step.kind}_inside", start, (self.within, self.need(source), *args)
        )
        pending.meta["transfer"] = step
        self._arrives(target, pending)

    def _across(self, step: Across) -> None:
        source = (step.tensor, step.source, step.collected)
        target = (step.tensor, step.target, step.handed_out)
        machine, layout = self.at.machine, self.layout
        move = Communicate(step.tensor, step.kind, step.source, step.target)
        _, args = emit._collective(layout.outer, move)

        def cut(key: Key) -> Any:
            if key[2] == ALL_REDUCE:
                return "sum"
            return (sharded_dim(key[2]), layout.extents(key, machine)) if is_sharded(key[2]) else None

        def whole(key: Key) -> list[int]:
            return list(layout.shape((key[0], key[1], IDENTITY), self.at))

        given = (step.kind, args, cut(source), whole(source), cut(target), whole(target))
        pending = self.call(
            f"{self.name(source)}_{step.kind}_across", machines.start_across,
            (self.runtime, self.need(source), *given),
        )  # fmt: skip
        pending.meta["transfer"] = step
        self._arrives(target, pending)

    def _compute(self, step: Both) -> None:
        theory = self.theory
        instruction = theory.graph.instructions[step.instruction]
        inputs = [
            self.need((t, outer, inner))
            for t, outer, inner in zip(instruction.inputs, step.outer.pre, step.inner.pre, strict=True)
        ]
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
        keys = [
            (t, outer, inner)
            for t, outer, inner in zip(instruction.outputs, step.outer.post, step.inner.post, strict=True)
        ]
        function: Any = local_op(target) if isinstance(target, str) else target
        if theory.rules[instruction.id].random and isinstance(target, str):
            shape = list(theory.graph.tensors[keys[0][0]].shape)
            regions = [(r.dim, r.start, r.extent) for r in self.layout.regions(keys[0], self.at)]
            alike = self.layout.drawn_alike(instruction.id, step.outer, step.inner)
            given = (self.runtime, instruction.id, shape, regions, alike, function, local_args, local_kwargs)
            node = self.call(name, machines.draw_nested, given)
        else:
            node = self.call(name, function, local_args, local_kwargs)
        node.meta["instruction"] = instruction.id
        single = len(instruction.outputs) == 1 and not emit._returns_many(instruction)
        for index, key in enumerate(keys):
            if key[0] >= 0 and key not in self.produced:
                self.produced[key] = node if single else self.call(self.name(key), emit.item, (node, index))

    def finish(self, results: Any) -> None:
        """Wait for the collectives whose results nothing reads, and write the output."""
        for key in self._pending:
            self.need(key)
        self.graph.output(results)
        for node in reversed(self.graph.nodes):
            if node.target in (emit.item, machines.within) and not node.users:
                self.graph.erase_node(node)
