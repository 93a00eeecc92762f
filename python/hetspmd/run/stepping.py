"""When the shards that an optimizer steps are plain parameters: while its own code runs, and no other's.

The hooks before and after a step, and the closure that a step is given, are the user's. They meet shards, as code
around the step does: what takes a shard for the whole is refused there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from hetspmd.run.asking import begin_step, end_step, outside_steps
from hetspmd.run.parameter_registry import optimizer_parameters

_OURS: Final = -1
"""A key of tables of hooks that torch gives to none."""

Call = tuple[tuple[Any, ...], dict[str, Any]]


def begin(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """A step begins, after the hooks that the optimizer has of its own; other arguments, if it needs some."""
    before = getattr(optimizer, "_optimizer_step_pre_hooks", None)
    after = getattr(optimizer, "_optimizer_step_post_hooks", None)
    if after:
        after[_OURS] = _after_own_code
        after.move_to_end(_OURS, last=False)
    if before:
        before.pop(_OURS, None)
        before[_OURS] = _before_own_code
    else:
        begin_step(optimizer_parameters(optimizer))
    return _with_closure(args, kwargs)


def end(optimizer: torch.optim.Optimizer) -> None:
    """A step is over, and the hooks after it as well."""
    if _OURS not in getattr(optimizer, "_optimizer_step_post_hooks", ()):
        end_step()


def _before_own_code(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    begin_step(optimizer_parameters(optimizer))


def _after_own_code(*_: Any) -> None:
    end_step()


def _with_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    if _is_closure(kwargs.get("closure")):
        return args, {**kwargs, "closure": _outside(kwargs["closure"])}
    if len(args) > 1 and _is_closure(args[1]):
        return (args[0], _outside(args[1]), *args[2:]), kwargs
    return None


def _is_closure(argument: object) -> bool:
    return callable(argument) and not isinstance(argument, torch.Tensor)


def _outside(closure: Callable[..., Any]) -> Callable[..., Any]:
    def outside(*args: Any, **kwargs: Any) -> Any:
        with outside_steps():
            return closure(*args, **kwargs)

    return outside
