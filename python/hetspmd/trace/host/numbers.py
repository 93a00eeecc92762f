"""Numbers of the model as inputs of the graph: tensors without dims that are promoted as Python's numbers
are.

A Python number takes the dtype of the tensor it meets, if that is of its kind or a higher one. A tensor
without dims does so only beside one with dims. Within :class:`AsNumbers` a number's tensor is converted
before it meets another tensor; arithmetic of numbers alone is in float64 and int64, as Python's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_REDUCED = (torch.float16, torch.bfloat16)
_NEW = {
    old: name
    for name in ("add", "sub", "mul", "truediv", "div", "floordiv", "floor_divide", "mod", "remainder", "pow")
    for old in (f"__i{name}__", f"{name}_")
}
"""What is done in place, to what makes a new number."""
_METHODS = {"truediv": "div", "floordiv": "floor_divide", "mod": "remainder"}


class AsNumbers(TorchFunctionMode):
    """Within it ``numbers``, and what is computed of them alone, are promoted as Python's numbers."""

    def __init__(self, numbers: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._numbers = {id(tensor): tensor for tensor in numbers}

    def is_number(self, value: object) -> bool:
        """Whether a value is a number's tensor."""
        return id(value) in self._numbers

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = dict(kwargs or {})
        tensors = list(_tensors((args, tuple(keywords.values()))))
        if not any(map(self.is_number, tensors)):
            return func(*args, **keywords)
        if (
            args
            and self.is_number(args[0])
            and (other := _NEW.get(getattr(func, "__name__", ""))) is not None
        ):
            func = getattr(
                torch.Tensor, _METHODS.get(other, other)
            )  # a Python number is not changed in place
        others = [t for t in tensors if not self.is_number(t)]
        if others:
            kind = _kind(others)
            args = tuple(self._as(a, kind) for a in args)
            return func(*args, **{k: self._as(v, kind) for k, v in keywords.items()})
        result = func(*args, **keywords)
        if isinstance(result, torch.Tensor) and result.shape == ():
            self._numbers[id(result)] = result
        return result

    def _as(self, value: Any, kind: torch.dtype) -> Any:
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)(self._as(v, kind) for v in value)
        if not self.is_number(value):
            return value
        if value.is_floating_point():
            wanted = kind if kind.is_floating_point or kind.is_complex else torch.get_default_dtype()
        else:
            wanted = torch.int64 if kind == torch.bool else kind
        wanted = torch.float32 if wanted in _REDUCED else wanted
        return value if wanted.is_complex or value.dtype == wanted else value.to(wanted)


def _kind(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def _tensors(value: Iterable[Any]) -> Iterable[torch.Tensor]:
    for item in value:
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from _tensors(item)
