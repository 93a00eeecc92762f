"""Batches of which every rank is given its own rows (``HAP(..., batch="own")``): which rows, and of which batch.

:func:`hetspmd.loader` says of each batch that it yields what it is. When the model is called, its tensors tell the
batch: they lie in the memory that the loader has yielded. From then on a step is as with whole batches: each
tensor of rows becomes one of the whole shape, in which this rank's rows stand at their places, and nothing
depends on the others.

The loader chooses the rows before the call, by the plan that served its batches of that size before. Where another
plan runs (the first batch of a shape, a mode that changed), the rows are gathered from the ranks that have them,
and so are small inputs of which a rank needs more than it loads. All ranks know the rows of all, so that they
gather together or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Final, Literal

import torch

from hetspmd.dist.collectives import start_all_gather
from hetspmd.dist.communicator import Communicator
from hetspmd.dist.digest import digest
from hetspmd.dist.own_rows_words import ORDER, OWN
from hetspmd.errors import BatchMismatchError
from hetspmd.lower import active_ranks
from hetspmd.plan.plan import Plan
from hetspmd.run.guard import Expected, match
from hetspmd.run.own_words import (
    another_shape,
    counted,
    mixed_batches,
    no_loader,
    not_alike,
    two_kinds,
    unsure,
)
from hetspmd.run.row_shares import Needs, Share, even_share, needs_of, own_first, placed
from hetspmd.trace.admissible import argument_names, spoken
from hetspmd.trace.compat.storages import Memory
from hetspmd.trace.compat.trees import flatten, flatten_with_names, unflatten
from hetspmd.trace.trace import leaf_path
from hetspmd.trace.values import dtype_name

Kind = Literal["rows", "whole"]
"""What a tensor of a batch is on a rank: its rows, or the same on every rank."""

_TRIED: Final = 4
"""Tensors that the loader has not yielded of which both kinds are tried."""


@dataclass(eq=False)
class Given:
    """A batch that a loader yields: ``order`` is a digest of the samples of the whole batch, in order."""

    loader: int
    epoch: int
    number: int
    share: Share
    order: int
    used: bool = False


@dataclass(eq=False)
class _Leaf:
    """A tensor of a call: as it was given, and with the shape of the whole batch."""

    path: str
    given: torch.Tensor
    kind: Kind
    known: bool
    whole: torch.Tensor

    @property
    def is_part(self) -> bool:
        """Whether this rank was not given all rows."""
        return self.whole.shape != self.given.shape


@dataclass
class OwnBatch:
    """A call with a rank's own rows: the arguments as those of the whole batch, and what they were made of."""

    batch: Given
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[_Leaf]
    desk: OwnRows
    state: str = ""
    needs: Needs | None = None
    gathered: list[_Leaf] = field(default_factory=list)

    @property
    def words(self) -> str:
        """What the call begins with in messages."""
        return f"{OWN} {self.batch.share.size}"

    def agree(self, everyone: Communicator) -> None:
        """Raise BatchMismatchError, on every rank, unless the ranks' tensors are rows of one batch, for which
        there is no plan yet. Blocks."""
        said = [
            (
                leaf.path,
                leaf.kind,
                dtype_name(leaf.given.dtype),
                tuple(leaf.given.shape[leaf.kind == "rows" :]),
                int(digest(leaf.given)) if leaf.is_part and not leaf.known else None,
            )
            for leaf in self.leaves
        ]
        told = everyone.exchange(said)
        if any([leaf[0] for leaf in other] != [leaf[0] for leaf in said] for other in told):
            return  # which the plan of rank 0 will tell
        for place, (path, *_) in enumerate(said):
            of = [other[place] for other in told]
            if len({kind for _, kind, *_ in of}) > 1:
                raise BatchMismatchError(two_kinds(path, [kind for _, kind, *_ in of]))
            if len({leaf[1:4] for leaf in of}) > 1:
                raise BatchMismatchError(another_shape(path, of[0][1], [leaf[2:4] for leaf in of]))
            contents = {leaf[4] for leaf in of}
            if len(of) > 1 and len(contents) == 1 and None not in contents:
                raise BatchMismatchError(unsure(path))

    def fit(self, plan: Plan, inputs: Sequence[torch.Tensor]) -> None:
        """Find out what has to be gathered for a plan, on all ranks alike; ``state`` says it then."""
        batch = self.batch
        self.needs = self.desk.needs(plan, batch.share.size)
        places = {id(tensor): place for place, tensor in enumerate(inputs)}
        self.gathered = [
            leaf
            for leaf in self.leaves
            if leaf.kind == "rows" and not self.needs.covered(places[id(leaf.whole)], batch.share)
        ]
        if not batch.used:
            batch.used = True
            self.desk.serves(batch, plan)
        self.state = ", ".join(
            ["", f"rows of {batch.share.size}", *(f"gathers {leaf.path}" for leaf in self.gathered)]
        )

    def complete(self, *, check: bool = False) -> None:
        """Let the tensors hold what this rank needs. Blocks where rows have to be gathered, or are to be checked
        (:meth:`check_shared`)."""
        everyone = self.desk.everyone
        assert self.needs is not None
        share, rank = self.batch.share, everyone.rank
        with torch.no_grad():
            pending = []
            for leaf in self.gathered:
                sent, extents, back = own_first(leaf.given, share, rank)
                pending.append((leaf, back, start_all_gather(_Member(everyone), sent, 0, extents)))
            for leaf in self.leaves:
                if leaf.is_part and leaf not in self.gathered:
                    placed(leaf.given, share, rank, leaf.whole, filled=self.needs.touched[rank])
            for leaf, back, rows in pending:
                gathered = rows.wait()
                if leaf.is_part:
                    leaf.whole.copy_(gathered[back])
        if check:
            self.check_shared(everyone)

    def compared(
        self, names: Sequence[str], inputs: Sequence[torch.Tensor]
    ) -> tuple[list[str], list[torch.Tensor]]:
        """What is compared between the ranks in every step: which samples the batch has, and what of it is the
        same on every rank."""
        batch, share = self.batch, self.batch.share
        everywhere = all(share.count(rank) == share.size for rank in range(len(share.rows)))
        rows = set() if everywhere else {id(leaf.whole) for leaf in self.leaves if leaf.kind == "rows"}
        pairs = [(name, t) for name, t in zip(names, inputs, strict=True) if id(t) not in rows]
        order = torch.tensor([batch.loader, batch.epoch, batch.number, share.size, batch.order])
        return [ORDER, *(name for name, _ in pairs)], [order, *(t for _, t in pairs)]

    def check_shared(self, everyone: Communicator) -> None:
        """Raise BatchMismatchError, on every rank, unless ranks that load the same row got the same. Blocks."""
        shared = self.batch.share.shared()
        if not shared:
            return
        rank = everyone.rank
        places = {row: place for place, row in enumerate(self.batch.share.indices(rank))}
        rows = [leaf for leaf in self.leaves if leaf.kind == "rows"]
        mine = [row for row, ranks in shared if rank in ranks]
        told = everyone.exchange(
            [{row: int(digest(leaf.given[places[row]], whole=True)) for row in mine} for leaf in rows]
        )
        for index, leaf in enumerate(rows):
            for row, ranks in shared:
                if len({told[r][index][row] for r in ranks}) > 1:
                    raise BatchMismatchError(not_alike(leaf.path, row, ranks))


