"""``verify``: a plan on all ranks, simulated in one process, against one device.

The ranks run :class:`~hetspmd.run.module.HAP` itself with real parameter values; the single device runs the
unchanged model in eager PyTorch. Compared are the loss and every gradient of the first step, and every
parameter and buffer after a few steps of each optimizer. The error of a tensor is

    max |a - b| / max(max |b|, tiny)

with b the single device's, i.e. relative to the tensor's largest magnitude; a tensor is only as good as its
worst element. Some tensors are nothing but rounding noise, such as the gradient of a bias that batch norm or
softmax cancels, and a zero-initialised parameter that AdamW moves by it. Where b is below :data:`NOISE` times
the largest magnitude among the tensors of its kind, the error is relative to that largest magnitude instead.

Adam divides a gradient by its own magnitude plus eps, so that a gradient that is zero but for rounding (a channel
that no sample activates) moves its parameter by noise. With eps = 1e-4 the step amplifies noise by no more than
1e4 learning rates; with PyTorch's default even a permuted batch changes a small ResNet's parameters by 1e-6.

Some models amplify rounding all the same: batch norm divides by the deviation of a few samples, and the second
step starts from what the first one left. Where the parameters alone are further apart than the tolerance, the
single device is run again with every parameter moved by one rounding, :data:`DRAWS` times; the ranks may differ
from it by :data:`ROUNDINGS` times what that changes, and by :data:`MOST` tolerances at most. The loss and the
gradients of the first step have no such allowance.

A model that draws random numbers is compared with the interpreter of its own reference graph, which makes the
same draws (:mod:`hetspmd.run.random`); that graph is compared with eager PyTorch in evaluation mode.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hetspmd.cost.cluster import Cluster
from hetspmd.errors import BatchMismatchError, CheckError, OptionError
from hetspmd.rules.theory import derive
from hetspmd.run.communicator import Communicator
from hetspmd.run.guard import expected, match
from hetspmd.run.module import HAP
from hetspmd.run.precision import all_in, batch_in, model_in, retyped, retyped_graph
from hetspmd.run.random import Randomness
from hetspmd.run.reference import run_reference
from hetspmd.run.simulate import run_ranks
from hetspmd.trace.autocast import without_autocast
from hetspmd.trace.step import find_loss
from hetspmd.trace.trace import split_example, trace
from hetspmd.trace.values import dtype_name

if TYPE_CHECKING:
    import os

    from hetspmd.plan import Plan
    from hetspmd.trace.step import Loss

Optimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
Tensors = dict[str, torch.Tensor]

_OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4),
}
NOISE = {
    torch.float64: {"loss": 0.0, "gradients": 1e-12, "parameters": 1e-10},
    torch.float32: {"loss": 0.0, "gradients": 1e-5, "parameters": 1e-5},
}
"""See the module's text; by the dtype of the comparison and the kind of tensor."""

DRAWS, ROUNDINGS, MOST = 3, 4.0, 100.0
"""See the module's text."""

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Largest relative error by the dtype of the comparison."""


@dataclass(frozen=True)
class VerifyReport:
    """The largest relative errors, and whether all are within ``tolerance``.

    ``random``: the model draws random numbers, so the training step was compared with its reference graph.
    ``worst`` names the tensor of each error. ``rounding``: by how much the single device's own parameters
    change where it starts one rounding away; measured only where ``parameter_error`` is above the tolerance.
    """

    ok: bool
    loss_error: float
    gradient_error: float
    parameter_error: float
    tolerance: float
    random: bool
    worst: Mapping[str, str]
    rounding: float | None = None

    @property
    def text(self) -> str:
        """For people."""
        lines = [
            f"{name:<10} {error:.2e}  {self.worst.get(name, '')}".rstrip()
            for name, error in (
                ("loss", self.loss_error), ("gradients", self.gradient_error),
                ("parameters", self.parameter_error),
            )
        ]  # fmt: skip
        verdict = "equal" if self.ok else "NOT EQUAL"
        against = "its reference graph (random draws)" if self.random else "the single device"
        if self.rounding is not None:
            lines.append(
                f"rounding   {self.rounding:.2e}  changes the single device's own parameters by this much"
            )
        return "\n".join([f"{verdict} to {against} within {self.tolerance:g}", *lines])

    def require(self) -> None:
        """Raise CheckError unless ok."""
        if not self.ok:
            raise CheckError(self.text)


@dataclass(frozen=True)
class _Run:
    """What a number of steps leave: the first step's loss and gradients, the final tensors."""

    loss: torch.Tensor
    gradients: Tensors
    final: Tensors


