"""Processes for tests, started quickly."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from torch import multiprocessing

__all__ = ["free_ports", "launched_once", "spawn"]


def free_ports(count: int) -> tuple[int, ...]:
    """Ports of this machine that nothing listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = tuple(s.getsockname()[1] for s in sockets)
    for s in sockets:
        s.close()
    return ports


def launched_once(
    factory: pytest.TempPathFactory, name: str, worker: Callable[..., None], world: int
) -> Path:
    """The folder in which ``worker(rank, world, folder)`` has left what it did; the workers of pytest-xdist
    share one launch."""
    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder /= name
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            spawn(worker, (world, str(folder)), nprocs=world)
            (folder / "done").touch()
    return folder


def spawn(worker: Callable[..., None], args: tuple[Any, ...], nprocs: int) -> None:
    """As ``torch.multiprocessing.spawn``, but what takes longest to import is imported once, in a server that the
    processes are forked from."""
    modules = ["hetspmd.optimize.compiler", "hetspmd.run.module", "torch._functorch.aot_autograd"]
    get_context("forkserver").set_forkserver_preload(modules)
    multiprocessing.start_processes(worker, args, nprocs=nprocs, start_method="forkserver")
