"""Processes for tests, started quickly."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

from torch import multiprocessing

__all__ = ["spawn"]


def spawn(worker: Callable[..., None], args: tuple[Any, ...], nprocs: int) -> None:
    """As ``torch.multiprocessing.spawn``, but what takes longest to import is imported once, in a server that the
    processes are forked from."""
    get_context("forkserver").set_forkserver_preload(["hetspmd.optimize.compiler", "hetspmd.run.module"])
    multiprocessing.start_processes(worker, args, nprocs=nprocs, start_method="forkserver")
