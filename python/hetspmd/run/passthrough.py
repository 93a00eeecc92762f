"""One active device: the model itself runs.

A plan that leaves one device active divides nothing, and sends nothing but results to idle devices. Its program is
the model's own step, and the model is what runs it, at eager PyTorch's cost and with PyTorch's own autograd. The
lowered graphs run instead where something is wanted of them: blocks that are computed again without the model's own
doing (:mod:`hetspmd.trace.recompute`), random numbers that do not depend on the devices
(:mod:`hetspmd.dist.random`), a recording, the first instruction that makes NaN, or ``torch.compile``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hetspmd.errors import GradientError
from hetspmd.plan.plan import Plan
from hetspmd.run.autograd import NOT_THE_LOSS, Runner
from hetspmd.trace.blocks import is_own_region
from hetspmd.trace.compat.trees import flatten, unflatten
from hetspmd.trace.losses import Loss


def is_the_model(plan: Plan) -> bool:
    """Whether the program of the plan's active device is the model's own step."""
    graph = plan.graph
    random = any(rule.random for rule in plan.theory.rules.values())
    returned = graph.loss is None or any(output.tensor == graph.loss for output in graph.outputs)
    beside = bool(graph.host.kept or graph.host.draws)
    alone = plan.inside is None and len(plan.active) == 1 and plan.micro_batches == 1
    itself = all(is_own_region(block.block) for block in graph.recomputed)  # nothing else is computed again
    return alone and returned and itself and not random and not beside


def run_model(
    module: nn.Module,
    loss: Loss | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    plan: Plan,
    runner: Runner,
    spec: Any,
) -> Any:
    """What :class:`HAP` returns of a step on the active device, by its model; idle devices are sent the results.

    As of any other plan, only the loss is differentiable, and what is no tensor comes back as it was when the model
    was traced. ``loss`` as HAP is given it, ``spec`` the output's structure.
    """
    runtime, graph = runner.runtime, plan.graph
    runtime.randomness.begin_step()
    try:
        flat, _ = flatten(module(*args, **kwargs) if loss is None else loss(module, *args, **kwargs))
    except Exception as error:
        (runtime.everyone or runtime.communicator).report(error)
        raise
    leaves = [(o, leaf) for o, leaf in zip(graph.outputs, flat, strict=True) if o.tensor is not None]
    # A tensor that is returned twice, once detached, is the one that is not.
    values: dict[Any, Any] = {o.tensor: t for o, t in sorted(leaves, key=lambda pair: not pair[0].detached)}
    runner.send(values)
    shown = {t: value if t == graph.loss else _refusing(value) for t, value in values.items()}
    return unflatten(graph.filled_outputs(shown), spec)


def _refusing(output: torch.Tensor) -> torch.Tensor:
    """The output, through which no gradient passes."""
    if not output.requires_grad:
        return output
    refusing: torch.Tensor = _Refuse.apply(output)
    return refusing


class _Refuse(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, output: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(_ctx: Any, *_gradients: torch.Tensor) -> Any:
        raise GradientError(NOT_THE_LOSS)
