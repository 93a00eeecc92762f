"""The kinds of collectives: one record has what the compiler knows of a kind.

A kind is one way to turn a placement of a tensor into another. Programs name it, links are measured by it, and its
record in :data:`KINDS` says how it is shown, priced and counted. Two things are said elsewhere, by the same name:
what starts a kind on a communicator (:mod:`hetspmd.dist.collectives`), and what a kind proves
(:mod:`hetspmd.program.checker`, which keeps a list of its own, so that a mistake made here is found there).

For a tensor of E bytes over n devices, with M the largest share, k the devices with a share, L the latency and
b the bandwidth of the link, and s and t a device's shares of the source's and of the result's axis, a kind takes
these seconds where no curve of it was measured:

    all_reduce                          2 L + 2 (n - 1) / n E / b       ring: reduce-scatter, all-gather
    reduce_scatter, all_gather          L + (n - 1) M E / b             ring, padded to the largest shard
    grouped_reduce, grouped_broadcast   k L + E / b                     one pipelined operation per shard
    ring_reduce, ring_gather            as the grouped; so exchange_reduce
    all_to_all                          L + X E / b,  X = max_j max(s_j (1 - t_j), t_j (1 - s_j))
    rebalance                           an all_to_all along one dim: :mod:`hetspmd.cost.rebalance`

In an all-to-all device j sends its slice but for the part that it keeps, and receives its new slice but for that
part. Ring formulas are those of Thakur, Rabenseifner and Gropp, IJHPCA 2005; padding and grouping of HAP 2.5.1.

Until it has completed, a collective holds these bytes on a device besides its operand and its result:

    all_reduce          0
    reduce_scatter      n M E + (M - t) E       what is summed, padded, and a padded result
    grouped_reduce      (1 - t) E               what is summed; so ring_reduce
    exchange_reduce     E + (n - 1) t E         what is sent, and the n parts that are summed; then n t E more
    all_gather          (n M - 1) E             padded; while it is cut to size or moved from dim 0, n M E
    grouped_broadcast   0                       while it is moved from dim 0, E; so ring_gather
    all_to_all          s E                     what is sent; while the result is put together, (s + t) E
    rebalance           as all_to_all
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Final, Literal, NamedTuple

from hetspmd.cluster.collective_buffers import NOTHING, Buffers, Carried, HeldBytes
from hetspmd.placement import PARTIAL, Placement, is_before_cut, is_sharded

Kind = Literal[
    "all_reduce",
    "reduce_scatter",
    "grouped_reduce",
    "ring_reduce",
    "exchange_reduce",
    "all_gather",
    "grouped_broadcast",
    "ring_gather",
    "all_to_all",
    "rebalance",
]

End = Literal["partial", "replicated", "shard", "before_cut"]
"""A placement but for its dim; ``before_cut`` is a copy that lies as in the segment that it comes from."""


class Terms(NamedTuple):
    """Seconds as a sum: ``latency + per_shard k + (per_byte + per_largest M + per_exchange X) E``.

    In a formula the first two are in latencies of the link and the others in ``1 / b``; in a curve
    (:class:`hetspmd.cluster.curves.Curve`) they are in seconds and in seconds per byte.
    """

    latency: float = 0.0
    per_shard: float = 0.0
    per_byte: float = 0.0
    per_largest: float = 0.0
    per_exchange: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CollectiveKind:
    """What the compiler knows of a kind of collectives.

    name         in programs, plan files and measured curves
    text         as people read it
    source       the placement that it turns
    target       the placement that it gives; of an All-to-All another dim's
    formula      the terms of its seconds between n devices where it was not measured
    terms        those that a measured curve may have, with local copies in ``per_byte``; () if it is not measured
    measured_as  the kind whose curve it has while it has none of its own
    lone         the kind as which it runs where one device holds the whole tensor, None if it runs as itself
    coalesces    whether small ones share a bucket
    in_place     whether it can work in the memory of its operand
    copies       whether its start has copied an operand that is not spare; otherwise it may read the operand
                 until it has arrived
    buffers      what it holds for itself; None if that is nothing
    """

    name: Kind
    text: str
    source: End
    target: End
    formula: Callable[[int], Terms]
    terms: tuple[str, ...]
    measured_as: Kind | None = None
    lone: Kind | None = None
    coalesces: bool = False
    in_place: bool = False
    copies: bool = False
    buffers: Callable[[Carried], Buffers] | None = None

    @cached_property
    def gathers(self) -> bool:
        """Whether slices become the whole tensor on every device."""
        return self.source == "shard" and self.target == "replicated"

    @cached_property
    def scatters(self) -> bool:
        """Whether each device gets its slice of a sum."""
        return self.source == "partial" and self.target == "shard"

    @cached_property
    def keeps_dim(self) -> bool:
        """Whether slices stay along their dim and only their lengths change: nothing is sent if these agree."""
        return self.source == "before_cut"

    @cached_property
    def sharded_ends(self) -> int:
        """How many of source and target are sharded: 0, 1 or 2."""
        return sum(end in ("shard", "before_cut") for end in (self.source, self.target))

    def arguments(self, cuts: Sequence[tuple[int, Sequence[int]]]) -> tuple[Any, ...]:
        """The arguments of the kind's start behind the tensor; ``cuts`` has ``(dim, extents)`` of its sharded ends,
        the source's first."""
        if len(cuts) < 2:
            return tuple(chain.from_iterable(cuts))
        (source, before), (target, after) = cuts
        return (target, before, after) if self.keeps_dim else (source, target, before, after)


