"""A few steps of training, the same on one device and on all ranks: what :mod:`hetspmd.verify.comparison`
compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hetspmd.dist.communicator import Communicator
from hetspmd.dist.random import Randomness
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import BatchMismatchError, ExampleError
from hetspmd.run.guard import expected, match
from hetspmd.run.module import HAP
from hetspmd.trace.losses import find_loss
from hetspmd.verify.copies import model_in
from hetspmd.verify.difference import Tensors
from hetspmd.verify.precision import all_in
from hetspmd.verify.reference import run_reference

if TYPE_CHECKING:
    from hetspmd.plan.plan import Plan
    from hetspmd.trace.losses import Loss

Optimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class TrainingCase:
    """A model whose tensors are in ``dtype``, a batch for it, and how it is trained."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: Loss | None
    dtype: torch.dtype
    steps: int = 1
    seed: int = 0

    def copy(self) -> nn.Module:
        """The model, to be trained."""
        return model_in(self.model, self.dtype)


@dataclass(frozen=True)
class TrainedRun:
    """What a number of steps leave: the first step's loss and gradients, the final tensors, by all of their names;
    and the parameters of which some gradient was not zero."""

    loss: torch.Tensor
    gradients: Tensors
    final: Tensors = field(default_factory=dict)
    moved: frozenset[str] = frozenset()


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that require a gradient."""
    return [p for p in model.parameters() if p.requires_grad]


def eager_run(setting: TrainingCase, optimizer_of: Optimizer) -> TrainedRun:
    """The unchanged model in eager PyTorch."""
    model = setting.copy()

    def step() -> torch.Tensor:
        with all_in(setting.dtype):
            value = loss_of(setting, model)
            if value.requires_grad:
                torch.autograd.backward(value)
        return value

    return _steps(setting, model, optimizer_of, step)


def reference_run(setting: TrainingCase, plan: Plan, optimizer_of: Optimizer) -> TrainedRun:
    """The plan's graph, interpreted on one device."""
    model = setting.copy()
    inputs, why = match(expected(plan.graph), setting.args, setting.kwargs)
    if inputs is None:
        raise BatchMismatchError(f"the example is not the plan's: {why}")
    randomness = Randomness(setting.seed, 0, torch.device("cpu"), reference=True)

    def step() -> torch.Tensor:
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
        assert result.loss is not None
        return result.loss

    return _steps(setting, model, optimizer_of, step)


def on_ranks(setting: TrainingCase, plan: Plan, optimizer_of: Optimizer) -> list[TrainedRun]:
    """Every rank's view: its loss, and the whole tensors assembled from all shards."""
    models = [setting.copy() for _ in range(plan.cluster.ranks)]

    def body(communicator: Communicator) -> TrainedRun:
        hap = HAP(
            models[communicator.rank],
            plan.cluster,
            plan=plan,
            process_group=communicator,
            loss=setting.loss,
            check_plan=False,
            sync_module_states=False,
        )
        hap.run_lowered()
        hap.use_randomness(Randomness(setting.seed, communicator.rank, torch.device("cpu"), reference=True))

        def step() -> torch.Tensor:
            value = find_loss(hap(*setting.args, **setting.kwargs), hap.loss_function)
            assert value is not None
            if value.requires_grad:
                torch.autograd.backward(value)
            return value

        return _steps(setting, hap, optimizer_of, step, hap.full_gradients, hap.full_tensors)

    return run_ranks(plan.cluster.ranks, body)


def _steps(
    setting: TrainingCase,
    model: nn.Module,
    optimizer_of: Optimizer,
    step: Callable[[], torch.Tensor],
    gradients: Callable[[], Tensors] | None = None,
    tensors: Callable[[], Tensors] | None = None,
) -> TrainedRun:
    """``step`` leaves gradients; ``gradients`` and ``tensors`` give whole ones by name."""
    parameters = trainable(model)
    optimizer = optimizer_of(parameters) if parameters else None
    first: TrainedRun | None = None
    moved: set[str] = set()
    for _ in range(setting.steps):
        if optimizer is not None:
            optimizer.zero_grad()
        value = step().detach().clone()
        step_gradients = _gradients(model) if gradients is None else gradients()
        moved.update(n for n, g in step_gradients.items() if bool((g != 0).any()))
        first = first or TrainedRun(value, step_gradients)
        if optimizer is not None:
            optimizer.step()
    assert first is not None
    inner = model.module if isinstance(model, HAP) else model
    whole = _named(inner) if tensors is None else _all_names(inner, tensors())
    return replace(first, final=whole, moved=frozenset(moved))


def loss_of(setting: TrainingCase, model: nn.Module) -> torch.Tensor:
    """The loss of the example. Raises ExampleError if there is none."""
    loss, args, kwargs = setting.loss, setting.args, setting.kwargs
    value = find_loss(model(*args, **kwargs) if loss is None else loss(model, *args, **kwargs), loss)
    if value is None:
        raise ExampleError(f"{type(model).__name__} returns no scalar loss for the example; pass loss=")
    return value


def _gradients(model: nn.Module) -> Tensors:
    return {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}


def _named(model: nn.Module) -> Tensors:
    """Copies of all parameters and buffers, by each of their names: a tensor that took another's place in its slot
    counts by the slot's name."""
    tensors = {n: p.detach().clone() for n, p in model.named_parameters(remove_duplicate=False)}
    tensors.update((n, b.detach().clone()) for n, b in model.named_buffers(remove_duplicate=False))
    return tensors


def _all_names(model: nn.Module, whole: Tensors) -> Tensors:
    """Whole tensors by each of their names, of which ``whole`` has the first one."""
    tensors = dict(whole)
    for named in (
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
    ):
        first: dict[int, str] = {}
        for name, tensor in named:
            tensors[name] = whole[first.setdefault(id(tensor), name)]
    return tensors