def verify(
    model: nn.Module, example: Any, cluster: Cluster | Mapping[str, Any] | str | os.PathLike[str], *,
    plan: Plan | None = None, dtype: str | torch.dtype = "float64", steps: int = 2,
    optimizers: Sequence[str] = ("sgd", "adamw"), loss: Loss | None = None, tolerance: float | None = None,
    seed: int = 0, **options: Any,
) -> VerifyReport:  # fmt: skip
    """Run ``plan`` (default: compile one) on all simulated ranks and compare with one device.

    ``dtype``: float64 or float32, by name or as torch's. ``optimizers``: of ``sgd`` and ``adamw``. The model is
    left as it was; its parameters must have values (not be on the meta device). ``options`` go to
    :func:`hetspmd.compile`. Raises OptionError for another dtype, optimizer or argument, or no steps.
    Under ``torch.autocast`` the plan is the mixed-precision step's; both sides compute all of it in ``dtype``.
    """
    from hetspmd.compiler import check_options, compile_plan

    wide = _dtype(dtype)
    _check(optimizers, steps)
    check_options(options, signature(verify).parameters)
    cluster = Cluster.load(cluster)
    args, kwargs = split_example(example)
    if plan is None:
        plan = compile_plan(model, args, kwargs, cluster, loss=loss, **options)
    with without_autocast("cpu"):
        return _compared(plan, model, args, kwargs, wide, steps, optimizers, loss, tolerance, seed)


def _compared(
    plan: Plan, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], wide: torch.dtype, steps: int,
    optimizers: Sequence[str], loss: Loss | None, tolerance: float | None, seed: int,
) -> VerifyReport:  # fmt: skip
    plan = retyped(plan, wide)
    _ = plan.digest  # computed here, once, not by every rank's thread
    whole = model_in(model, wide)
    args, kwargs = batch_in((args, kwargs), wide)
    random = any(rule.random for rule in plan.theory.rules.values())
    noise = NOISE[wide]
    limit = _TOLERANCES[wide] if tolerance is None else tolerance
    worst: dict[str, str] = {}
    errors = {"loss": 0.0, "gradients": 0.0, "parameters": 0.0}

    def single_device(start: nn.Module, optimizer: str) -> _Run:
        if random:
            return _reference_run(plan, start, args, kwargs, _OPTIMIZERS[optimizer], steps, seed)
        return _eager_run(start, args, kwargs, loss, _OPTIMIZERS[optimizer], steps, wide)

    rounding: float | None = None
    allowed = True
    for name in optimizers:
        single = single_device(whole, name)
        apart = 0.0
        for run in _distributed_runs(plan, whole, args, kwargs, _OPTIMIZERS[name], steps, seed, loss):
            pairs: tuple[tuple[str, Tensors, Tensors], ...] = (
                ("loss", {"loss": run.loss}, {"loss": single.loss}),
                ("gradients", run.gradients, single.gradients),
                ("parameters", run.final, single.final),
            )
            for kind, got, want in pairs:
                error, where = largest_error(got, want, noise[kind])
                apart = max(apart, error) if kind == "parameters" else apart
                if not error <= errors[kind]:
                    errors[kind], worst[kind] = error, f"{where} ({name})"
        if apart > limit:
            moved = [single_device(_rounded(whole, draw), name).final for draw in range(DRAWS)]
            own = max(largest_error(final, single.final, noise["parameters"])[0] for final in moved)
            rounding = max(own, rounding or 0.0)
            allowed = allowed and apart <= min(ROUNDINGS * own, MOST * limit)
    if random:
        quiet = _quiet_error(whole, args, kwargs, loss, wide)
        if not quiet <= errors["loss"]:
            errors["loss"], worst["loss"] = quiet, "in evaluation mode"
    ok = allowed and errors["loss"] <= limit and errors["gradients"] <= limit
    return VerifyReport(
        ok, errors["loss"], errors["gradients"], errors["parameters"], limit, random, worst, rounding
    )


