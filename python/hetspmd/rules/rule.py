"""What a rule is: the factors of an op, from which its Hoare triples follow mechanically.

An op's dimensions are named by *factors*. For ``mm`` with ``"m k, k n -> m n"``:

- m and n are cut in inputs and outputs alike:  ``{a | shard(0), b | replicated} mm {c | shard(0)}``
- k is cut in the inputs, summed in the output: ``{a | shard(1), b | shard(0)} mm {c | partial}``
- mm is linear in each argument:                ``{a | partial, b | replicated} mm {c | partial}``
- always:                                        ``{a | replicated, b | replicated} mm {c | replicated}``

:func:`OpRule.rows` writes these out as :class:`Triple`; :class:`Local` is what an op's local rewrite sees when
its arguments change under sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from hetspmd.errors import RuleError
from hetspmd.placement import DIMS, PARTIAL, REPLICATE, Placement, placement_text, shard
from hetspmd.rules.kernels import empty_shards
from hetspmd.trace.graph import DEVICE, Argument, DType, Graph, Instruction, Ref, map_refs


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape and dtype of a tensor.

    Attributes:
        shape: Elements along each dim.
        dtype: The dtype's name, such as ``float32``.
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class Call:
    """An op call as a rule sees it: values, shapes and dtypes, no tensors.

    Attributes:
        op: The op's name, such as ``aten.mm.default``.
        args: Positional arguments. A tensor is ``Ref(i)``, with i an index into ``inputs``.
        kwargs: Keyword arguments, with tensors in the same form.
        inputs: The tensors in order of appearance in ``args``, then ``kwargs``.
        outputs: The results; None where the op returns None.
    """

    op: str
    args: tuple[Argument, ...]
    kwargs: Mapping[str, Argument]
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType | None, ...]

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """The argument at ``position`` or called ``name``, or else ``default``."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    def tensor(self, position: int, name: str = "") -> int | None:
        """The index in ``inputs`` of the tensor at ``position`` (or called ``name``); None if there is no
        tensor.
        """
        value = self.arg(position, name)
        return value.id if isinstance(value, Ref) else None

    @property
    def out(self) -> TensorType:
        """The first output.

        Raises:
            RuleError: It is None.
        """
        first = self.outputs[0]
        if first is None:
            raise RuleError(f"{self.op}: the first output is None")
        return first


@dataclass(frozen=True, slots=True)
class Cut:
    """Places a factor along a dim of a tensor.

    Attributes:
        dim: The dim.
        unit: Elements of the dim that make one indivisible unit of the factor.
    """

    dim: int
    unit: int = 1


class _Sum:
    """Places a factor that is summed. The tensor is All-Reduce when the factor is sharded."""

    def __repr__(self) -> str:
        return "SUM"


SUM: Final = _Sum()

Place = Cut | _Sum | None
"""Where a factor lies in a tensor: a Cut, SUM (partial), or None (the tensor is whole: replicated)."""


@dataclass(frozen=True, slots=True)
class Factor:
    """One factor of an op: an independent index over which the op loops.

    Attributes:
        name: A name that is unique in the rule.
        size: How many indivisible units the factor has.
        inputs: The place of the factor in each input: a :class:`Cut`, :data:`SUM`, or None for a tensor that
            is whole.
        outputs: The place in each output. None claims that the output is whole on every device although the
            factor is sharded; write :data:`SUM` for a reduction.
    """

    name: str
    size: int
    inputs: tuple[Place, ...]
    outputs: tuple[Place, ...]

    @property
    def nameable(self) -> bool:
        """Whether a placement can say that the factor is cut. It cannot if a tensor is cut beyond its first
        ``DIMS`` dims.
        """
        places = (*self.inputs, *self.outputs)
        return all(place.dim < DIMS for place in places if isinstance(place, Cut))


@dataclass(frozen=True, slots=True)
class Triple:
    """A triple of one op: the placements that its inputs need, and those that its outputs then have.

    Attributes:
        name: The factor's name, ``linear(...)`` or ``always``.
        pre: The placement of each input.
        post: The placement of each output.
        factor: The index in the rule of the sharded factor; None where the whole op runs on every device.
    """

    name: str
    pre: tuple[Placement, ...]
    post: tuple[Placement, ...]
    factor: int | None = None

    def __str__(self) -> str:
        pre = ", ".join(map(placement_text, self.pre))
        return f"{{{pre}}} {self.name} {{{', '.join(map(placement_text, self.post))}}}"


