"""The default process group: its store, and who holds it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from datetime import timedelta

    from torch._C._distributed_c10d import Store as Store
    from torch.distributed import ProcessGroup


def group_store() -> Store:
    """A connection of its own to the store by which the default process group's ranks found each other."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store().clone()


def timeout_of(group: ProcessGroup) -> timedelta:
    """Within what time a collective of a gloo group must be over."""
    timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return timeout


def is_of_gloo(group: ProcessGroup | None) -> bool:
    """Whether gloo carries all that a group carries, on every kind of device, by whichever name it was asked for:
    ``gloo``, ``cpu:gloo``, or nothing where there is no other backend."""
    from torch.distributed.distributed_c10d import get_backend_config

    carriers = get_backend_config(group).split(",")
    return all(carrier.rpartition(":")[2] == "gloo" for carrier in carriers)


@contextmanager
def named_apart(number: int) -> Iterator[None]:
    """Within the context a new group of some ranks alone is named by them and by this ``number``.

    torch names it by how many groups the process has made so far, and its ranks may have made unequally many: then
    they wait for groups of other names. The groups of the program are named as if there were none of this context.
    """
    from torch.distributed.distributed_c10d import _world

    before = _world.group_count
    _world.group_count = -1 - number  # torch counts from 0 on
    try:
        yield
    finally:
        _world.group_count = before


def forget_default_group() -> None:
    """Let go of the default process group where torch's own modules hold it.

    ``torch.distributed.nn``, if it is first imported after ``init_process_group``, has the group as a default of
    its functions. After ``destroy_process_group`` the group's threads would then run on, until one of them asks for
    the GIL of an interpreter that is gone, which ends the process by SIGABRT. The default is None where the module
    was imported before; both mean the default group.
    """
    module = sys.modules.get("torch.distributed.nn.functional")
    for function in vars(module).values() if module is not None else ():
        if isinstance(function, FunctionType) and function.__defaults__ is not None:
            function.__defaults__ = tuple(
                None if isinstance(default, torch.distributed.ProcessGroup) else default
                for default in function.__defaults__
            )


def hosted_by_a_rank(store: Store) -> bool:
    """Whether the first rank of the default group hosts the store; not so where a launcher or a file does."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, TCPStore) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
