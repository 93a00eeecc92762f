"""Whether an optimizer is elementwise, found out by trying it.

An optimizer is elementwise along a dimension if stepping a tensor gives what stepping its slices along that
dimension gives. A copy of the optimizer, without state, steps a small random tensor, and further copies its slices,
with the same gradients: of several sizes, large ones, and some of which one element is not a number. What an
optimizer does later, or in other cases, is not seen. The trial uses the optimizer's class, attributes and groups
and nothing of this rank, so that every rank finds the same.
"""

from __future__ import annotations

import copy
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final

import numpy as np
import torch

_optim = torch.optim
ELEMENTWISE: Final[frozenset[type]] = frozenset(
    (
        _optim.SGD, _optim.Adam, _optim.AdamW, _optim.NAdam, _optim.RAdam, _optim.Adamax, _optim.RMSprop,
        _optim.Rprop, _optim.ASGD, _optim.Adagrad, _optim.Adadelta,
    )
)  # fmt: skip
"""Optimizers of torch that need no trial; not those that inherit from them."""

TRIAL_STEPS: Final = 12
"""Steps of a trial: long enough for optimizers that begin with plain steps (Shampoo, SOAP, RAdam)."""

LARGEST_EXTENT: Final = 130
"""Elements of the two largest dimensions in a trial, which exceed the sizes from which optimizers factor (128)."""

OTHER_EXTENT: Final = 4
"""Elements of the other dimensions at most, so that a trial is short."""

GRADIENT_SIZES: Final = (1.0, 1e-3, 10.0)
"""Standard deviations of the gradients of a trial, in turn: what depends on how large they are shows itself."""

LARGE: Final = 1e5
"""That of a second trial, of which optimizers that clip see that it is large."""

FURTHER_STEPS: Final = 4
"""Steps of the trial with large gradients, and of the one in which an element of a gradient is not finite."""


class Untestable(Exception):
    """The optimizer fails in the trial."""


def trial_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a trial for a parameter of this shape."""
    largest = sorted(range(len(shape)), key=lambda d: (-shape[d], d))[:2]
    return tuple(min(size, LARGEST_EXTENT if d in largest else OTHER_EXTENT) for d, size in enumerate(shape))


def is_elementwise(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    like: torch.Tensor,
    shape: tuple[int, ...],
    dim: int,
) -> bool:
    """Whether ``optimizer`` steps slices along ``dim`` of a tensor of ``shape`` as it steps the tensor.

    ``group``: the options of the parameter group. ``like`` has the dtype and device. Raises Untestable.
    """
    first = torch.complex128 if like.is_complex() else torch.float64
    error: Exception | None = None
    for dtype in dict.fromkeys((first, like.dtype)):
        try:
            with _random_numbers_kept():
                return _agrees(optimizer, group, like.device, dtype, shape, dim)
        except Untestable as failure:
            error = failure
    raise error or Untestable


def steps_nothing(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], like: torch.Tensor, shape: tuple[int, ...]
) -> None:
    """Step a tensor of no elements, as an idle rank does. Raises Untestable if that fails."""
    empty = torch.empty((0, *shape[1:]), dtype=like.dtype, device=like.device)
    with _random_numbers_kept():
        _stepped(optimizer, group, empty, [empty.clone()])


def _agrees(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    dim: int,
) -> bool:
    generator = torch.Generator().manual_seed(0)

    def drawn(size: float) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, dtype=dtype) * size).to(device)

    def steps(start: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
        return _stepped(optimizer, group, start, gradients)

    start = drawn(1.0)
    gradients = [drawn(GRADIENT_SIZES[i % len(GRADIENT_SIZES)]) for i in range(TRIAL_STEPS)]
    if not _is_alike(steps, start, gradients, dim):
        return False
    with suppress(Untestable):  # it says so itself, on one device as well
        large = [drawn(LARGE) for _ in range(FURTHER_STEPS)]
        broken = [drawn(1.0) for _ in range(FURTHER_STEPS)]
        broken[1].view(-1)[:1] = math.nan
        if not (_is_alike(steps, start, large, dim) and _is_alike(steps, start, broken, dim)):
            return False
    empty = start.narrow(dim, 0, 0)
    steps(empty, [empty] * 2)
    return True


def _is_alike(
    steps: Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor],
    start: torch.Tensor,
    gradients: list[torch.Tensor],
    dim: int,
) -> bool:
    """Whether ``steps`` takes slices of ``start`` to where it takes the whole, in what is not finite, too."""
    whole = steps(start, gradients) - start
    third = start.shape[dim] // 3
    sizes = [third, start.shape[dim] - third] if third else [start.shape[dim]]
    cuts = [torch.split(gradient, sizes, dim) for gradient in gradients]
    starts = torch.split(start, sizes, dim)
    apart = torch.cat([steps(s, [cut[i] for cut in cuts]) for i, s in enumerate(starts)], dim) - start
    finite = torch.isfinite(whole)
    if not torch.equal(finite, torch.isfinite(apart)):
        return False
    whole, apart = whole[finite], apart[finite]
    exact = start.dtype in (torch.float64, torch.complex128)
    most = float(whole.abs().max()) if whole.numel() else 0.0
    bound = (1e-7 if exact else 1e-2) * most + (1e-13 if exact else 1e-6)
    return bool(((whole - apart).abs() <= bound).all())


def _stepped(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    start: torch.Tensor,
    gradients: list[torch.Tensor],
) -> torch.Tensor:
    """Where a copy of the optimizer takes ``start``."""
    errors = []
    for make in (_copied, _made_anew):
        for with_closure in (False, True):
            parameter = torch.nn.Parameter(start.detach().clone())
            try:
                twin = make(optimizer, group, parameter)
                for gradient in gradients:
                    parameter.grad = gradient.clone()
                    _step(twin, parameter if with_closure else None)
            except Exception as error:
                errors.append(f"{type(error).__name__}: {str(error).strip().splitlines()[0:1]}")
            else:
                return parameter.detach()
    raise Untestable(errors[0])


def _step(optimizer: torch.optim.Optimizer, closure_parameter: torch.nn.Parameter | None) -> None:
    """The step of the optimizer's class, without hooks and what schedulers put around it."""
    function: Callable[..., Any] = type(optimizer).step
    if getattr(function, "hooked", False):
        function = function.__wrapped__  # type: ignore[attr-defined]  # functools.wraps of torch's hooks
    if closure_parameter is None:
        function(optimizer)
        return
    gradient = closure_parameter.grad

    def closure() -> torch.Tensor:
        closure_parameter.grad = None if gradient is None else gradient + closure_parameter.detach()
        return torch.zeros((), dtype=closure_parameter.dtype, device=closure_parameter.device).real

    function(optimizer, closure)