Target = str | Callable[..., Any]
LocalCall = tuple[Target, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Local:
    """What one device knows when a call is rewritten for it.

    Attributes:
        call: The call on whole tensors.
        rule: The rule of the op.
        row: The triple that the program uses.
        rank: The device.
        world: The number of devices.
        start: The first unit of the row's factor that this device holds (0 without a factor).
        stop: The unit after the last one (0 without a factor).
        input_shapes: The local shape of each input.
        output_shapes: The local shape of each output.
    """

    call: Call
    rule: OpRule
    row: Triple
    rank: int
    world: int
    start: int
    stop: int
    input_shapes: tuple[tuple[int, ...], ...]
    output_shapes: tuple[tuple[int, ...], ...]

    @property
    def factor(self) -> Factor | None:
        """The sharded factor; None where the whole op runs on every device."""
        return None if self.row.factor is None else self.rule.factors[self.row.factor]

    def default(self) -> LocalCall:
        """The call ``(target, args, kwargs)``, its shape arguments replaced by local shapes.

        The target is an op name or a function; tensors are still ``Ref(i)``. A rewrite returns the same.
        """
        args = list(self.call.args)
        kwargs = dict(self.call.kwargs)
        for key, output in self.rule.shape_args.items():
            shape = self.output_shapes[output]
            if isinstance(key, str):
                kwargs[key] = shape
            elif key < len(args):
                args[key] = shape
        return self.call.op, tuple(args), kwargs


Rewrite = Callable[[Local], LocalCall]


@dataclass(frozen=True)
class OpRule:
    """The rule of one op call, from which its triples follow.

    Attributes:
        factors: What may be sharded. A dim that belongs to no factor is never sharded.
        linear: Sets of input indices. All inputs of a set may be partial at once, the others replicated; all
            outputs are then All-Reduce.
        shape_args: Position (or keyword) of an argument that is an output's shape to the index of that
            output.
        rewrite: Makes the local call where more than shapes changes; None for :meth:`Local.default`.
        flops: Floating-point operations of the whole op (FLOPs).
        alias: The op only makes a view and costs nothing.
        random: The op draws random numbers.
        omitted: Text of a triple that holds and is left out on purpose, in DTensor's words or in HAP's, to the
            reason, for the oracle.
    """

    factors: tuple[Factor, ...] = ()
    linear: tuple[frozenset[int], ...] = ()
    shape_args: Mapping[int | str, int] = field(default_factory=dict)
    rewrite: Rewrite | None = None
    flops: float = 0.0
    alias: bool = False
    random: bool = False
    omitted: Mapping[str, str] = field(default_factory=dict)

    def verify(self, call: Call) -> None:
        """Check that the rule fits the call's shapes.

        Raises:
            RuleError: It does not; the message names the op, the tensor and the dim.
        """
        where = f"rule of {call.op}"
        names = [f.name for f in self.factors]
        if len(set(names)) != len(names):
            raise RuleError(f"{where}: two factors share a name: {names}")
        used: dict[tuple[str, int, int], str] = {}
        for f in self.factors:
            if f.size < 1:
                raise RuleError(f"{where}: factor {f.name} has {f.size} units; leave an empty dim out")
            for side, places, types in (
                ("input", f.inputs, call.inputs),
                ("output", f.outputs, call.outputs),
            ):
                if len(places) != len(types):
                    raise RuleError(
                        f"{where}: factor {f.name} places {len(places)} {side}s, the call has {len(types)}"
                    )
                for i, (place, type_) in enumerate(zip(places, types, strict=True)):
                    if isinstance(place, Cut):
                        _verify_cut(where, f, side, i, place, type_, used)
                    elif isinstance(place, _Sum) and type_ is not None and type_.dtype == "bool":
                        raise RuleError(f"{where}: factor {f.name}: bool {side} {i} cannot be a sum")
        for group in self.linear:
            if not group or not all(0 <= i < len(call.inputs) for i in group):
                raise RuleError(f"{where}: linear inputs {sorted(group)} of {len(call.inputs)}")
            if any(t is not None and t.dtype == "bool" for t in call.outputs):
                raise RuleError(f"{where}: a bool output cannot be All-Reduce")
        for key, output in self.shape_args.items():
            if not 0 <= output < len(call.outputs):
                raise RuleError(
                    f"{where}: shape argument {key!r} names output {output} of {len(call.outputs)}"
                )

    def rows(self, call: Call) -> tuple[Triple, ...]:
        """The triples of a call: ``always`` first, then one per factor, then one per linear set."""
        n_in, n_out = len(call.inputs), len(call.outputs)
        rows = [Triple("always", (REPLICATE,) * n_in, (REPLICATE,) * n_out)]
        for index, f in enumerate(self.factors):
            if f.size < 2 or not f.nameable:
                continue
            pre, post = tuple(map(_form, f.inputs)), tuple(map(_form, f.outputs))
            rows.append(Triple(f.name, pre, post, index))
        for group in self.linear:
            pre = tuple(PARTIAL if i in group else REPLICATE for i in range(n_in))
            name = "linear(" + ",".join(map(str, sorted(group))) + ")"
            rows.append(Triple(name, pre, (PARTIAL,) * n_out))
        unique: dict[tuple[tuple[Placement, ...], tuple[Placement, ...]], Triple] = {}
        for row in rows:
            unique.setdefault((row.pre, row.post), row)
        return tuple(unique.values())


def _verify_cut(
    where: str,
    f: Factor,
    side: str,
    i: int,
    cut: Cut,
    type_: TensorType | None,
    used: dict[tuple[str, int, int], str],
) -> None:
    if type_ is None:
        raise RuleError(f"{where}: factor {f.name} cuts {side} {i}, which is None")
    if not 0 <= cut.dim < type_.ndim:
        raise RuleError(
            f"{where}: factor {f.name} cuts dim {cut.dim} of {side} {i}, shape {list(type_.shape)}"
        )
    if f.size * cut.unit != type_.shape[cut.dim]:
        raise RuleError(
            f"{where}: factor {f.name} has {f.size} units of {cut.unit}, but dim {cut.dim} of {side} {i} "
            f"has {type_.shape[cut.dim]} elements"
        )
    key = (side, i, cut.dim)
    if key in used:
        raise RuleError(f"{where}: factors {used[key]} and {f.name} both cut dim {cut.dim} of {side} {i}")
    used[key] = f.name


def _form(place: Place) -> Placement:
    if isinstance(place, Cut):
        return shard(place.dim)
    return REPLICATE if place is None else PARTIAL


def call_of(graph: Graph, instruction: Instruction) -> Call:
    """The instruction as its rule sees it."""
    counter = iter(range(len(instruction.inputs)))

    def renumber(_: Ref) -> Ref:
        return Ref(next(counter))

    args = map_refs(instruction.args, renumber)
    kwargs = {k: map_refs(v, renumber) for k, v in instruction.kwargs}
    inputs = tuple(TensorType(graph.tensors[t].shape, graph.tensors[t].dtype) for t in instruction.inputs)
    outputs = tuple(
        TensorType(graph.tensors[t].shape, graph.tensors[t].dtype) if t >= 0 else None
        for t in instruction.outputs
    )
    return Call(instruction.op, args, kwargs, inputs, outputs)


def local_shape(shape: tuple[int, ...], place: Place, extent: int) -> tuple[int, ...]:
    """The local shape where ``extent`` units of a factor at ``place`` are held."""
    if isinstance(place, Cut):
        return (*shape[: place.dim], extent * place.unit, *shape[place.dim + 1 :])
    return shape


def localize(
    call: Call, rule: OpRule, row: Triple, rank: int, world: int, start: int, stop: int
) -> LocalCall:
    """The call that one device makes for ``row`` when it holds units ``start..stop`` of the row's factor."""
    factor = None if row.factor is None else rule.factors[row.factor]

    def shapes(
        types: tuple[TensorType | None, ...], places: tuple[Place, ...] | None
    ) -> tuple[tuple[int, ...], ...]:
        local_shapes = []
        for i, type_ in enumerate(types):
            shape = () if type_ is None else type_.shape
            local_shapes.append(shape if places is None else local_shape(shape, places[i], stop - start))
        return tuple(local_shapes)

    local = Local(
        call,
        rule,
        row,
        rank,
        world,
        start,
        stop,
        shapes(call.inputs, factor.inputs if factor else None),
        shapes(call.outputs, factor.outputs if factor else None),
    )
    if factor is not None and start == stop and SUM not in factor.inputs:
        present = [t is not None for t in call.outputs]
        if not any(here and place is None for here, place in zip(present, factor.outputs, strict=True)):
            dtypes = tuple(None if t is None else DType(t.dtype) for t in call.outputs)
            return empty_shards, (local.output_shapes, dtypes, DEVICE), {}
    return rule.rewrite(local) if rule.rewrite is not None else local.default()
