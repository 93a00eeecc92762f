"""Writing one local graph: steps become torch.fx nodes.

A value is a key, the tensor and its form on each level. It is there because a step produced it, or it is derived
for free from what is whole on a level: a slice for shard(d), for partial the tensor itself on the first
rank and zeros on the others. A collective is written as its start where its step stands, and as its wait where
its result is first read.

A node's ``meta`` says what it is the work of, for :mod:`hetspmd.record.record`: ``instruction`` (its id) or
``transfer`` (what a start carries); other nodes are waits, slices and copies. :data:`SHAPE` and :data:`DTYPE`
are those of values here, and :data:`VALUE` says which, for :mod:`hetspmd.lower.fuse`, which says in
:data:`ALSO` what other instructions a call does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from hetspmd.errors import PlanError
from hetspmd.lower import calls
from hetspmd.lower.attention import dropout_of, kernel_of
from hetspmd.lower.transfers import One, arguments, leg
from hetspmd.placement import PARTIAL, REPLICATE, is_sharded, placement_text, sharded_dim
from hetspmd.program.buckets import Bucket, Scheduled
from hetspmd.program.level_layout import LevelKey as Key
from hetspmd.program.level_layout import LevelLayout, RankPlace
from hetspmd.program.levels import (
    Across,
    Both,
    FlatKey,
    InsideCollective,
    NestedStep,
    Together,
    carried,
    keys_of,
    made_by,
    provider,
    rows_of,
)
from hetspmd.program.program import Compute
from hetspmd.rules.kernels import reader_of
from hetspmd.trace.evaluate import local_op
from hetspmd.trace.graph import Instruction, Ref
from hetspmd.trace.values import to_torch, torch_dtype

Lazy = Callable[[], fx.Node]
Awaited = Mapping[FlatKey, tuple[FlatKey, ...]]

aten = torch.ops.aten

SHAPE, DTYPE, ALSO, VALUE = "shape", "dtype", "also", "value"


class GraphWriter:
    """Writes the steps of one local graph for the rank at a place; all ranks write the same in the same order.

    ``constants`` gives a constant in a form that is no mask, by the tensor.
    """

    def __init__(self, layout: LevelLayout, at: RankPlace, device: torch.device) -> None:
        self.theory, self.layout, self.at, self.device = layout.theory, layout, at, device
        self.graph = fx.Graph()
        self.runtime = self.graph.placeholder("runtime")
        self.inside: fx.Node | None = None
        self.produced: dict[Key, fx.Node | Lazy] = {}
        self.constants: dict[int, Callable[[Key], fx.Node]] = {}
        self._pending: dict[Key, None] = {}
        self.awaited: Awaited = {}
        """Which collectives have arrived before the start of another one, by tensor and form (of one level)."""
        self._started: dict[FlatKey, tuple[Key, fx.Node]] = {}
        self._due: dict[FlatKey, None] = {}
        self.fused: frozenset[int] = frozenset()
        """Attentions with dropout that may be given to fused kernels, by instruction."""

    def start(self) -> None:
        """All inputs are there."""
        if self.layout.levels > 1:
            self.inside = self.call("within", calls.within, (self.runtime,))

    def name(self, key: Key) -> str:
        """An identifier for a value: of the tensor, and the dims that the levels cut."""
        levels = zip(("shard", "part"), key[1:], strict=False)
        parts = [f"{level}{sharded_dim(form)}" for level, form in levels if is_sharded(form)]
        return "_".join([identifier(self.theory.graph.tensors[key[0]].name), *parts])

    def call(
        self, name: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> fx.Node:
        """A call_function node."""
        return self.graph.create_node("call_function", target, args, kwargs or {}, name=name)

    def typed(self, node: fx.Node, key: Key) -> fx.Node:
        """The node, with the shape and dtype of the value here."""
        node.meta[SHAPE] = self.layout.shape(key, self.at)
        node.meta[DTYPE] = self.theory.graph.tensors[key[0]].dtype
        return valued(node, key)

    def need(self, key: Key) -> fx.Node:
        """A value, itself or derived. Raises PlanError if it is not there."""
        base = provider(self.produced, key)
        if base is None and key[0] in self.constants:
            base = (key[0], *(REPLICATE if form == PARTIAL else form for form in key[1:]))
            self.produced[base] = self.constants[key[0]](base)
        if base is None:
            name = self.theory.graph.tensors[key[0]].name
            forms = ", ".join(map(placement_text, key[1:]))
            raise PlanError(f"the program reads {name} | {forms}, which is not there")
        levels = [n for n, (have, want) in enumerate(zip(base[1:], key[1:], strict=True)) if have != want]
        if any(key[1 + n] == PARTIAL and self.layout.peers(n, self.at)[0] for n in levels):
            if self.layout.levels > 1 and self.ends_inside(base):
                self.need(base)  # one between machines ends inside them: all wait for it at one place
            node = self.zeros(key)
        else:
            value = self.produced[base]
            node = value if isinstance(value, fx.Node) else value()
            self.produced[base] = node
            for n in levels:
                base = (*base[: 1 + n], key[1 + n], *base[2 + n :])
                node = self.narrow(node, base, n)
        self.produced[key] = node
        return node

    def ends_inside(self, base: Key) -> bool:
        """Whether all accelerators of a machine wait for what a value is made of at one place."""
        return base in self._pending

    def zeros(self, key: Key) -> fx.Node:
        """The summand of a rank that contributes nothing."""
        kwargs = {"dtype": torch_dtype(self.theory.graph.tensors[key[0]].dtype), "device": self.device}
        shape = list(self.layout.shape(key, self.at))
        return self.call(f"{self.name(key)}_zero", aten.zeros.default, (shape,), kwargs)

    def narrow(self, whole: fx.Node, key: Key, level: int) -> fx.Node:
        """This rank's slice of what is whole on a level. A lone rank's is the whole, as is the first one's mask."""
        region = self.layout.region(key, level, self.at)
        if region is None or self.layout.peers(level, self.at)[1] == 1:
            return whole
        stop = region.start + region.extent
        return self.call(self.name(key), aten.slice.Tensor, (whole, region.dim, region.start, stop))

    def drawn_regions(self, key: Key) -> Any:
        """The part of a tensor that this rank draws: a slice of each level."""
        return [(r.dim, r.start, r.extent) for r in self.layout.regions(key, self.at)]

    def compact(self, key: Key) -> fx.Node:
        """A copy of a slice made as soon as the whole is there, so that the whole need not be kept."""
        base = provider(self.produced, key)
        whole = None if base is None or base == key else self.need(base)
        with self.graph.inserting_before((whole or self.need(key)).next):
            slice_ = self.need(key)
            if slice_ is whole:
                return slice_
            kwargs = {"memory_format": torch.contiguous_format}
            return self.typed(
                self.call(f"{self.name(key)}_saved", aten.clone.default, (slice_,), kwargs), key
            )

    def write(self, step: Scheduled | NestedStep) -> None:
        """Append a step."""
        if isinstance(step, (Compute, Both)):
            self._compute(step)
        elif isinstance(step, (Bucket, Together)):
            self._coalesce(step)
        else:
            self._communicate(step)

    def _communicate(self, step: One) -> None:
        ((source_key, target),) = carried(step)
        self._let_arrive((target,))
        if target in self.produced:
            return
        source = self.need(source_key)
        if self.layout.is_nothing(step):
            self.produced[target] = source
            return
        args = arguments(self.layout, step, self.at)
        name = f"{self.name(source_key)}_{step.kind}"
        if isinstance(step, Across):
            call_args = (self.runtime, step.kind, source, args, leg(self.layout, step, self.at))
            pending = self.call(f"{name}_across", calls.start_across, call_args)
        elif isinstance(step, InsideCollective):
            pending = self.call(f"{name}_inside", calls.start, (self.inside, step.kind, source, *args))
        else:
            pending = self.call(name, calls.start, (self.runtime, step.kind, source, *args))
        pending.meta["transfer"] = step
        self._goes(pending, (target,))
        self._arrives(target, calls.wait, (pending,))

    def _let_arrive(self, targets: Sequence[Key]) -> None:
        """From the next start on, those have arrived that are awaited where these values' collectives start."""
        for key in targets:
            self._due.update(dict.fromkeys(self.awaited.get((key[0], key[-1]), ())))

    def _goes(self, pending: fx.Node, targets: Sequence[Key]) -> None:
        """A collective starts, behind those that are due and that nothing has waited for."""
        due = [self._started[key] for key in self._due if key in self._started]
        behind = {node: None for key, node in due if not isinstance(self.produced[key], fx.Node)}
        if behind:
            pending.kwargs = {**pending.kwargs, "behind": tuple(behind)}
        self._due = {}
        self._started.update({(key[0], key[-1]): (key, pending) for key in targets})

    def _arrives(self, key: Key, target: Any, args: tuple[Any, ...]) -> None:
        """A value comes of a collective; it is waited for where it is first read."""
        whole = all(form == REPLICATE for form in key[1:])
        name = f"{self.name(key)}_whole" if whole else self.name(key)
        self.produced[key] = lambda: valued(self.call(name, target, args), key)
        self._pending[key] = None

    def _coalesce(self, bucket: Bucket | Together) -> None:
        pairs = [(m, *carried(m)[0]) for m in bucket.members]
        transfers = [(m, source, target) for m, source, target in pairs if target not in self.produced]
        self._let_arrive([target for _, _, target in pairs])
        if len(transfers) < 2 or all(self.layout.is_nothing(member) for member, _, _ in transfers):
            for member, _, _ in transfers:
                self._communicate(member)
            return
        sources = [self.need(source) for _, source, _ in transfers]
        args = [arguments(self.layout, m, self.at) for m, _, _ in transfers]
        name, kind = f"bucket_{bucket.kind}", bucket.kind
        if legs := [leg(self.layout, m, self.at) for m, _, _ in transfers if isinstance(m, Across)]:
            call_args = (self.runtime, kind, sources, args, legs)
            pending = self.call(f"{name}_across", calls.start_bucket_across, call_args)
        elif isinstance(bucket, Together):
            pending = self.call(f"{name}_inside", calls.start_bucket, (self.inside, kind, sources, args))
        else:
            pending = self.call(name, calls.start_bucket, (self.runtime, kind, sources, args))
        members: Any = tuple(m for m, _, _ in transfers)
        pending.meta["transfer"] = type(bucket)(members)
        self._goes(pending, [target for _, _, target in transfers])
        for index, (_, _, target) in enumerate(transfers):
            self._arrives(target, calls.take, (pending, index))

    def _compute(self, step: Compute | Both) -> None:
        theory, rows = self.theory, rows_of(step)
        instruction = theory.graph.instructions[step.instruction]
        if instruction.is_source:
            raise PlanError(f"{instruction.name} is a source and cannot be computed")
        inputs = [self.need(key) for key in keys_of(instruction.inputs, *(row.pre for row in rows))]
        if (reader := reader_of(instruction.op)) is not None:
            inputs = [self.call(f"{node.name}_dense", reader, (node,)) for node in inputs]
        local = self.layout.call(step.instruction, rows, self.at)
        if local is None:
            raise PlanError(
                f"{instruction.name} cannot run by {rows[0]} on machines and {rows[-1]} inside at once; "
                "compile the plan again"
            )
        target, args, kwargs = local

        def torch_value(value: Any) -> Any:
            return _fill(to_torch(value, self.device), inputs)

        local_args = tuple(torch_value(a) for a in args)
        local_kwargs = {k: torch_value(v) for k, v in kwargs.items()}
        keys = made_by(theory.graph, step)
        function: Any = local_op(target, self.device) if isinstance(target, str) else target
        name = identifier(instruction.name)
        if theory.rules[instruction.id].random and isinstance(target, str):
            shape = list(theory.graph.tensors[keys[0][0]].shape)
            regions = self.drawn_regions(keys[0])
            alike = self.layout.drawn_alike(instruction.id, rows)
            call_args = (
                self.runtime,
                instruction.id,
                shape,
                regions,
                alike,
                function,
                local_args,
                local_kwargs,
            )
            node = self.call(name, calls.draw, call_args)
        elif instruction.id in self.fused and (kernel := kernel_of(str(target), self.device)) is not None:
            drops = dropout_of(instruction) > 0.0
            node = self.call(
                name,
                calls.attend if drops else kernel,
                (self.runtime, function, local_args) if drops else local_args,
            )
        else:
            node = self.call(name, function, local_args, local_kwargs)
        node.meta["instruction"] = instruction.id
        single = len(instruction.outputs) == 1 and not _returns_many(instruction)
        for index, key in enumerate(keys):
            if key[0] >= 0 and key not in self.produced:
                value = node if single else self.call(self.name(key), item, (node, index))
                self.produced[key] = self.typed(value, key)

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


def identifier(name: str) -> str:
    """A Python identifier that reads like ``name``."""
    text = re.sub(r"\W+", "_", name).strip("_")
    return f"v{text}" if not text or text[0].isdigit() else text
