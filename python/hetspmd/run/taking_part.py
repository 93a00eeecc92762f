"""What a HAP module's calls say to the other ranks, and when they wait for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from hetspmd.dist.communicator import Communicator
    from hetspmd.dist.doings import Doing
    from hetspmd.run.attendance import Attendance
    from hetspmd.run.own_rows import OwnRows


class TakesPart(nn.Module):
    """The part of :class:`hetspmd.run.module.HAP` in the roll call (:mod:`hetspmd.dist.roll`), if it has one."""

    _attendance: Attendance | None
    _everyone: Communicator
    own_rows: OwnRows | None
    """What loaders have yielded, where every rank is given its own rows (``batch="own"``)."""

    def meet(self, what: str, arguments: tuple[str, ...] = ()) -> None:
        """Go on when all ranks do the same with the same arguments, which has collectives of its own."""
        if self._attendance is not None:
            self._attendance.meet(what, arguments)

    def meet_hooks(self, hooks: tuple[str, ...]) -> None:
        """Go on when all ranks know that a backward calls these hooks, which have collectives of their own."""
        if self._attendance is not None:
            self._attendance.meet_hooks(hooks)

    def did(self, doing: Doing) -> None:
        """Say at the next step what this rank does now."""
        if self._attendance is not None:
            self._attendance.did(doing)

    def share(self, what: str, arguments: tuple[str, ...], own: torch.Tensor) -> torch.Tensor:
        """Every rank's ``own``, 8 bytes, in rank order, when all ranks do the same with the same arguments."""
        values = None if self._attendance is None else self._attendance.share(what, arguments, own)
        if values is None:
            values = own.new_empty(self._everyone.world * own.numel())
            self._everyone.all_gather(values, own).wait()
        return values
