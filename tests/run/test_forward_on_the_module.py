"""A ``forward`` that was put on a module before HAP, as one gives a library's block to torch.utils.checkpoint: HAP
puts something in its place while parameters lie in shards, and must not take that for a change. And code that names
torch.ops, whose ops appear when they are first read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from beside import Beside, base, equal
from torch import nn
from torch.utils.checkpoint import checkpoint


def _checkpointed(module: nn.Module) -> Any:
    return partial(checkpoint, module.forward, use_reentrant=False)


def _partial(module: nn.Module) -> Any:
    return partial(module.forward)


@pytest.mark.parametrize("put", [_checkpointed, _partial])
@pytest.mark.parametrize("zero", [None, 3])
def test_a_forward_on_a_module_stays_what_it_is(put: Callable[[nn.Module], Any], zero: int | None) -> None:
    def made() -> nn.Module:
        model = Beside(base)
        for module in (model.up, model.down):
            module.forward = put(module)  # type: ignore[method-assign]  # users put it there
        return model

    equal(made, steps=3, plans=1, zero=zero)


def _doubled(call: Any, x: torch.Tensor) -> torch.Tensor:
    return 2.0 * call(x)


def test_another_forward_on_a_module_is_noticed() -> None:
    def put_another(model: Any, step: int) -> None:
        if step == 2:
            model.up.forward = partial(_doubled, nn.Linear.forward.__get__(model.up))

    equal(lambda: Beside(base), put_another, steps=4)


def _named(model: Any, x: torch.Tensor) -> torch.Tensor:
    if x.dim() == 7:
        return torch.ops.aten.relu_.default(x)
    return base(model, torch.ops.aten.tanh.default(x))


def test_ops_that_code_names_are_no_change() -> None:
    equal(lambda: Beside(_named), steps=2, plans=1)
