"""Whole training steps of a model on this rank's device, at one number of rows after the other.

What runs is what :class:`hetspmd.HAP` runs of the plan of a single device: the lowered forward and backward, the
gradients, and the optimizer's step. For each number of rows the model is copied anew, and nothing of it is left
when the steps are done or have failed. The peak is that of a second step, which has the optimizer's state from
its beginning:

- on a GPU, what the allocator handed out at most, kernels' workspaces included. The process is held to the bytes
  that a step is given (``torch.cuda.set_per_process_memory_fraction``), and memory ends with
  torch.OutOfMemoryError;
- on a CPU, the bytes of all tensors (:mod:`hetspmd.profile.live_bytes`), and memory ends with StepMemoryError.

On a CPU the steps that are timed are run apart from those that are counted, as counting is slow. Samples whose
memory has not settled do not count (:mod:`hetspmd.profile.pages`).
"""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import nn

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.devices import Device
from hetspmd.cluster.step_curves import StepPoint
from hetspmd.dist.communicator import LoneCommunicator
from hetspmd.errors import ExampleError, HetspmdError, StepMemoryError
from hetspmd.optimize.compiler import compile_plan
from hetspmd.plan.plan import Plan
from hetspmd.profile.device import OPTIMIZERS, synchronize
from hetspmd.profile.live_bytes import LiveBytes
from hetspmd.profile.pages import Sample, page_faults, settled
from hetspmd.profile.profile_thresholds import THRESHOLDS
from hetspmd.profile.rows import Batch, RowPlaces
from hetspmd.profile.timing import interval, repeat
from hetspmd.run.module import HAP
from hetspmd.trace.autocast import autocast_for, autocast_on
from hetspmd.trace.compat.trees import flatten, unflatten
from hetspmd.trace.losses import find_loss

COUNTED_STEPS = 2
"""Steps before those that are timed: the first makes the optimizer's state, the second has the peak."""


@dataclass(frozen=True)
class StepCase:
    """A model with its example, and where that has rows; ``name`` is what reports call it.

    ``autocast``: the dtype of the ``torch.autocast`` under which its steps run, if any.
    """

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    places: RowPlaces
    autocast: str | None = None

    @property
    def rows(self) -> int:
        """The rows of the example."""
        leaf = flatten((self.args, dict(self.kwargs)))[0][self.places.leaves[0]]
        _, dim, each = self.places.rows[0]
        return int(leaf.shape[dim]) // each


@dataclass(frozen=True)
class Attempt:
    """What came of a step of so many ``rows``: the ``point`` if it fits; ``counted`` bytes; and ``refused``, why
    the model does not compute so many rows at all, where that is not for want of memory."""

    rows: int
    counted: int = 0
    point: StepPoint | None = None
    refused: str = ""