def _dtype(given: object) -> torch.dtype:
    """The dtype that is meant. Raises OptionError."""
    found = next((d for d in _TOLERANCES if given == d or given in (dtype_name(d), str(d))), None)
    if found is None:
        raise OptionError(f"dtype is {given!r}; allowed are {_listed(map(str, _TOLERANCES))}, or their names")
    return found


def _check(optimizers: Collection[str], steps: int) -> None:
    """Raise OptionError for optimizers that there are not, or nothing to compare."""
    names = tuple(_OPTIMIZERS)
    if isinstance(optimizers, str) or not optimizers or any(name not in names for name in optimizers):
        raise OptionError(f"optimizers is {optimizers!r}; name one or more of {_listed(names)} in a list")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise OptionError(f"steps is {steps!r}; take a whole number from 1")


def _listed(names: Iterable[str]) -> str:
    return " and ".join(names)


def largest_error(got: Tensors, want: Tensors, noise: float = 0.0) -> tuple[float, str]:
    """The largest relative error among tensors of one kind, and the name of the tensor that has it.

    Infinite where a tensor is missing, has another shape, or is not a number where the other is one.
    """
    if set(got) != set(want):
        return float("inf"), ", ".join(sorted(set(got) ^ set(want)))
    peak = max((_magnitude(t) for t in want.values()), default=0.0)
    largest, where = 0.0, ""
    for name in sorted(want):
        a, b = got[name].detach(), want[name].detach()
        if a.shape != b.shape:
            return float("inf"), name
        magnitude = _magnitude(b)
        scale = magnitude if magnitude > noise * peak else peak
        difference = (a.double() - b.double()).abs()
        difference = torch.where(a == b, 0.0, difference)
        difference = torch.where(a.isnan() & b.isnan(), 0.0, difference)
        most = float(difference.max()) if b.numel() else 0.0
        error = most if most == 0.0 else most / scale if scale > 0.0 else float("inf")
        if not error <= largest:
            largest, where = error if error == error else float("inf"), name
    return largest, where


