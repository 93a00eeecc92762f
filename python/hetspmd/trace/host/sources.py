"""Functions by which Python asks what lies outside the process: clocks, the system's random bytes, files."""

from __future__ import annotations

import builtins
import io
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

__all__ = ["SOURCES", "Kind", "Source", "places"]

Kind = Literal["clock", "bytes", "file"]


@dataclass(frozen=True, slots=True)
class Source:
    """A function that asks. With ``given`` arguments it asks nothing, but computes from the last of them."""

    kind: Kind
    called: str
    given: int = 0

    def asks(self, args: tuple[Any, ...], kwargs: object = ()) -> bool:
        """Whether a call with these arguments asks."""
        if not self.given:
            return True
        return not kwargs and (len(args) < self.given or args[self.given - 1] is None)


_GIVEN: Final = {"gmtime": 1, "localtime": 1, "ctime": 1, "asctime": 1, "strftime": 2}
_CLOCKS: Final = ("time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime")
_OF_TIME: Final = (*_CLOCKS, *(f"{name}_ns" for name in _CLOCKS), *_GIVEN)
_OF_FILES: Final = (
    "access", "getcwd", "getcwdb", "getloadavg", "listdir", "lstat", "mkdir", "open", "pread", "pwrite", "read",
    "readlink", "readv", "remove", "rename", "replace", "rmdir", "scandir", "stat", "statvfs", "system", "unlink",
    "write", "writev",
)  # fmt: skip


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
    yield sys.modules.get("sqlite3"), "connect", Source("file", "sqlite3.connect")
    yield torch, "save", Source("file", "torch.save")
    yield socket, "create_connection", Source("file", "socket.create_connection")
    yield subprocess.Popen, "__init__", Source("file", "subprocess.Popen")


SOURCES: Final[dict[Any, Source]] = {}
"""The functions that other names may hold."""
for _holder, _name, _source in places():
    if _holder in (time, os, io) and hasattr(_holder, _name):
        SOURCES.setdefault(getattr(_holder, _name), _source)
