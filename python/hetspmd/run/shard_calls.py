"""A function of torch that is called on parts of tensors, by whatever way.

One that is element by element is computed of the part (a whole tensor that it meets is cut to the same part), sizes
are those of the whole parameter, and what mixes elements (norms, products, indices, random numbers) is refused with
the line to write.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Final, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import nn

from hetspmd.errors import ShardError
from hetspmd.lower.local_program import LocalTensor
from hetspmd.run.asking import OF_TORCH, is_asked_by_user
from hetspmd.run.shard_functions import (
    Role,
    is_list,
    is_of_two,
    kind_of,
    name_of,
    role_of,
    takes_all,
    tensors_in,
    writes,
)
from hetspmd.trace.compat.tensors import as_plain

MARK: Final = "hetspmd_shard"
"""The attribute that says of which parameter a tensor is a shard."""

_PASSING: Final = (OF_TORCH + "overrides.py", OF_TORCH + "_tensor.py")
_INIT: Final = OF_TORCH + "nn/init.py"
_VMAP: Final = OF_TORCH + "_functorch/vmap.py"
_COLLECTIVES: Final = OF_TORCH + "distributed/distributed_c10d.py"
_ABOUT_SIZES: Final = re.compile(r"\b(sizes?|shapes?|dimensions?|broadcast|elements)\b", re.IGNORECASE)
_BY_TYPE: Final = frozenset(("to", "type", "type_as"))
"""Functions that take of another tensor no more than its type."""


class PartMark(Protocol):
    """What a part knows of the whole (:class:`hetspmd.run.shards.ShardMark`)."""

    layout: LocalTensor

    def cut(self, source: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor; any other as it is."""

    def part_of(self, source: Any) -> Any:
        """This rank's part of what is copied into the part."""

    def lies_as(self, other: Any) -> bool:
        """Whether every rank has the same part of both."""

    def of_gradient(self, parameter: torch.Tensor) -> PartMark:
        """The mark of a gradient of what this is the mark of."""

    def gradient(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The gradient that ``tensor`` is another name for."""

    def refusal(self, what: str, kind: str) -> ShardError:
        """The error of a function that needs the whole."""

    def into(self, name: str) -> ShardError:
        """The error of a function that would write the part to a whole tensor."""

    def transformed(self, what: str) -> ShardError:
        """The error of a transform of torch.func, and of what else asks no tensor's class."""

    def copied(self) -> NoReturn:
        """Raises the error of a copy."""

    def pickled(self) -> NoReturn:
        """Raises the error of a pickle."""


class Part:
    """What is a part of a tensor."""

    __slots__ = ()


class Use:
    """A function of torch that is called on parts, by the code in ``frame``."""

    def __init__(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: FrameType,
        as_values: Callable[[torch.Tensor, PartMark], torch.Tensor],
    ) -> None:
        self._as_values = as_values
        if not args and "input" in kwargs and "condition" not in kwargs:  # it is the first one
            args, kwargs = (kwargs["input"],), {key: value for key, value in kwargs.items() if key != "input"}
        self.func, self.args, self.kwargs = func, args, kwargs
        while frame.f_code.co_filename in _PASSING and frame.f_back is not None:
            frame = frame.f_back
        self.frame = frame
        self.name = name_of(func)
        self.own = next(mark for mark in map(_mark_of, tensors_in((*args, *kwargs.values()))) if mark)

    def result(self) -> Any:
        """What the function yields. Raises ShardError if that is not a part of what it yields on one device."""
        role = role_of(self.func)
        file = self.frame.f_code.co_filename
        if file == _INIT and role is not Role.DESCRIBES and role is not Role.SIZE:
            if self.frame.f_code.co_name not in ("_no_grad_fill_", "_no_grad_zero_", "constant_"):
                self._refuse("write" if self.frame.f_code.co_name in ("dirac_", "eye_") else "draw")
        elif file == _VMAP:
            self._refuse(name="torch.vmap")
        elif file == _COLLECTIVES:  # torch 2.11 has functions that do not ask
            self._refuse("send", self.frame.f_code.co_name)
        elif getattr(self.func, "__module__", "") == dist.all_reduce.__module__:
            self._refuse("send")
        elif role is Role.SIZE:
            return self._size(file)
        elif role is Role.GRADIENT:
            return self._gradients(file)
        elif role is Role.INDEX:
            return self._indexed()
        elif role is Role.VIEW:
            return self._viewed()
        elif role is Role.LIST:
            return self._of_lists()
        elif (role is Role.ELEMENTWISE and self._is_whole_call()) or is_of_two(self.name, self.args):
            return self._elementwise()
        elif role is not Role.DESCRIBES or (self.name.startswith("new") and self._is_of_parts()):
            self._refuse()
        return self._plainly(self.args, self.kwargs)

    def _plainly(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        with as_plain():
            return self.func(*args, **kwargs)

    def _refuse(self, kind: str = "", name: str = "") -> None:
        if is_asked_by_user(self.frame):
            raise self.own.refusal(name or self.name, kind or kind_of(self.name))

    def _is_of_parts(self) -> bool:
        """Whether there is a part among the arguments but the first."""
        return any(isinstance(value, Part) for value in tensors_in((*self.args[1:], *self.kwargs.values())))

    def _is_whole_call(self) -> bool:
        return self.name != "where" or len(self.args) + len(self.kwargs) > 1

    def _size(self, file: str) -> Any:
        """Of the whole, for whom it is not torch that asks."""
        values = self.args[0]
        is_of_torch = file.startswith(OF_TORCH) and file != _INIT  # which counts what goes in and out
        if is_of_torch or not isinstance(values, Part) or not is_asked_by_user(self.frame):
            return self._plainly(self.args, self.kwargs)
        shape = torch.Size(self.own.layout.shape)
        with as_plain():
            whole = torch.empty(shape, dtype=values.dtype, device="meta")  # type: ignore[attr-defined]  # a tensor
        return shape if self.name == "shape" else self.func(whole, *self.args[1:], **self.kwargs)

    def _gradients(self, file: str) -> Any:
        """``values.grad``, and what ``torch.autograd.grad`` yields."""
        result = self._plainly(self.args, self.kwargs)
        if self.name == "grad" and self.func is not torch.autograd.grad:
            is_own = isinstance(result, torch.Tensor) and not file.startswith(OF_TORCH)
            return self._as_values(result, self.own.of_gradient(self.args[0])) if is_own else result
        inputs = self.args[1] if len(self.args) > 1 else self.kwargs["inputs"]
        inputs = [inputs] if isinstance(inputs, torch.Tensor) else inputs
        return tuple(
            gradient
            if gradient is None or not isinstance(of, Part)
            else self._as_values(gradient, of.__dict__[MARK].of_gradient(of))
            for of, gradient in zip(inputs, result, strict=True)
        )

    def _indexed(self) -> Any:
        values, index = self.args[0], self.args[1]
        if not takes_all(index) or not isinstance(values, Part):
            self._refuse()
        args = (values, index, *(self._fit(value) for value in self.args[2:]))
        return self._marked(self._sized(args, {}))

    def _viewed(self) -> Any:
        """It is a part as well, if it has the shape of the whole on one device."""
        values: Any = self.args[0]
        whole = self.own.layout.shape
        others = [
            torch.empty(a.__dict__[MARK].layout.shape, device="meta") if isinstance(a, Part) else a
            for a in self.args[1:]
        ]
        if not isinstance(values, Part):
            if self.frame.f_code.co_name == "vector_to_parameters":
                self._refuse("write", "vector_to_parameters")
            if is_asked_by_user(self.frame):
                return self.func(values, *others, **self.kwargs)
        else:
            with as_plain():
                same = torch.empty(whole, device="meta")
                try:
                    shape = self.func(same, *others, **self.kwargs).shape
                except RuntimeError as error:
                    raise self.own.refusal(self.name, "read") from error
                if torch.dtype in map(type, self.args):
                    return self._marked(self.func(*self.args, **self.kwargs))
                if tuple(shape) == tuple(whole):
                    return self._marked(self.args[0].view(self.args[0].shape))
        self._refuse()
        return self._plainly(self.args, self.kwargs)

    def _elementwise(self) -> Any:
        into = self.args[0] if writes(self.name) and self.args else self.kwargs.get("out")
        if isinstance(into, torch.Tensor) and not isinstance(into, Part):
            self._into(into, self.own)
        if self.name in _BY_TYPE and not isinstance(self.args[0], Part):
            return self._plainly(self.args, self.kwargs)
        if self.name in _BY_TYPE or self.name.endswith("_like"):
            args, kwargs = self.args, self.kwargs
        elif self.name == "copy_" and isinstance(into, Part):
            args, kwargs = (into, *(self._source(a) for a in self.args[1:])), self.kwargs
        else:
            args = tuple(self._fit(arg) for arg in self.args)
            kwargs = {key: self._fit(value) for key, value in self.kwargs.items()}
        return self._marked(self._sized(args, kwargs))

    def _of_lists(self) -> Any:
        """Element by element, of the tensors that stand in one place of all lists."""
        lists = [a for a in (*self.args, *self.kwargs.values()) if is_list(a)]
        owns = [
            next((m for m in map(_mark_of, tensors_in(row)) if m), None) for row in zip(*lists, strict=False)
        ]

        def fit(values: Any) -> Any:
            if not is_list(values):
                return values
            return [v if own is None else self._fit(v, own) for v, own in zip(values, owns, strict=False)]

        for value, own in zip(lists[0], owns, strict=False):
            if own is not None and writes(self.name) and not isinstance(value, Part):
                self._into(value, own)
        results = self._sized([fit(a) for a in self.args], {key: fit(v) for key, v in self.kwargs.items()})
        if not is_list(results):
            return results
        return type(results)(
            f if own is None else self._marked(f, own) for f, own in zip(results, owns, strict=True)
        )

    def _sized(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The function's result; an error of torch about sizes is one about shards."""
        try:
            return self._plainly(args, kwargs)
        except RuntimeError as error:
            if _ABOUT_SIZES.search(str(error)) and is_asked_by_user(self.frame):
                raise self.own.refusal(self.name, "read") from error
            raise

    def _fit(self, value: Any, own: PartMark | None = None) -> Any:
        """What meets the part: the same part of a whole tensor."""
        own = self.own if own is None else own
        if not isinstance(value, torch.Tensor):
            return value
        with as_plain():
            if value.dim() == 0:
                return value
            mark = _mark_of(value)
            if mark is None:
                return own.cut(value)
            if not mark.lies_as(own):
                self._refuse("read")
            return value

    def _source(self, value: Any) -> Any:
        """What is copied into the part."""
        with as_plain():
            is_part = isinstance(value, Part)
            return self._fit(value) if is_part else self.own.part_of(value)

    def _into(self, value: torch.Tensor, own: PartMark) -> None:
        """A tensor of none of our classes is written to: it must be a part by its shape."""
        with as_plain():
            is_part = tuple(value.shape) == own.layout.local_shape
        if not is_part and is_asked_by_user(self.frame):
            raise own.into(self.name)

    def _marked(self, result: Any, own: PartMark | None = None) -> Any:
        """The result as what it is: of the part's shape, a part as well."""
        own = self.own if own is None else own
        if isinstance(result, torch.Tensor):
            with as_plain():
                if isinstance(result, (Part, nn.Parameter)) or any(
                    result is t for t in tensors_in(self.args)
                ):
                    return result
                if tuple(result.shape) == own.layout.local_shape:
                    return self._as_values(result, own)
            self._refuse()
            return result
        if isinstance(result, (list, tuple)) and any(isinstance(f, torch.Tensor) for f in result):
            return type(result)([self._marked(f, own) for f in result])
        return result


def _mark_of(tensor: torch.Tensor) -> PartMark | None:
    mark: PartMark | None = tensor.__dict__.get(MARK)
    return mark
