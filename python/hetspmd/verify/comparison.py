"""``verify``: a plan on all ranks, simulated in one process, against one device.

The ranks run :class:`~hetspmd.run.module.HAP` itself with real parameter values; the single device runs the
unchanged model in eager PyTorch. Compared are the loss and every gradient of the first step, and every
parameter and buffer after a few steps of each optimizer (:mod:`hetspmd.verify.training_steps`), by the relative
error of :mod:`hetspmd.verify.difference`. Some tensors are nothing but rounding noise, such as the gradient of a
bias that batch norm or softmax cancels, and a zero-initialised parameter that AdamW moves by it: the thresholds
(:mod:`hetspmd.verify.verify_thresholds`) say from where on.

Adam divides a gradient by its own magnitude plus eps, so that a gradient that is zero but for rounding (a
channel that no sample activates) moves its parameter by noise. With eps = 1e-4 the step amplifies noise by no
more than 1e4 learning rates; with PyTorch's default even a permuted batch changes a small ResNet's parameters
by 1e-6.

Some models amplify rounding all the same: batch norm divides by the deviation of a few samples, and the second
step starts from what the first one left. Where the parameters alone are further apart than the tolerance, the
single device is run again with every parameter moved by one rounding, ``rounded_starts`` times; the ranks may
differ from it by ``allowed_changes`` times what that changes, and by ``allowed_tolerances`` at most. The loss and
the gradients of the first step have no such allowance.

A model that draws random numbers is compared with the interpreter of its own reference graph, which makes the
same draws (:mod:`hetspmd.dist.random`); that graph is compared with eager PyTorch where it draws none
(:mod:`hetspmd.verify.quiet`).

Zeros and NaN prove nothing: then other values are drawn for the example (:mod:`hetspmd.verify.proof`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import nn

from hetspmd.cluster.cluster import Cluster
from hetspmd.errors import HetspmdError, OptionError
from hetspmd.optimize.compile_options import CompileKeywords, parted
from hetspmd.trace.autocast import without_autocast
from hetspmd.trace.blocks import as_in
from hetspmd.trace.trace import split_example
from hetspmd.trace.values import dtype_name
from hetspmd.verify.copies import model_in
from hetspmd.verify.difference import Tensors, largest_error
from hetspmd.verify.locate import first_difference
from hetspmd.verify.model_numbers import with_own_numbers
from hetspmd.verify.precision import batch_in, default_in, retyped
from hetspmd.verify.proof import proving
from hetspmd.verify.quiet import quiet_error, wide_trace
from hetspmd.verify.training_steps import (
    Optimizer,
    TrainedRun,
    TrainingCase,
    eager_run,
    on_ranks,
    reference_run,
    trainable,
)
from hetspmd.verify.verify_report import VerifyReport
from hetspmd.verify.verify_thresholds import THRESHOLDS

if TYPE_CHECKING:
    import os

    from hetspmd.plan.plan import Plan

__all__ = ["VerifyReport", "largest_error", "verify"]

_OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4),
}
_NAMED = ("model", "example", "cluster", "plan", "dtype", "steps", "optimizers", "tolerance", "locate")
_DTYPES = (torch.float64, torch.float32)
"""In which two computations are compared."""


class VerifyKeywords(CompileKeywords, total=False):
    """The options of :func:`verify` as keyword arguments, for type checkers and editors."""

    seed: int


def verify(
    model: nn.Module,
    example: Any,
    cluster: Cluster | Mapping[str, Any] | str | os.PathLike[str],
    *,
    plan: Plan | None = None,
    dtype: str | torch.dtype = "float64",
    steps: int = 2,
    optimizers: Sequence[str] = ("sgd", "adamw"),
    tolerance: float | None = None,
    locate: bool = False,
    **options: Unpack[VerifyKeywords],
) -> VerifyReport:
    """Run a plan on all simulated ranks, in one process, and compare with one device.

    The model is left as it was. Its parameters must have values (they may not be on the meta device). Under
    ``torch.autocast`` the plan is that of the mixed-precision step, and both sides compute all of it in
    ``dtype``.

    Args:
        model: An unchanged module.
        example: A batch, as for :func:`hetspmd.compile`; its values are used.
        cluster: A :class:`~hetspmd.Cluster`, a dict, or the path of a cluster file.
        plan: The plan to verify; by default one is compiled.
        dtype: ``float64`` or ``float32``, by name or as torch's.
        steps: Steps of each optimizer after which the parameters are compared.
        optimizers: One or more of ``"sgd"`` and ``"adamw"``.
        tolerance: The greatest relative error that counts as equal; by default that of ``dtype``.
        locate: Where the two sides differ, say from which tensor and instruction on.
        seed: The seed of random numbers; 0 by default.
        options: The fields of :class:`~hetspmd.CompileOptions`, by name.

    Returns:
        The largest relative errors of the loss, of every gradient and of every parameter.

    Raises:
        OptionError: The dtype, an optimizer, ``steps`` or another argument is not one that is allowed, or the
            step draws random numbers in Python.
        ExampleError: The model fails on the example, or cannot be copied.
    """
    from hetspmd.optimize.compiler import compile_plan

    wide = _dtype(dtype)
    _check(optimizers, steps)
    own, compilation = parted(options, ("seed",), _NAMED)
    cluster = Cluster.load(cluster)
    args, kwargs = split_example(example)
    if plan is None:
        plan = compile_plan(model, args, kwargs, cluster, compilation)
    if plan.graph.host.draws:
        raise OptionError(
            f"the model's Python draws random numbers{plan.graph.host.draws}, which one device would draw anew in "
            "each step, so that there is nothing to compare with; draw before the call and pass it in the batch"
        )
    limit = THRESHOLDS.tolerance(wide) if tolerance is None else tolerance
    with without_autocast("cpu"), default_in(wide):
        args, kwargs = batch_in((args, kwargs), wide)
        same, loss, seed = model_in(model, wide), compilation.find_loss, own.get("seed", 0)
        setting = TrainingCase(same, args, kwargs, loss, wide, steps, seed)
        return _Comparison(_plan_in(plan, setting), setting, limit).of(optimizers, locate)


def _plan_in(plan: Plan, setting: TrainingCase) -> Plan:
    """The plan in the setting's dtype, with the numbers that the model itself has there."""
    typed_plan = retyped(plan, setting.dtype)
    try:
        traced = wide_trace(setting, training=plan.graph.training, recompute=as_in(plan.graph))
    except HetspmdError:  # the comparison says what is wrong
        traced = None
    if traced is not None:
        typed_plan = replace(typed_plan, graph=with_own_numbers(typed_plan.graph, traced, setting.dtype))
    _ = typed_plan.digest  # computed here, once, not by every rank's thread
    return typed_plan


