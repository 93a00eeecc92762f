"""The process groups that hetspmd makes, beside those of the program.

A gloo collective pairs with whatever collective of the same kind another rank has issued at the same place in the
same group, and one of another size ends the process. So what HAP sends over gloo goes over groups of its own: a
``dist.all_reduce`` that one rank of a program calls alone meets no step. With NCCL, whose groups cost memory of the
device, HAP uses the program's group.

The ranks of a group may have made unequally many groups before, of which others were no part: for a HAP of some ranks,
or by the program itself. So the groups of hetspmd are counted by their ranks, and apart from those of the program.

Threads of a gloo group that still let go of a tensor when the interpreter is gone end the process by SIGABRT. So these
groups are destroyed at the end, when nothing is on its way in them any more: their threads would wait for it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from hetspmd.trace.compat.groups import is_of_gloo, named_apart, timeout_of


_NEVER_SENT: Final = 1 << 20
"""A tag of no message."""

_OWN: Final[weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]] = weakref.WeakKeyDictionary()
"""Of each group of the program that of HAP."""
_MADE: Final[list[weakref.ref[dist.ProcessGroup]]] = []
"""The gloo groups that were made here."""
_COUNT: Final[Counter[tuple[int, ...]]] = Counter()
"""How many groups of the same ranks were made here."""


def made_group(ranks: Sequence[int], backend: str, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """A group of these ranks, numbered in the world, this one among them. They alone call this."""
    members = tuple(sorted(ranks))
    _COUNT[members] += 1
    with named_apart(_COUNT[members]):
        group = dist.new_group(list(ranks), timeout, backend, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    if backend == "gloo":
        _MADE[:] = [ref for ref in _MADE if ref() is not None]
        _MADE.append(weakref.ref(group))
    return group


def own_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group over which HAP sends what it sends among the ranks of ``group`` (None: the default group), the same
    one at every call. All of them call this."""
    if not is_of_gloo(group):
        return group
    parent = dist.group.WORLD if group is None else group
    assert parent is not None
    if any(ref() is parent for ref in _MADE):
        return parent
    if parent not in _OWN:
        _OWN[parent] = made_group(dist.get_process_group_ranks(parent), "gloo", timeout_of(parent))
    return _OWN[parent]


def close_links(group: dist.ProcessGroup | None) -> None:
    """End everything that waits in a gloo group, with an error; its links are of no use afterwards.

    gloo closes all links of a rank when one of its receives is late. A receive over a link that is closed already, to a
    rank that has gone, is not late but fails at once, and leaves the links to the others open. So one is tried from each
    rank.
    """
    own = dist.get_rank(group)
    for source in range(dist.get_world_size(group)):
        if source == own:
            continue
        with suppress(RuntimeError, ValueError):  # this link, or the group, is closed
            work = dist.irecv(torch.zeros(1), group=group, group_src=source, tag=_NEVER_SENT)
            if work is not None:
                work.wait(timedelta(milliseconds=1))


def close_own_links() -> None:
    """Close the links of the gloo groups that were made here."""
    for ref in _MADE:
        group = ref()
        if group is not None:
            with suppress(RuntimeError, ValueError):  # the program has destroyed it
                close_links(group)


def destroy_groups() -> None:
    """Destroy the gloo groups that were made here and still exist; nothing is on its way in them."""
    _OWN.clear()
    for ref in reversed(_MADE):
        group = ref()
        if group is not None and dist.is_initialized():
            with suppress(ValueError, RuntimeError):  # the program has destroyed it
                dist.destroy_process_group(group)
    _MADE.clear()
