"""Functions by which Python asks what lies outside a forward: clocks, the system's random bytes, files, threads."""

from __future__ import annotations

import _thread
import builtins
import io
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final, Literal

import torch

Kind = Literal["clock", "bytes", "file", "thread"]


@dataclass(frozen=True, slots=True)
class Source:
    """A function that asks. With ``computing_arguments`` it asks nothing, but computes from the last of them."""

    kind: Kind
    called: str
    computing_arguments: int = 0

    def asks(self, args: tuple[Any, ...], kwargs: object = ()) -> bool:
        """Whether a call with these arguments asks."""
        if not self.computing_arguments:
            return True
        return not kwargs and (
            len(args) < self.computing_arguments or args[self.computing_arguments - 1] is None
        )


_GIVEN: Final = {"gmtime": 1, "localtime": 1, "ctime": 1, "asctime": 1, "strftime": 2}
_CLOCKS: Final = ("time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime")
_OF_TIME: Final = (*_CLOCKS, *(f"{name}_ns" for name in _CLOCKS), *_GIVEN)
_OF_FILES: Final = (
    "access", "getcwd", "getcwdb", "getloadavg", "listdir", "lstat", "mkdir", "open", "pread", "pwrite", "read",
    "readlink", "readv", "remove", "rename", "replace", "rmdir", "scandir", "stat", "statvfs", "system", "unlink",
    "write", "writev",
)  # fmt: skip
_OF_POOLS: Final = (
    "apply",
    "apply_async",
    "imap",
    "imap_unordered",
    "map",
    "map_async",
    "starmap",
    "starmap_async",
)
_OF_THREADS: Final = {
    ("concurrent.futures.thread", "ThreadPoolExecutor"): ("submit",),
    ("concurrent.futures.process", "ProcessPoolExecutor"): ("submit",),
    ("multiprocessing.process", "BaseProcess"): ("start",),
    ("multiprocessing.pool", "Pool"): _OF_POOLS,
}
"""Methods that hand work to other threads or processes, by module and class."""


def places() -> Iterator[tuple[Any, str, Source]]:
    """Where the functions lie that can be replaced: the module or class, the name, and what it asks."""
    for name in _OF_TIME:
        yield time, name, Source("clock", f"time.{name}", _GIVEN.get(name, 0))
    yield os, "times", Source("clock", "os.times")
    yield os, "urandom", Source("bytes", "os.urandom")
    yield os, "getrandom", Source("bytes", "os.getrandom")
    yield random, "_urandom", Source("bytes", "random.SystemRandom")
    yield random.Random, "seed", Source("bytes", "random.Random without a seed", 2)
    for name in ("_generate_time_safe", "_UuidCreate"):
        yield sys.modules.get("uuid"), name, Source("bytes", "uuid.uuid1")
    for name in _OF_FILES:
        yield os, name, Source("file", f"os.{name}")
    for module in (builtins, io):
        yield module, "open", Source("file", "open")
    yield io, "FileIO", Source("file", "io.FileIO")
    yield sys.modules.get("sqlite3"), "connect", Source("file", "sqlite3.connect")
    yield torch, "save", Source("file", "torch.save")
    yield socket, "create_connection", Source("file", "socket.create_connection")
    yield subprocess.Popen, "__init__", Source("file", "subprocess.Popen")

    yield threading.Thread, "start", Source("thread", "threading.Thread.start")
    yield _thread, "start_new_thread", Source("thread", "_thread.start_new_thread")
    yield os, "fork", Source("thread", "os.fork")
    for (module_name, kind), names in _OF_THREADS.items():
        for name in names:
            holder = getattr(sys.modules.get(module_name), kind, None)
            yield holder, name, Source("thread", f"{kind}.{name}")


SOURCES: Final[dict[Any, Source]] = {}
"""The functions that other names may hold."""


def learn() -> None:
    """Let :data:`SOURCES` have the functions of the modules that are imported by now; none may be replaced now."""
    for holder, name, source in places():
        function = getattr(holder, name, None)
        if isinstance(function, (BuiltinFunctionType, FunctionType)) and holder is not random.Random:
            SOURCES.setdefault(function, source)


learn()
