"""torch's functions that a script calls on parameters outside of its model, given a shard.

``p.norm()`` is refused by the shard; ``torch.norm(p)`` calls code of torch's that a parameter has no part in. From
the first HAP module on, these functions take a shard for its values
(:class:`~hetspmd.run.shard_tensors.ShardValues`), which refuse what they do or know that the result is a part of
the whole; for all other arguments they are as they were. Plans, whose ops are called otherwise, never meet them.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any, Final

import torch
from torch import nn

from hetspmd.run.shard_tensors import MARK, Shard, values_of, words
from hetspmd.trace.compat import know_constructors, stays_scriptable

_OF_TORCH: Final = words(
    """
    abs add all amax amin aminmax any argmax argmin argsort bernoulli bmm cat cdist chunk clamp clone
    concat corrcoef count_nonzero cov dropout cumprod cumsum diag diagonal diff dist div dot einsum eq
    exp eye flatten flip ge gt histc hstack isclose isfinite isinf isnan le log log_softmax logical_not
    logsumexp lt masked_select matmul max maximum mean median min minimum mm mul mv nanmean nansum ne
    nonzero norm normal outer permute poisson pow prod quantile rand_like randn_like randint_like relu
    renorm reshape roll round sigmoid sign softmax sort split sqrt square stack std std_mean sub sum svd
    tanh tensordot topk trace transpose tril triu unbind unique var var_mean vstack where
    _foreach_norm _foreach_mul _foreach_pow _foreach_abs
    """
)
_OF_FUNCTIONAL: Final = words("cosine_similarity dropout l1_loss linear mse_loss smooth_l1_loss")
_OF_INIT: Final = words("dirac_ orthogonal_ sparse_")
"""Those that would write a part before they are refused."""

_LOCK = threading.Lock()
_REACHED: list[Callable[..., Any]] = []
"""The functions that were changed."""


def reach_functions() -> None:
    """Let torch's functions know shards, from the first call on."""
    with _LOCK:
        if not _REACHED:
            know_constructors()
            for module, name in _places():
                original = getattr(module, name, None)
                if original is not None:
                    made = _knowing(original, refuse=module is nn.init)
                    stays_scriptable(made, original)
                    setattr(module, name, made)
                    _let_pickle_find(made, original, module, name)
                    _REACHED.append(original)


def _let_pickle_find(
    made: Callable[..., Any], original: Callable[..., Any], module: ModuleType, name: str
) -> None:
    """Let ``made`` lie where its module and name say: models have functions as activations, and are saved."""
    if not isinstance(original, FunctionType):
        made.__module__, made.__qualname__ = module.__name__, name
        return
    home = sys.modules[original.__module__]  # torch.jit.script looks for overloads by its name
    if getattr(home, original.__qualname__, None) is original:
        setattr(home, original.__qualname__, made)


def _places() -> Iterator[tuple[ModuleType, str]]:
    yield from ((torch, name) for name in _OF_TORCH)
    yield from ((nn.functional, name) for name in _OF_FUNCTIONAL)
    yield from ((nn.init, name) for name in _OF_INIT)
    for name in sorted(vars(torch.linalg)):
        found = getattr(torch.linalg, name)
        if not name.startswith("_") and callable(found) and not isinstance(found, type):
            yield torch.linalg, name


def _knowing(original: Callable[..., Any], *, refuse: bool) -> Callable[..., Any]:
    """The function, for which a shard is its values; or which refuses it."""
    shard, values = Shard, _refused if refuse else _values
    name = original.__name__

    def function(*args: Any, **kwargs: Any) -> Any:
        for arg in args:
            kind = type(arg)
            if kind is shard or ((kind is list or kind is tuple) and shard in map(type, arg)):
                args = tuple(values(arg, name) for arg in args)
                break
        if kwargs and shard in map(type, kwargs.values()):
            kwargs = {key: values(arg, name) for key, arg in kwargs.items()}
        return original(*args, **kwargs)

    if isinstance(original, FunctionType):
        # torch.jit.script reads the source of the original, whose names are in its module.
        function = FunctionType(
            function.__code__, original.__globals__, name, function.__defaults__, function.__closure__
        )
    return functools.wraps(original)(function)


def _refused(arg: Any, name: str) -> Any:
    if type(arg) is Shard:
        raise arg.__dict__[MARK].refusal(name, "draw")
    return arg


def _values(arg: Any, name: str) -> Any:
    if type(arg) is Shard:
        return values_of(arg)
    if type(arg) in (list, tuple):
        return type(arg)(_values(member, name) for member in arg)
    return arg
