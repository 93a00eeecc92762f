"""What the start of a collective is given beside its tensor: dims and extents, and how a machine's tensor lies on
its accelerators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hetspmd.cluster.collective_kinds import KINDS, Kind
from hetspmd.placement import PARTIAL, REPLICATE, Placement, is_sharded, sharded_dim
from hetspmd.program.level_layout import Leg, LevelLayout, Part, RankPlace
from hetspmd.program.levels import Across, InsideCollective, value_of
from hetspmd.program.program import Communicate

One = Communicate | InsideCollective | Across
"""A collective by itself."""


def arguments(layout: LevelLayout, step: One, at: RankPlace) -> tuple[Any, ...]:
    """The dims and extents with which a collective is started."""
    if isinstance(step, Communicate):
        return _dims(step.kind, step.source, step.target, lambda f: layout.outer.extents(step.tensor, f))
    tensor = value_of(step)
    if isinstance(step, InsideCollective):
        above: tuple[int, ...] = (*tensor, step.outer)
    else:
        above = tensor
    level = len(above) - 1
    return _dims(step.kind, step.source, step.target, lambda f: layout.divided((*above, f), level, at))


def _dims(
    kind: Kind, source: Placement, target: Placement, extents: Callable[[Placement], Sequence[int]]
) -> tuple[Any, ...]:
    cuts = [(sharded_dim(end), extents(end)) for end in (source, target) if is_sharded(end)]
    return KINDS[kind].arguments(cuts)


def leg(layout: LevelLayout, step: Across, at: RankPlace) -> Leg:
    """What is collected inside a machine before a collective between machines, and handed out after it."""

    tensor = value_of(step)

    def part(form: Placement, inner: Placement) -> Part:
        if inner == PARTIAL:
            return "sum"
        if not is_sharded(inner):
            return None
        return sharded_dim(inner), layout.divided((*tensor, form, inner), len(tensor), at)

    def whole(form: Placement) -> list[int]:
        return list(layout.shape((*tensor, form, REPLICATE), at))

    return (
        part(step.source, step.collected),
        whole(step.source),
        part(step.target, step.handed_out),
        whole(step.target),
    )
