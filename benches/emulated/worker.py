"""One rank: joins the process group, then runs the functions that the driver names.

Driver and worker exchange lines of JSON over the worker's standard input and output (what the functions print
goes to its log). A function is called as ``function(context, **arguments)`` on every rank that takes part, and
returns what JSON can hold.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import sys
import traceback
from datetime import timedelta
from typing import IO, Any


class Context:
    """What a function knows of its rank."""

    def __init__(self, rank: int, world: int, replies: IO[str], requests: IO[str]) -> None:
        self.rank, self.world = rank, world
        self._replies, self._requests = replies, requests

    def throttle(self, on: bool) -> None:
        """Have all ranks that run this function held to their CPU shares, or not; waits for all of them."""
        self.send({"kind": "throttle", "on": on})
        self.receive()

    def send(self, message: dict[str, Any]) -> None:
        """Tell the driver."""
        self._replies.write(json.dumps(message) + "\n")
        self._replies.flush()

    def receive(self) -> dict[str, Any]:
        """The driver's next line; ends the process once the driver has gone."""
        line = self._requests.readline()
        if not line:
            raise SystemExit(0)
        found: dict[str, Any] = json.loads(line)
        return found


def find(name: str) -> Any:
    """The object that ``module:attribute`` names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def die_with_driver() -> None:
    """Have the kernel kill this process when the driver ends, however it ends."""
    driver = int(os.environ["HETSPMD_DRIVER"])
    set_death_signal = 1
    ctypes.CDLL(None, use_errno=True).prctl(set_death_signal, signal.SIGKILL)
    if os.getppid() != driver:
        raise SystemExit(0)


def main() -> None:
    """Run until the driver closes the worker's standard input."""
    die_with_driver()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    context = Context(rank, world, replies, sys.stdin)

    import torch
    import torch.distributed as dist

    importlib.import_module("hetspmd.run.module")  # now, before the clock runs
    torch.set_num_threads(1)
    backend = os.environ.get("HETSPMD_BACKEND", "gloo")
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if world > 1:
        dist.init_process_group(backend, timeout=timedelta(seconds=float(os.environ["HETSPMD_TIMEOUT"])))
    context.send({"kind": "ready"})
    while True:
        job = context.receive()
        try:
            result = find(job["function"])(context, **job["arguments"])
        except Exception:
            context.send({"kind": "failed", "error": traceback.format_exc()})
            continue
        context.send({"kind": "done", "result": result})
        del result
        gc.collect()


if __name__ == "__main__":
    main()