class _Comparison:
    """The largest errors that were met, and where."""

    def __init__(self, plan: Plan, setting: TrainingCase, limit: float) -> None:
        self.plan, self.setting, self.limit = plan, setting, limit
        self.random = any(rule.random for rule in plan.theory.rules.values())
        self.noise = THRESHOLDS.noise(setting.dtype)
        self.worst: dict[str, str] = {}
        self.errors = {"loss": 0.0, "gradients": 0.0, "parameters": 0.0}
        self.rounding: float | None = None
        self.allowed = True
        self.with_gradients: set[str] = set()
        self.moved: set[str] = set()

    def of(self, optimizers: Sequence[str], locate: bool) -> VerifyReport:
        self.setting, note, unproved = proving(self.setting)
        for name in optimizers:
            self._compare(name)
        notes = [note] if note else []
        if self.random:
            notes += self._quietly()
        if not unproved:
            notes += self._unseen()
        limit, errors = self.limit, self.errors
        ok = self.allowed and errors["loss"] <= limit and errors["gradients"] <= limit and not unproved
        return VerifyReport(
            ok, errors["loss"], errors["gradients"], errors["parameters"], limit, self.random, self.worst,
            self.rounding, unproved, tuple(notes), self._located() if locate and not ok and self._differs() else "",
        )  # fmt: skip

    def _differs(self) -> bool:
        return not (self.allowed and max(self.errors["loss"], self.errors["gradients"]) <= self.limit)

    def _located(self) -> str:
        """Whether it is the trace or the program that differs, and from where on."""
        lines = []
        if not self.random:
            sgd, one = _OPTIMIZERS["sgd"], replace(self.setting, steps=1)
            graph, eager = reference_run(one, self.plan, sgd), eager_run(one, sgd)
            error, worst = largest_error(
                {**graph.gradients, "the loss": graph.loss},
                {**eager.gradients, "the loss": eager.loss},
                self.noise.gradients,
            )
            if error > self.limit:
                lines.append(f"the graph differs from eager PyTorch ({worst}: {error:.2e}): it is the trace")
        if self.plan.micro_batches > 1:
            return "\n".join([*lines, "values inside of micro-batches are not compared; use micro_batches=1"])
        near = replace(self.setting, model=_rounded(self.setting, 0))
        first = first_difference(self.plan, self.setting, near, self.limit)
        lines.append(
            first
            or "no value of the first step of the program differs from its graph's: what differs is "
            f"{'the graph' if lines else 'made between the steps (buffers, the optimizer over shards)'}"
        )
        return "\n".join(lines)

    def _single_device(self, setting: TrainingCase, optimizer: str) -> TrainedRun:
        if self.random:
            return reference_run(setting, self.plan, _OPTIMIZERS[optimizer])
        return eager_run(setting, _OPTIMIZERS[optimizer])

    def _compare(self, optimizer: str) -> None:
        setting, noise = self.setting, self.noise
        single = self._single_device(setting, optimizer)
        self.with_gradients |= set(single.gradients)
        self.moved |= single.moved
        apart = 0.0
        for run in on_ranks(setting, self.plan, _OPTIMIZERS[optimizer]):
            pairs: tuple[tuple[str, Tensors, Tensors, float], ...] = (
                ("loss", {"loss": run.loss}, {"loss": single.loss}, noise.loss),
                ("gradients", run.gradients, single.gradients, noise.gradients),
                ("parameters", run.final, single.final, noise.parameters),
            )
            for kind, got, want, unseen in pairs:
                error, where = largest_error(got, want, unseen)
                apart = max(apart, error) if kind == "parameters" else apart
                self._met(kind, error, f"{where} ({optimizer})")
        if apart > self.limit:
            starts = (
                replace(setting, model=_rounded(setting, draw)) for draw in range(THRESHOLDS.rounded_starts)
            )
            moved = [self._single_device(start, optimizer).final for start in starts]
            own = max(largest_error(final, single.final, noise.parameters)[0] for final in moved)
            self.rounding = max(own, self.rounding or 0.0)
            most = min(THRESHOLDS.allowed_changes * own, THRESHOLDS.allowed_tolerances * self.limit)
            self.allowed = self.allowed and apart <= most

    def _met(self, kind: str, error: float, where: str) -> None:
        if not error <= self.errors[kind]:
            self.errors[kind], self.worst[kind] = error, where

    def _quietly(self) -> list[str]:
        """Compare the graph with eager PyTorch where it draws nothing."""
        where, loss, gradients, worst = quiet_error(self.setting, self.noise.gradients)
        self._met("loss", loss, where)
        self._met("gradients", gradients, f"{worst} ({where})")
        if where:
            return []
        return ["the model draws in evaluation mode too: its graph was not compared with eager PyTorch"]

    def _unseen(self) -> list[str]:
        """What the comparison says nothing of."""
        model = self.setting.model
        if not trainable(model):
            return ["no parameter requires a gradient: the loss and the buffers alone were compared"]
        still = sorted(self.with_gradients - self.moved)
        if not still:
            return []
        more = f" and {len(still) - 3} more" if len(still) > 3 else ""
        return [
            f"zero in every step is the gradient of {', '.join(still[:3])}{more}, of which little is proved"
        ]


