"""A distributed program Q: computations and communications, in execution order (HAP Fig. 8)."""

from __future__ import annotations

from dataclasses import dataclass

from hetspmd.cluster.collective_kinds import KINDS, Kind, kinds_between
from hetspmd.placement import PARTIAL, REPLICATE, Placement, before_cut, is_sharded, shard, sharded_dim
from hetspmd.rules.rule import Triple


@dataclass(frozen=True, slots=True)
class Compute:
    """Run an instruction of the reference graph by one of its triples."""

    instruction: int
    row: Triple


@dataclass(frozen=True, slots=True)
class Communicate:
    """Turn ``tensor | source`` into ``tensor | target`` by a collective."""

    tensor: int
    kind: Kind
    source: Placement
    target: Placement


Step = Compute | Communicate


@dataclass(frozen=True, slots=True)
class Result:
    """A value the program leaves behind: ``tensor`` in ``form``."""

    tensor: int
    form: Placement


@dataclass(frozen=True)
class Program:
    """Steps in execution order, the stored form of each parameter and buffer (implied by their source
    steps), and the forms of what is left: the loss (replicated), the outputs (in the graph's order, for those
    that are tensors), the gradients (in the order of the graph's parameters that have one: in their
    parameter's stored form) and what the forward writes (``buffers``, replicated): the updated buffers and, behind
    them, the updated parameters, each of which is whole on every device whatever of it is stored there."""

    steps: tuple[Step, ...]
    loss: Result | None
    outputs: tuple[Result, ...]
    gradients: tuple[Result, ...]
    buffers: tuple[Result, ...]


def communications(
    dims: tuple[int, ...], *, summable: bool, copied: tuple[int, ...] = ()
) -> tuple[tuple[Placement, Placement, Kind], ...]:
    """All communications of a tensor whose dims ``dims`` may be sharded (HAP Fig. 9).

    ``summable``: whether the tensor may be All-Reduce (not for bool). ``copied``: dims along which it may be a copy
    with the lengths of another segment, from which an all-to-all makes its own (HAP 5.2).
    """
    collectives: list[tuple[Placement, Placement, Kind]] = []
    forms = tuple(2 + d for d in dims)
    gathers, exchanges = kinds_between("shard", "replicated"), kinds_between("shard", "shard")
    if summable:
        collectives.extend((PARTIAL, REPLICATE, kind) for kind in kinds_between("partial", "replicated"))
        scatters = kinds_between("partial", "shard") if forms else ()
        collectives.extend((PARTIAL, f, kind) for f in forms for kind in scatters)
    for f in forms:
        collectives.extend((f, REPLICATE, kind) for kind in gathers)
        collectives.extend((f, g, kind) for g in forms if g != f for kind in exchanges)
    collectives.extend(
        (before_cut(d), shard(d), kind) for d in copied for kind in kinds_between("before_cut", "shard")
    )
    return tuple(collectives)


def communication_text(step: Communicate, name: str) -> str:
    """``All-Gather(e3, 0)`` as in HAP Fig. 8."""
    dims = [str(sharded_dim(f)) for f in (step.source, step.target) if is_sharded(f)]
    kind = KINDS[step.kind]
    if kind.keeps_dim:
        dims.pop()
    return f"{kind.text}({', '.join([name, *dims])})"