_OWN: Final = ("state", "param_groups", "step", "defaults")


def _copied(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.nn.Parameter
) -> torch.optim.Optimizer:
    """A copy without state and hooks that holds ``parameter`` alone; so are the optimizers that it holds."""
    memo: dict[int, Any] = {}
    options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
    groups = [{**copy.deepcopy(options), "params": [parameter]}]
    for there in optimizer.param_groups:
        memo[id(there)] = groups[0]
        memo[id(there["params"])] = groups[0]["params"]
        memo.update((id(p), parameter) for p in there["params"])
    memo[id(optimizer.param_groups)] = groups

    def copied(one: torch.optim.Optimizer) -> torch.optim.Optimizer:
        twin: torch.optim.Optimizer = object.__new__(type(one))
        memo[id(one)] = twin
        state: defaultdict[Any, Any] = defaultdict(dict)
        memo[id(one.state)] = state
        for key, value in vars(one).items():
            if isinstance(value, torch.optim.Optimizer):
                twin.__dict__[key] = memo[id(value)] if id(value) in memo else copied(value)
            elif key in _OWN:
                continue
            elif key.startswith("_optimizer_"):
                twin.__dict__[key] = type(value)()  # no hooks
            else:
                twin.__dict__[key] = copy.deepcopy(value, memo)
        twin.__dict__.setdefault("defaults", dict(one.defaults) if "defaults" in vars(one) else {})
        if "state" in vars(one):
            twin.__dict__["state"] = state
        if "param_groups" in vars(one):
            twin.__dict__["param_groups"] = groups
        return twin

    return copied(optimizer)


def _made_anew(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.nn.Parameter
) -> torch.optim.Optimizer:
    """An optimizer of the class, for those that prepare their state when they are made."""
    options = {k: copy.deepcopy(v) for k, v in group.items() if k not in ("params", "param_names")}
    factory: Callable[..., torch.optim.Optimizer] = type(optimizer)
    return factory([{"params": [parameter], **options}])


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """The context leaves the random states of Python, numpy and torch's CPU as they were."""
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