@dataclass
class _Member:
    communicator: Communicator


class OwnRows:
    """What the loaders of a HAP module have yielded. Copies of the module share it.

    ``plans`` gives the plans that there are, the first one first.
    """

    def __init__(self, everyone: Communicator, plans: Callable[[], Sequence[Plan]]) -> None:
        self.everyone, self._plans = everyone, plans
        self.loaders = 0
        self._known: dict[Memory, tuple[Given, Kind]] = {}
        self._shares: dict[tuple[int, int], tuple[Plan, Needs, Share]] = {}
        self._served: dict[tuple[int, int], Plan] = {}

    def share(self, size: int, loader: int) -> Share:
        """The rows of the next batch of this size: as the loader's last one of the size was used; else as a plan
        that there is has them; else even parts."""
        plan = self._served.get((loader, size))
        if plan is not None:
            return self.share_by(plan, size)
        for known in self._plans():
            if any(known.graph.tensors[i.tensor].shape[:1] == (size,) for i in known.graph.inputs):
                return self.share_by(known, size)
        return even_share(self._plans()[0], size)

    def share_by(self, plan: Plan, size: int) -> Share:
        """What each rank loads by a plan."""
        return self._needed(plan, size)[2]

    def needs(self, plan: Plan, size: int) -> Needs:
        """What each rank needs by a plan."""
        return self._needed(plan, size)[1]

    def _needed(self, plan: Plan, size: int) -> tuple[Plan, Needs, Share]:
        key = id(plan), size
        if key not in self._shares:
            with self.everyone.busy():
                needs = needs_of(plan, size)
                self._shares[key] = plan, needs, needs.share(active_ranks(plan))
        return self._shares[key]

    def serves(self, batch: Given, plan: Plan) -> None:
        """Batches of this loader and size are used with this plan."""
        self._served[batch.loader, batch.share.size] = plan

    def give(self, batch: Given, tensors: Sequence[tuple[torch.Tensor, Kind]]) -> None:
        """A loader is about to yield these tensors of a batch."""
        for reference in [r for r in self._known if r.is_free()]:
            del self._known[reference]
        for tensor, kind in sorted(
            tensors, key=lambda t: t[1], reverse=True
        ):  # rows are known last, and stay
            self._known[Memory(tensor)] = batch, kind

    def taken(
        self,
        called: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        expectations: Sequence[Expected],
    ) -> OwnBatch:
        """The batch of a call of ``called``, with the shapes of the whole batch.

        Raises BatchMismatchError for tensors that no loader has yielded, or that are not this rank's rows.
        """
        names = argument_names(called, args)
        paths = [spoken(leaf_path(name), names) for name, _ in flatten_with_names((args, dict(kwargs)))]
        leaves, spec = flatten((args, dict(kwargs)))
        tensors = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        found = {k: self._known.get(Memory(leaves[k])) for k in tensors}
        batches = {id(f[0]): f[0] for f in found.values() if f is not None}
        if not any(f is not None and f[1] == "rows" for f in found.values()):
            raise BatchMismatchError(no_loader(self.everyone.rank, self.loaders))
        if len(batches) > 1:
            raise BatchMismatchError(mixed_batches(self.everyone.rank))
        (batch,) = batches.values()
        count = batch.share.count(self.everyone.rank)
        for k in tensors:
            known = found[k]
            if known is not None and known[1] == "rows" and leaves[k].shape[:1] != (count,):
                shape = tuple(leaves[k].shape)
                raise BatchMismatchError(counted(self.everyone.rank, paths[k], shape, batch.share))
        kinds = self._kinds(batch.share, leaves, spec, found, expectations)
        listed = [
            _Leaf(
                paths[k], leaves[k], kinds[k], found[k] is not None, _whole(leaves[k], kinds[k], batch.share)
            )
            for k in tensors
        ]
        for k, leaf in zip(tensors, listed, strict=True):
            leaves[k] = leaf.whole
        whole_args, whole_kwargs = unflatten(leaves, spec)
        return OwnBatch(batch, whole_args, whole_kwargs, listed, self)

    def _kinds(
        self,
        share: Share,
        leaves: Sequence[Any],
        spec: Any,
        found: Mapping[int, tuple[Given, Kind] | None],
        expectations: Sequence[Expected],
    ) -> dict[int, Kind]:
        """What each tensor is. Of one that the loader has not yielded, which has as many rows as this rank, a plan
        tells it; rows, where none does."""
        count = share.count(self.everyone.rank)
        kinds: dict[int, Kind] = {k: "whole" if f is None else f[1] for k, f in found.items()}
        open_ = [k for k, f in found.items() if f is None and leaves[k].shape[:1] == (count,)]
        if count == share.size or not open_:
            return kinds
        both: tuple[Kind, Kind] = ("rows", "whole")
        for choice in product(both, repeat=min(len(open_), _TRIED)):
            tried: dict[int, Kind] = {**kinds, **dict.fromkeys(open_, "rows")}
            tried.update(zip(open_, choice, strict=False))
            stand_ins = [
                _whole(leaf, tried[k], share) if k in tried else leaf for k, leaf in enumerate(leaves)
            ]
            args, kwargs = unflatten(stand_ins, spec)
            if any(match(e, args, kwargs)[0] is not None for e in expectations):
                return tried
        for k in open_:
            shape = tuple(leaves[k].shape), dtype_name(leaves[k].dtype)
            alike = [e for e in expectations if e.spec == spec]
            kinds[k] = "whole" if any(e.leaves[k] == shape for e in alike) else "rows"
        return kinds


def _whole(leaf: torch.Tensor, kind: Kind, share: Share) -> torch.Tensor:
    """A tensor of the whole batch's shape, of no content; one of the leaf's memory where it has this shape. It is a
    tensor of its own, so that one that is given twice is told apart."""
    if kind == "whole":
        return leaf
    with torch.no_grad():
        whole = leaf.detach()
        if leaf.shape[:1] != (share.size,):
            whole = leaf.new_empty((share.size, *leaf.shape[1:]))
    return whole.requires_grad_(leaf.requires_grad)
