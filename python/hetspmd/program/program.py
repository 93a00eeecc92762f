"""A distributed program Q: computations and communications, in execution order (HAP Fig. 8)."""

from __future__ import annotations

from dataclasses import dataclass

from hetspmd.cluster.collective_kinds import KIND_TEXT, Kind
from hetspmd.placement import PARTIAL, REPLICATE, Placement, before_cut, is_sharded, shard, sharded_dim
from hetspmd.rules.rule import Row


@dataclass(frozen=True, slots=True)
class Compute:
    """Run an instruction of the reference graph by one of its triples."""

    instruction: int
    row: Row


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
    them, the updated parameters, each of which is whole on every device whatever of it is stored there.

    ``ahead``: how many groups of prefetched collectives are on their way ahead of the one that is used
    (:mod:`hetspmd.program.schedule`). Raises ValueError if it is less than 1."""

    steps: tuple[Step, ...]
    loss: Result | None
    outputs: tuple[Result, ...]
    gradients: tuple[Result, ...]
    buffers: tuple[Result, ...]
    ahead: int = 1

    def __post_init__(self) -> None:
        if self.ahead < 1:
            raise ValueError(f"{self.ahead} groups of collectives ahead; there is at least 1")


def communications(
    dims: tuple[int, ...], *, summable: bool, copied: tuple[int, ...] = ()
) -> tuple[tuple[Placement, Placement, Kind], ...]:
    """All communications of a tensor whose dims ``dims`` may be sharded (HAP Fig. 9).

    ``summable``: whether the tensor may be All-Reduce (not for bool). ``copied``: dims along which it may be a copy
    with the lengths of another segment, from which an all-to-all makes its own (HAP 5.2).
    """
    found: list[tuple[Placement, Placement, Kind]] = []
    forms = tuple(2 + d for d in dims)
    if summable:
        found.append((PARTIAL, REPLICATE, "all_reduce"))
        for f in forms:
            found.append((PARTIAL, f, "reduce_scatter"))
            found.append((PARTIAL, f, "grouped_reduce"))
            found.append((PARTIAL, f, "ring_reduce"))
            found.append((PARTIAL, f, "exchange_reduce"))
    for f in forms:
        found.append((f, REPLICATE, "all_gather"))
        found.append((f, REPLICATE, "grouped_broadcast"))
        found.append((f, REPLICATE, "ring_gather"))
        found.extend((f, g, "all_to_all") for g in forms if g != f)
    found.extend((before_cut(d), shard(d), "rebalance") for d in copied)
    return tuple(found)


def communication_text(step: Communicate, name: str) -> str:
    """``All-Gather(e3, 0)`` as in HAP Fig. 8."""
    dims = [str(sharded_dim(f)) for f in (step.source, step.target) if is_sharded(f)]
    if step.kind == "rebalance":
        dims.pop()
    return f"{KIND_TEXT[step.kind]}({', '.join([name, *dims])})"


__all__ = [
    "Communicate",
    "Compute",
    "Program",
    "Result",
    "Step",
    "communication_text",
    "communications",
]
