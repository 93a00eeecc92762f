"""A module trained by HAP on simulated ranks, beside one device: everything that a step leaves is compared."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from small_plans import cluster
from torch import nn

from hetspmd.cluster.cluster import Cluster
from hetspmd.dist.communicator import Communicator
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.run.module import HAP
from hetspmd.trace.losses import find_loss

SPEEDS = (4.0, 2.0, 1.0, 1.0)

State = dict[str, Any]


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {n: p.detach().clone() for n, p in model.named_parameters()}
    found.update((n, b.detach().clone()) for n, b in model.named_buffers())
    return found


def run_steps(
    call: nn.Module, optimizer: torch.optim.Optimizer | None, batches: list[tuple[Any, ...]], gradients: Any,
    state: Any,
) -> list[State]:  # fmt: skip
    """What each step leaves: the loss, the gradients, and after the optimizer's step all tensors."""
    found: list[State] = []
    for batch in batches:
        output = call(*batch)
        loss = find_loss(output)
        assert loss is not None
        step: State = {"loss": loss.detach().clone()}
        if optimizer is not None and torch.is_grad_enabled():
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            step["gradients"] = {n: g.clone() for n, g in gradients().items()}
            optimizer.step()
        step["state"] = state()
        found.append(step)
    return found


def sgd(model: nn.Module) -> torch.optim.Optimizer | None:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.1, momentum=0.9) if trained else None


def one_device(model: nn.Module, batches: list[tuple[Any, ...]]) -> list[State]:
    def gradients() -> dict[str, torch.Tensor]:
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    return run_steps(model, sgd(model), batches, gradients, lambda: state_of(model))


def on_ranks(
    make: Callable[[], nn.Module], batches: list[tuple[Any, ...]], devices: Cluster | None = None, *,
    grad: bool = True, **options: Any,
) -> list[list[State]]:  # fmt: skip
    """The same of every rank; gradients and tensors are whole."""
    devices = cluster(*SPEEDS) if devices is None else devices
    models = [make() for _ in range(devices.ranks)]

    def body(communicator: Communicator) -> list[State]:
        hap = HAP(
            models[communicator.rank], devices, example=batches[0], process_group=communicator, **options
        )
        with torch.set_grad_enabled(grad):
            return run_steps(hap, sgd(hap), batches, hap.full_gradients, hap.full_tensors)

    return run_ranks(devices.ranks, body)


def assert_equal_to_one_device(
    make: Callable[[], nn.Module], batches: list[tuple[Any, ...]], devices: Cluster | None = None, *,
    grad: bool = True, **options: Any,
) -> None:  # fmt: skip
    """Losses, gradients, parameters and buffers after each step are one device's, on every rank."""
    model = make()
    with torch.set_grad_enabled(grad):
        want = one_device(copy.deepcopy(model), batches)
    for rank, got in enumerate(
        on_ranks(lambda: copy.deepcopy(model), batches, devices, grad=grad, **options)
    ):
        for index, (mine, theirs) in enumerate(zip(got, want, strict=True)):
            _compare(mine, theirs, f"rank {rank}, step {index}")


def _compare(got: State, want: State, where: str) -> None:
    close = {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(got["loss"], want["loss"], **close, msg=lambda m: f"{where}: loss: {m}")
    for kind in ("gradients", "state"):
        assert set(got.get(kind, {})) == set(want.get(kind, {})), f"{where}: {kind}"
        for name, value in want.get(kind, {}).items():
            torch.testing.assert_close(
                got[kind][name], value, **close, msg=lambda m, n=f"{where}: {kind} {name}": f"{n}: {m}"
            )