def _magnitude(tensor: torch.Tensor) -> float:
    finite = tensor.detach().double()
    finite = finite[finite.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _named(model: nn.Module) -> Tensors:
    """Copies of all parameters and buffers; of tied ones the first name."""
    found = {n: p.detach().clone() for n, p in model.named_parameters()}
    found.update((n, b.detach().clone()) for n, b in model.named_buffers())
    return found


def _rounded(model: nn.Module, seed: int) -> nn.Module:
    """A copy, with every parameter's elements moved by one rounding up, down or not at all."""
    moved = model_in(model, next(iter(model.parameters())).dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in moved.parameters():
            if parameter.is_floating_point():
                steps = torch.randint(-1, 2, parameter.shape, generator=generator).to(parameter)
                parameter.mul_(1 + steps * torch.finfo(parameter.dtype).eps)
    return moved


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _eager_run(
    whole: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss: Loss | None,
    optimizer_of: Optimizer, steps: int, dtype: torch.dtype,
) -> _Run:  # fmt: skip
    model = model_in(whole, dtype)
    optimizer = optimizer_of(_trainable(model))
    first: _Run | None = None
    for _ in range(steps):
        optimizer.zero_grad()
        with all_in(dtype):
            value = _loss_of(model, args, kwargs, loss)
            torch.autograd.backward(value)
        if first is None:
            first = _Run(value.detach().clone(), _gradients(model), {})
        optimizer.step()
    assert first is not None
    return _Run(first.loss, first.gradients, _named(model))


def _loss_of(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss: Loss | None
) -> torch.Tensor:
    output = model(*args, **kwargs) if loss is None else loss(model, *args, **kwargs)
    found = find_loss(output)
    assert found is not None
    return found


def _gradients(model: nn.Module) -> Tensors:
    return {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}


def _distributed_runs(
    plan: Plan, whole: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], optimizer_of: Optimizer,
    steps: int, seed: int, loss: Loss | None,
) -> list[_Run]:  # fmt: skip
    """Every rank's view: its loss, and the whole tensors assembled from all shards."""
    models = [model_in(whole, next(iter(whole.parameters())).dtype) for _ in range(plan.cluster.ranks)]

    def body(communicator: Communicator) -> _Run:
        hap = HAP(
            models[communicator.rank], plan.cluster, plan=plan, process_group=communicator, loss=loss,
            sync_module_states=False,
        )  # fmt: skip
        hap.run_lowered()
        hap.use_randomness(Randomness(seed, communicator.rank, torch.device("cpu"), reference=True))
        optimizer = optimizer_of(_trainable(hap))
        first: _Run | None = None
        for _ in range(steps):
            optimizer.zero_grad()
            value = find_loss(hap(*args, **kwargs))
            assert value is not None
            torch.autograd.backward(value)
            if first is None:
                first = _Run(value.detach().clone(), hap.full_gradients(), {})
            optimizer.step()
        assert first is not None
        return _Run(first.loss, first.gradients, hap.full_tensors())

    return run_ranks(plan.cluster.ranks, body)


def _reference_run(
    plan: Plan, whole: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], optimizer_of: Optimizer,
    steps: int, seed: int,
) -> _Run:  # fmt: skip
    model = model_in(whole, next(iter(whole.parameters())).dtype)
    inputs, why = match(expected(plan.graph), args, kwargs)
    if inputs is None:
        raise BatchMismatchError(f"the example is not the plan's: {why}")
    randomness = Randomness(seed, 0, torch.device("cpu"), reference=True)
    optimizer = optimizer_of(_trainable(model))
    first: _Run | None = None
    for _ in range(steps):
        randomness.begin_step()
        parameters = dict(model.named_parameters())
        buffers = dict(model.named_buffers())
        result = run_reference(plan.theory, parameters, buffers, inputs, randomness=randomness)
        for name, value in result.buffers.items():
            buffers[name].copy_(value)
        for name, value in result.parameters.items():
            parameters[name].data.copy_(value)
        for name, parameter in parameters.items():
            parameter.grad = result.gradients.get(name)
        if first is None:
            assert result.loss is not None
            first = _Run(result.loss, _gradients(model), {})
        optimizer.step()
    assert first is not None
    return _Run(first.loss, first.gradients, _named(model))


def _quiet_error(
    whole: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss: Loss | None,
    dtype: torch.dtype,
) -> float:  # fmt: skip
    """The error of the loss in evaluation mode against eager PyTorch (no random numbers are drawn there)."""
    model = model_in(whole, dtype).eval()
    with torch.no_grad(), all_in(dtype):
        want = _loss_of(model, args, kwargs, loss)
    theory = derive(retyped_graph(trace(model, args, kwargs, loss=loss, training=False), dtype))
    if any(rule.random for rule in theory.rules.values()):
        return 0.0
    inputs, _ = match(expected(theory.graph), args, kwargs)
    assert inputs is not None
    randomness = Randomness(0, 0, torch.device("cpu"), reference=True)
    got = run_reference(
        theory, dict(model.named_parameters()), dict(model.named_buffers()), inputs, randomness=randomness
    ).loss
    assert got is not None
    return largest_error({"loss": got}, {"loss": want})[0]