class StepRunner:
    """Runs steps of a model on ``device``, each within ``memory`` bytes. ``tolerance``: as of all measurements."""

    def __init__(
        self, case: StepCase, device: torch.device, memory: int, optimizer: str, tolerance: float
    ) -> None:
        self.case, self.device, self.memory = case, device, memory
        self._optimizer, self._tolerance = OPTIMIZERS[optimizer], tolerance
        self._lone = Cluster((Device("one", {"default": 1e12}),))

    def run(self, rows: int, deadline: float) -> Attempt:
        """Steps of so many rows, repeated until the time on ``perf_counter`` is ``deadline``.

        Raises what the model raises for other reasons than memory, if it has as many rows as in the example: fewer
        may be too few for it (batch norm of one).
        """
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the first trace of the model has told them
                return self._run(rows, deadline)
        except Exception as error:  # the model's own code may raise anything
            if rows >= self.case.rows:
                raise
            return Attempt(rows, refused=f"{type(error).__name__}: {' '.join(str(error).split())}")
        finally:
            self._release()

    def _run(self, rows: int, deadline: float) -> Attempt:
        counted = 0
        try:
            if self.device.type == "cpu":
                batch = self._batch(rows)
                plan = self._plan(self.case.model, batch)
                counted = plan.cost.memory_bytes[0]
                model = self._copy()
                with LiveBytes(self.memory) as counter:
                    for tensor in _tensors(model, batch):  # and not what they were copied from
                        counter.add(tensor.untyped_storage())
                    step = self._step(model, plan, batch)
                    step()
                    counter.reset_peak()
                    step()
                    peak = counter.peak
            else:
                with _held_to(self.device, self.memory):
                    model, batch = self._copy(), self._batch(rows)
                    plan = self._plan(model, batch)
                    counted = plan.cost.memory_bytes[0]
                    step = self._step(model, plan, batch)
                    step()
                    torch.cuda.reset_peak_memory_stats(self.device)
                    step()
                    peak = torch.cuda.max_memory_allocated(self.device)
                    samples = self._samples(step, deadline)
            if self.device.type == "cpu":
                samples = self._samples(step, deadline)
        except (StepMemoryError, torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not _is_of_memory(error):
                raise
            return Attempt(rows, counted)
        middle, low, high = (_rounded(s) for s in interval(samples))
        return Attempt(rows, counted, StepPoint(rows, middle, low, high, len(samples), peak, counted))

    def _samples(self, step: Callable[[], None], deadline: float) -> list[float]:
        samples: list[Sample] = []

        def seconds() -> float:
            synchronize(self.device)
            faults, start = page_faults(), perf_counter()
            step()
            synchronize(self.device)
            samples.append(Sample(perf_counter() - start, page_faults() - faults))
            return samples[-1].seconds

        repeat(seconds, deadline, self._tolerance, least=THRESHOLDS.step_samples)
        return settled(samples) if self.device.type == "cpu" else [s.seconds for s in samples]

    def _plan(self, model: nn.Module, batch: Batch) -> Plan:
        with autocast_for(model, self.case.autocast):
            return compile_plan(model, *batch, self._lone)

    def _batch(self, rows: int) -> Batch:
        leaves, spec = flatten(self.case.places.resized(self.case.args, self.case.kwargs, rows))
        moved = [leaf.to(self.device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, kwargs = unflatten(moved, spec)
        return args, dict(kwargs)

    def _copy(self) -> nn.Module:
        """The model on the device, to be cut and trained; zeros where it lies on the meta device."""
        model = copy.deepcopy(self.case.model)
        if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
            model.to_empty(device=self.device)
            with torch.no_grad():
                for tensor in (*model.parameters(), *model.buffers()):
                    tensor.zero_()
        return model.to(self.device)

    def _step(self, model: nn.Module, plan: Plan, batch: Batch) -> Callable[[], None]:
        """A training step of the lowered plan."""
        name = self.case.name
        hap = HAP(
            model,
            self._lone,
            plan=plan,
            process_group=LoneCommunicator(),
            device=self.device,
            check_plan=False,
        )
        hap.run_lowered()
        args, kwargs = batch
        trained = [p for p in hap.parameters() if p.requires_grad]
        optimizer = self._optimizer(trained) if trained else None

        def step() -> None:
            if optimizer is not None:
                optimizer.zero_grad()
            with autocast_on(self.device.type, self.case.autocast):
                loss = find_loss(hap(*args, **kwargs), None)
            if loss is None:
                raise ExampleError(
                    f"{name} returns no scalar loss for the example; its steps cannot be measured"
                )
            if loss.requires_grad:
                torch.autograd.backward(loss)
            if optimizer is not None:
                optimizer.step()

        return step

    def _release(self) -> None:
        """Give back what steps have held."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _tensors(model: nn.Module, batch: Batch) -> list[torch.Tensor]:
    return [
        *model.parameters(),
        *model.buffers(),
        *(leaf for leaf in flatten(batch)[0] if isinstance(leaf, torch.Tensor)),
    ]


@contextmanager
def _held_to(device: torch.device, memory: int) -> Iterator[None]:
    """Let this process have so many bytes of a GPU."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(memory / total, 1.0), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def _is_of_memory(error: BaseException) -> bool:
    """Whether memory ended: torch's CPU allocator says so by a RuntimeError, and hetspmd by a note beneath its
    own."""
    if isinstance(error, (StepMemoryError, torch.OutOfMemoryError, MemoryError)):
        return True
    return not isinstance(error, HetspmdError) and "DefaultCPUAllocator: can't allocate memory" in str(error)


def _rounded(value: float) -> float:
    """More digits than were measured, and a file that can be read."""
    return float(f"{value:.4g}")