def _ring_of_all(n: int) -> Terms:
    return Terms(latency=2.0, per_byte=2 * (n - 1) / n)


def _padded_ring(n: int) -> Terms:
    return Terms(latency=1.0, per_largest=float(n - 1))


def _one_per_shard(n: int) -> Terms:
    return Terms(per_shard=1.0, per_byte=1.0)


def _exchange(n: int) -> Terms:
    return Terms(latency=1.0, per_exchange=1.0)


def _padded_reduce(c: Carried) -> Buffers:
    padded = c.world * c.largest
    freed = c.spare and padded == c.nbytes and not c.moved
    return Buffers(
        flight=HeldBytes(padded + c.largest, -c.nbytes),
        early=True,
        freed=c.nbytes if freed else 0,
    )


def _exact_reduce(c: Carried) -> Buffers:
    freed = c.spare and not c.moved
    return Buffers(
        flight=HeldBytes(c.nbytes, -c.nbytes),
        end=HeldBytes(sharded=c.nbytes) if freed and c.several else NOTHING,
        early=True,
        freed=c.nbytes if freed else 0,
    )


def _exchanged_parts(c: Carried) -> Buffers:
    return Buffers(
        flight=HeldBytes(c.nbytes, (c.world - 1) * c.nbytes),
        end=HeldBytes(sharded=c.world * c.nbytes),
        early=True,
    )


def _padded_gather(c: Carried) -> Buffers:
    padding = c.world * c.largest - c.nbytes
    copied = c.moved or c.bucket or padding > 0
    return Buffers(
        flight=HeldBytes(padding),
        end=HeldBytes(c.nbytes) if copied else NOTHING,
        early=padding > 0,
    )


def _exact_gather(c: Carried) -> Buffers:
    return Buffers(end=HeldBytes(c.nbytes) if c.moved else NOTHING)


def _slices(c: Carried) -> Buffers:
    return Buffers(flight=HeldBytes(sharded=c.nbytes), end=HeldBytes(target=c.nbytes))


_PADDED: Final = ("latency", "per_byte", "per_largest")
_EXACT: Final = ("latency", "per_shard", "per_byte", "per_largest")

_RECORDS: Final = (
    CollectiveKind(
        name="all_reduce",
        text="All-Reduce",
        source="partial",
        target="replicated",
        formula=_ring_of_all,
        terms=("latency", "per_byte"),
        coalesces=True,
        in_place=True,
        copies=True,
    ),
    CollectiveKind(
        name="reduce_scatter",
        text="Reduce-Scatter",
        source="partial",
        target="shard",
        formula=_padded_ring,
        terms=_PADDED,
        lone="grouped_reduce",
        coalesces=True,
        in_place=True,
        buffers=_padded_reduce,
    ),
    CollectiveKind(
        name="grouped_reduce",
        text="Grouped-Reduce",
        source="partial",
        target="shard",
        formula=_one_per_shard,
        terms=_EXACT,
        in_place=True,
        copies=True,
        buffers=_exact_reduce,
    ),
    CollectiveKind(
        name="ring_reduce",
        text="Ring-Reduce",
        source="partial",
        target="shard",
        formula=_one_per_shard,
        terms=_EXACT,
        measured_as="grouped_reduce",
        in_place=True,
        copies=True,
        buffers=_exact_reduce,
    ),
    CollectiveKind(
        name="exchange_reduce",
        text="Exchange-Reduce",
        source="partial",
        target="shard",
        formula=_one_per_shard,
        terms=_EXACT,
        measured_as="grouped_reduce",
        buffers=_exchanged_parts,
    ),
    CollectiveKind(
        name="all_gather",
        text="All-Gather",
        source="shard",
        target="replicated",
        formula=_padded_ring,
        terms=_PADDED,
        lone="grouped_broadcast",
        coalesces=True,
        buffers=_padded_gather,
    ),
    CollectiveKind(
        name="grouped_broadcast",
        text="Grouped-Broadcast",
        source="shard",
        target="replicated",
        formula=_one_per_shard,
        terms=_EXACT,
        buffers=_exact_gather,
    ),
    CollectiveKind(
        name="ring_gather",
        text="Ring-Gather",
        source="shard",
        target="replicated",
        formula=_one_per_shard,
        terms=_EXACT,
        measured_as="grouped_broadcast",
        buffers=_exact_gather,
    ),
    CollectiveKind(
        name="all_to_all",
        text="All-To-All",
        source="shard",
        target="shard",
        formula=_exchange,
        terms=("latency", "per_byte", "per_exchange"),
        buffers=_slices,
    ),
    CollectiveKind(
        name="rebalance",
        text="Rebalance",
        source="before_cut",
        target="shard",
        formula=_exchange,
        terms=(),
        measured_as="all_to_all",
        buffers=_slices,
    ),
)

KINDS: Final[dict[Kind, CollectiveKind]] = {record.name: record for record in _RECORDS}
"""By name. Of two kinds that cost the same the search takes the first; the first between two placements is the one
that runs among the accelerators of a machine."""


def end_of(placement: Placement) -> End:
    """A placement without its dim."""
    if is_sharded(placement):
        return "before_cut" if is_before_cut(placement) else "shard"
    return "partial" if placement == PARTIAL else "replicated"


def kinds_between(source: End, target: End) -> tuple[Kind, ...]:
    """The kinds that turn one placement into the other, in the order of :data:`KINDS`."""
    return tuple(name for name, kind in KINDS.items() if kind.source == source and kind.target == target)
