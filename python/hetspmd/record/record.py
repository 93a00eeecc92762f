"""``HAP.record``: what the ranks did, as the simulated timeline tells what they should do.

While it is on, each plan's local graphs are replaced by copies that read the clock
(:mod:`hetspmd.record.timestamps`); they compute the same bits. Off, nothing is left of it. At the end every rank
gets all ranks' readings, brought to one clock (:func:`hetspmd.record.timestamps.offsets`).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from hetspmd.errors import OutputError
from hetspmd.record.measured import MeasuredSteps, assemble
from hetspmd.record.timestamps import GraphCall, GraphRun, Timestamps, clock_of, timestamped

if TYPE_CHECKING:
    import os
    from types import TracebackType

    from hetspmd.dist.communicator import Communicator
    from hetspmd.dist.runtime import Runtime
    from hetspmd.lower.local_program import LocalProgram
    from hetspmd.plan.plan import Plan
    from hetspmd.run.autograd import Runner

_CLOCK_ROUNDS = 8
"""Rounds in which the ranks compare clocks, before and after: each leaves less of how far they may be apart."""


class Recording:
    """A context manager: what runs within it is recorded, on every rank. Made by :meth:`hetspmd.HAP.record`.

    Steps, backward and the optimizer included, must run whole within it. After it :attr:`measured` holds the
    result, the same on every rank.
    """

    def __init__(
        self,
        communicator: Communicator,
        runtime: Runtime,
        device: torch.device,
        path: str | os.PathLike[str] | None,
        entries: Callable[[], Iterable[tuple[Plan, Runner]]],
        parameters: Callable[[], Iterable[nn.Parameter]],
    ) -> None:
        self._communicator, self._runtime, self._device = communicator, runtime, device
        self._path = None if path is None else Path(path)
        self._entries, self._parameters = entries, parameters
        self._plans: list[Plan] = []
        self._programs: list[tuple[Runner, LocalProgram]] = []
        self._calls: dict[tuple[int, str], list[GraphCall]] = {}
        self._passes: list[tuple[int, str, GraphRun]] = []
        self._optimizer: list[Any] = []
        self._shares: list[Any] = []
        self._handles: list[Any] = []
        self._before: dict[str, Any] = {}
        self._measured: MeasuredSteps | None = None

    @property
    def measured(self) -> MeasuredSteps:
        """What was recorded. Raises RuntimeError before the recording has ended."""
        if self._measured is None:
            raise RuntimeError("a recording is there when its with block has ended without an error")
        return self._measured

    def __str__(self) -> str:
        return "a recording that has not ended" if self._measured is None else self._measured.text()

    def __enter__(self) -> Self:
        if self._before:
            raise RuntimeError("a recording runs once; call hap.record() for another")
        self._agree(self._writable)
        self._clock = clock_of(self._device)
        for plan, runner in self._entries():
            self.add(plan, runner)
        self._handles = [
            register_optimizer_step_pre_hook(self._steps),
            register_optimizer_step_post_hook(self._steps),
        ]
        if self._runtime.everyone is not None:
            share = self._runtime.share
            self._runtime.share = self._timed(share)  # type: ignore[assignment]  # until __exit__
        self._before = self._rounds()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                logs = self._communicator.exchange(self._log())
        finally:
            self._restore()
        if error is not None:
            return
        measured = assemble(self._plans[0].cluster, self._plans, logs)
        self._passes.clear()

        def write() -> None:
            if self._path is not None:
                measured.save(self._path)

        self._agree(write)
        self._measured = measured

    def add(self, plan: Plan, runner: Runner) -> None:
        """Record a plan's local graphs too."""
        index, program = len(self._plans), runner.program
        self._plans.append(plan)
        self._programs.append((runner, program))

        def copy(name: str, module: torch.fx.GraphModule) -> torch.fx.GraphModule:
            timestamps = Timestamps(
                self._clock, index, lambda graph_run: self._passes.append((index, name, graph_run))
            )
            graph_module = timestamped(module, timestamps, plan.graph)
            self._calls[index, name] = timestamps.calls
            return graph_module

        backward = program.backward
        runner.program = replace(
            program,
            forward=copy("forward", program.forward),
            backward=None if backward is None else copy("backward", backward),
        )

    def _restore(self) -> None:
        for runner, program in self._programs:
            runner.program = program
        self._programs.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        vars(self._runtime).pop("share", None)

    def _steps(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Before and after each step of each optimizer."""
        own = {id(p) for p in self._parameters()}
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            self._optimizer.append(self._clock.now())

    def _timed(self, share: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        def timed(value: torch.Tensor) -> torch.Tensor:
            self._shares.append(self._clock.now())
            try:
                return share(value)
            finally:
                self._shares.append(self._clock.now())

        return timed

    def _log(self) -> dict[str, Any]:
        """This rank's readings as plain numbers; times in nanoseconds."""
        after = self._rounds()
        read = self._clock.nanoseconds
        passes = [
            (plan, graph, read(p.times), [(f.primitives, read(f.done)) for f in p.flights])
            for plan, graph, p in self._passes
        ]
        pairs = [
            list(zip(times[::2], times[1::2], strict=True))
            for times in (read(self._optimizer), read(self._shares))
        ]
        return {
            "before": self._before,
            "after": after,
            "calls": self._calls,
            "passes": passes,
            "optimizer": pairs[0],
            "shares": pairs[1],
        }

    def _rounds(self) -> dict[str, Any]:
        """See :func:`hetspmd.record.timestamps.offsets`."""
        began, ended = [], []
        for _ in range(_CLOCK_ROUNDS):
            began.append(time.monotonic_ns())
            self._communicator.exchange(None)
            ended.append(time.monotonic_ns())
        return {"machine": _machine(), "began": began, "ended": ended}

    def _writable(self) -> None:
        """Whether a file could be written beside the one that is asked for."""
        if self._path is None:
            return
        try:
            if self._path.is_dir():
                raise IsADirectoryError(None, "it is a directory")
            with tempfile.NamedTemporaryFile(dir=self._path.parent, prefix=self._path.name, suffix=".tmp"):
                pass
        except OSError as error:
            raise OutputError(
                f"{self._path} cannot be written: {error.strerror}; name another file"
            ) from error

    def _agree(self, action: Callable[[], None]) -> None:
        """Do something on rank 0; what it raises is raised on every rank."""
        failed = None
        if self._communicator.rank == 0:
            try:
                action()
            except OutputError as error:
                failed = str(error)
        failed = self._communicator.exchange(failed)[0]
        if failed is not None:
            raise OutputError(failed)


def _machine() -> str:
    """The same for processes that share a clock, "" where that is not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
