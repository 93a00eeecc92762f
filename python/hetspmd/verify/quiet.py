"""The reference graph of a model that draws random numbers, compared with eager PyTorch where it draws none.

In training mode with every dropout turned off, if nothing else draws, the loss and all gradients are compared:
batch norm and what else training does is seen. Otherwise the loss is compared in evaluation mode, if nothing
draws there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hetspmd.dist.random import Randomness
from hetspmd.errors import HetspmdError
from hetspmd.rules.theory import Theory, derive
from hetspmd.run.guard import expected, match
from hetspmd.trace.recompute import Chooser, own_regions
from hetspmd.trace.trace import trace
from hetspmd.verify.difference import Tensors, largest_error
from hetspmd.verify.precision import NamedDtypes, all_in, retyped_graph
from hetspmd.verify.reference import run_reference
from hetspmd.verify.training_steps import TrainingCase, loss_of

_P = {
    "dropout": 1,
    "dropout1d": 1,
    "dropout2d": 1,
    "dropout3d": 1,
    "alpha_dropout": 1,
    "feature_alpha_dropout": 1,
    "scaled_dot_product_attention": 4,
}
"""Functions of torch.nn.functional that drop, and the position of the probability."""


def quiet_error(setting: TrainingCase, noise: float) -> tuple[str, float, float, str]:
    """``(where, loss error, gradient error, worst gradient)``; ``where`` is "" if the model draws in both
    modes."""
    for name, training in (("with dropout off", True), ("in evaluation mode", False)):
        model = setting.copy()
        if training:
            _without_dropout(model)
        else:
            model.eval()
        theory = _theory(replace(setting, model=model), training)
        if theory is not None:
            loss, gradients, worst = _errors(replace(setting, model=model), theory, training, noise)
            return name, loss, gradients, worst
    return "", 0.0, 0.0, ""


def wide_trace(
    setting: TrainingCase,
    *,
    training: bool,
    without_dropout: bool = False,
    recompute: Chooser = own_regions,
) -> Any:
    """The graph of the setting's model in its dtype, also where the model names others; ``recompute`` chooses what
    its
    backward computes again."""

    def whole(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with NamedDtypes(setting.dtype), _Off() if without_dropout else nullcontext():
            return model(*args, **kwargs) if setting.loss is None else setting.loss(model, *args, **kwargs)

    graph = trace(
        setting.model, setting.args, setting.kwargs, loss=whole, training=training, recompute=recompute
    )
    return retyped_graph(graph, setting.dtype)


def _theory(setting: TrainingCase, training: bool) -> Theory | None:
    """The theory of the quiet graph, None if it draws, or cannot be had."""
    try:
        theory = derive(wide_trace(setting, training=training, without_dropout=training), quiet=True)
    except HetspmdError:
        return None
    return None if any(rule.random for rule in theory.rules.values()) else theory


def _errors(setting: TrainingCase, theory: Theory, training: bool, noise: float) -> tuple[float, float, str]:
    inputs, _ = match(expected(theory.graph), setting.args, setting.kwargs)
    assert inputs is not None
    randomness = Randomness(0, 0, torch.device("cpu"), reference=True)
    parameters, buffers = dict(setting.model.named_parameters()), dict(setting.model.named_buffers())
    got = run_reference(theory, parameters, buffers, inputs, randomness=randomness)
    model = setting.copy()
    off = _Off() if training else nullcontext()
    with torch.set_grad_enabled(training), all_in(setting.dtype), off:
        want = loss_of(setting, model)
        if want.requires_grad:
            torch.autograd.backward(want)
    assert got.loss is not None
    loss, _ = largest_error({"loss": got.loss}, {"loss": want})
    wanted: Tensors = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    gradients, worst = largest_error(got.gradients, wanted, noise)
    return loss, gradients, worst


def _without_dropout(model: nn.Module) -> None:
    """Turn dropout off that modules hand to functions below :class:`_Off`."""
    for module in model.modules():
        if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
            module.dropout = 0.0


class _Off(TorchFunctionMode):
    """Every dropout keeps everything."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        position = _P.get(getattr(func, "__name__", ""))
        if position is not None and getattr(func, "__module__", "") in (F.__name__, "torch._C._nn"):
            name = "dropout_p" if position > 1 else "p"
            if len(args) > position:
                args = (*args[:position], 0.0, *args[position + 1 :])
            else:
                kwargs[name] = 0.0
        return _call(func, args, kwargs)


def _call(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)
