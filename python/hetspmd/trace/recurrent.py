"""Dropout between the layers of a recurrent network.

torch's decomposition of ``lstm``, ``gru`` and ``rnn`` leaves it out (its condition is never met), so that a
trace of several layers would train without it. :func:`layer_by_layer` calls one layer after the other instead,
with dropout between them, which is what the op computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_OPS = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


def layer_by_layer(model: nn.Module) -> AbstractContextManager[Any]:
    """Within the context, the model's recurrent networks that drop between layers run layer by layer."""
    drops = any(isinstance(m, nn.RNNBase) and m.dropout > 0 for m in model.modules())
    return _LayerByLayer() if drops else nullcontext()


class _LayerByLayer(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _OPS and not kwargs and len(args) == 9 and isinstance(args[3], bool):
            layers, dropout, training = args[4:7]
            if training and dropout > 0 and layers > 1:
                return _layers(func, args)
        return func(*args, **kwargs)


def _layers(func: Any, args: Sequence[Any]) -> Any:
    x, state, params, biases, layers, dropout, training, both, batch_first = args
    several = isinstance(state, (tuple, list))
    states = list(state) if several else [state]
    directions, each = (2 if both else 1), len(params) // layers
    last: list[list[torch.Tensor]] = [[] for _ in states]
    for layer in range(layers):
        if layer:
            x = torch.dropout(x, dropout, training)
        own = [s[layer * directions : (layer + 1) * directions] for s in states]
        weights = params[layer * each : (layer + 1) * each]
        x, *new = func(x, own if several else own[0], weights, biases, 1, 0.0, training, both, batch_first)
        for parts, value in zip(last, new, strict=True):
            parts.append(value)
    return (x, *(torch.cat(parts) for parts in last))
