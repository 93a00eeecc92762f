"""Each case in a process of its own, with a time limit.

The packages are imported once, before the processes are forked.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from foreign.judge import CRASHED, HUNG, Judge, Outcome, judge
from foreign.registry import Case
from hetspmd.trace.compat.joint import exporter


@dataclass
class _Running:
    case: Case
    process: BaseProcess
    result: Connection
    started: float


def run(
    cases: Sequence[Case], *, timeout: float, jobs: int = 1, logs: Path | None = None, by: Judge = judge
) -> Iterator[Outcome]:
    """The outcomes as they come. A case that takes longer than ``timeout`` seconds is killed and HUNG.

    ``logs``: a folder for what the processes print.
    """
    _import({c.package for c in cases})
    context = multiprocessing.get_context("fork")
    waiting, running = list(reversed(cases)), list[_Running]()
    while waiting or running:
        while waiting and len(running) < jobs:
            case = waiting.pop()
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(case, sender, logs, by))
            process.start()
            sender.close()
            running.append(_Running(case, process, receiver, time.monotonic()))
        for r in list(running):
            outcome = _ended(r, timeout)
            if outcome is not None:
                running.remove(r)
                yield outcome
        time.sleep(0.05)


def _import(packages: set[str]) -> None:
    for module in ("optimize.compiler", "run.module", "lower"):
        importlib.import_module(f"hetspmd.{module}")
    exporter()
    for package in sorted(packages):
        with contextlib.suppress(Exception):  # the case says what is wrong with its package
            importlib.import_module(package)


def _child(case: Case, result: Connection, logs: Path | None, by: Judge) -> None:
    if logs is not None:
        file = os.open(logs / f"{case.name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
    torch.set_num_threads(1)
    result.send(by(case))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads that still wait for something hold up no survey


def _ended(r: _Running, timeout: float) -> Outcome | None:
    """The outcome of a process that is done, dead or late."""
    seconds = time.monotonic() - r.started

    def failed(kind: str, detail: str) -> Outcome:
        return Outcome(r.case.name, r.case.package, r.case.kind, kind, detail, seconds=seconds)

    outcome = None
    if r.result.poll():
        try:
            outcome = r.result.recv()
        except EOFError:
            r.process.join()
            outcome = failed(CRASHED, f"the process ended with status {r.process.exitcode}")
    elif seconds > timeout:
        outcome = failed(HUNG, f"no end after {timeout:.0f} s")
    if outcome is not None:
        r.process.kill()
        r.process.join()
        r.result.close()
    return outcome