def _dtype(wanted: object) -> torch.dtype:
    """The dtype that is meant. Raises OptionError."""
    dtype = next((d for d in _DTYPES if wanted == d or wanted in (dtype_name(d), str(d))), None)
    if dtype is None:
        raise OptionError(f"dtype is {wanted!r}; allowed are {_listed(map(str, _DTYPES))}, or their names")
    return dtype


def _check(optimizers: Collection[str], steps: int) -> None:
    """Raise OptionError for optimizers that there are not, or nothing to compare."""
    names = tuple(_OPTIMIZERS)
    if isinstance(optimizers, str) or not optimizers or any(name not in names for name in optimizers):
        raise OptionError(f"optimizers is {optimizers!r}; name one or more of {_listed(names)} in a list")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise OptionError(f"steps is {steps!r}; take a whole number from 1")


def _listed(names: Iterable[str]) -> str:
    return " and ".join(names)


def _rounded(setting: TrainingCase, seed: int) -> nn.Module:
    """A copy of the model, with every parameter's elements moved by one rounding up, down or not at all."""
    moved = setting.copy()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in moved.parameters():
            if parameter.is_floating_point() or parameter.is_complex():
                steps = torch.randint(-1, 2, parameter.shape, generator=generator).to(setting.dtype)
                parameter.mul_(1 + steps * torch.finfo(parameter.dtype).eps)
    return moved
