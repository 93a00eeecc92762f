"""The classes of what lies in shards: parameters, and values that are computed from them element by element.

A parameter that is cut becomes a :class:`Shard`; its values, gradients, and whatever is computed from them element
by element are :class:`ShardValues`. Both know of which parameter they are a part. torch asks the class of a tensor
what a function does to it, whichever way the function is called (:mod:`hetspmd.run.shard_calls`).

Optimizers' steps, for which the parameters are plain ones, and hetspmd are served as ever.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Final

import torch
from torch import nn

from hetspmd.run.asking import OF_HETSPMD, OF_TORCH, is_asked_by_user, is_stepping
from hetspmd.run.shard_calls import MARK, Part, PartMark, Use
from hetspmd.run.shard_functions import does_as_tensors
from hetspmd.trace.compat.tensors import as_plain

__all__ = ["MARK", "Part", "Shard", "ShardValues", "plain", "refuse_transform", "shard_class"]


class _Telling(Part):
    """It tells torch what functions do to it."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type[torch.Tensor]],
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        frame = sys._getframe(1)
        if is_stepping() or frame.f_code.co_filename.startswith(OF_HETSPMD):
            with as_plain():
                return func(*args, **kwargs)
        if not all(issubclass(kind, Part) or does_as_tensors(kind) for kind in types):
            return NotImplemented
        return Use(func, args, kwargs, frame, _as_values).result()

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """As torch's, which does not ask the class."""
        if is_asked_by_user(sys._getframe(1)):
            raise self.__dict__[MARK].refusal("set_", "write")
        tensor: Any = super()
        return tensor.set_(*args, **kwargs)


class ShardValues(_Telling, torch.Tensor):
    """This rank's part of what lies as a parameter does."""

    @property
    def data(self) -> torch.Tensor:
        return _data_of(self, sys._getframe(1))

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Of a gradient, it is the parameter's that changes: ``p.grad`` is another name for it."""
        mark = self.__dict__[MARK]
        gradient = mark.gradient(self)
        with as_plain():
            part = mark.cut(value)
            for tensor in (self, gradient):
                if tensor is not None:
                    _set_data(tensor, part)

    def __copy__(self) -> ShardValues:
        with as_plain():
            twin = _as_values(self.detach(), self.__dict__[MARK])
            twin.requires_grad_(self.requires_grad)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardValues:
        with as_plain():
            twin = _as_values(self.detach().clone(), self.__dict__[MARK])
            memo[id(self)] = twin
            twin.requires_grad_(self.requires_grad)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        if is_asked_by_user(sys._getframe(1)):
            self.__dict__[MARK].pickled()
        with as_plain():
            plain: Any = self.as_subclass(torch.Tensor)
            return plain.__reduce_ex__(protocol)


_data: Final = torch.Tensor.data.__get__  # type: ignore[attr-defined]  # of C
_set_data: Final = torch.Tensor.data.__set__  # type: ignore[attr-defined]  # of C
_grad: Final = torch.Tensor.grad.__get__  # type: ignore[union-attr]  # of C


def _as_values(tensor: torch.Tensor, mark: PartMark) -> ShardValues:
    with as_plain():
        values = tensor.as_subclass(ShardValues)
    values.__dict__[MARK] = mark
    return values


def _data_of(part: torch.Tensor, frame: FrameType) -> torch.Tensor:
    """The data of a part as the code in ``frame`` gets it."""
    with as_plain():
        data: torch.Tensor = _data(part)
    return data if _is_served(frame) else _as_values(data, part.__dict__[MARK])


class Shard(_Telling, nn.Parameter):
    """A parameter of which this rank holds a part."""

    plain_class: type = nn.Parameter
    """What it is while an optimizer steps it."""

    @property
    def data(self) -> torch.Tensor:
        return _data_of(self, sys._getframe(1))

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if sys._getframe(1).f_code.co_name == "vector_to_parameters":
            raise self.__dict__[MARK].refusal("vector_to_parameters", "write")
        with as_plain():
            _set_data(self, value)

    def detach(self) -> torch.Tensor:
        with as_plain():
            values = torch.Tensor.detach(self)
        frame = sys._getframe(1)
        if _is_served(frame):
            return values
        if frame.f_code.co_filename.startswith(OF_TORCH + "nn/parameter"):
            with as_plain():
                shard = values.as_subclass(type(self))  # nn.Parameter(shard) wants its class
            shard.__dict__[MARK] = self.__dict__[MARK]
            return shard
        return _as_values(values, self.__dict__[MARK])

    @property
    def grad(self) -> torch.Tensor | None:
        """As values are: torch's own functions take it as it is, others learn that it is a part."""
        with as_plain():
            gradient: torch.Tensor | None = _grad(self)
        if (
            gradient is None
            or is_stepping()
            or sys._getframe(1).f_code.co_filename.startswith((OF_HETSPMD, OF_TORCH))
        ):
            return gradient
        return _as_values(gradient, self.__dict__[MARK].of_gradient(self))

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        """A whole gradient is cut."""
        with as_plain():
            if isinstance(value, ShardValues):
                value = value.as_subclass(torch.Tensor)
            elif isinstance(value, torch.Tensor) and tuple(value.shape) == self.__dict__[MARK].layout.shape:
                value = self.__dict__[MARK].cut(value)
            torch.Tensor.grad.__set__(self, value)  # type: ignore[union-attr]  # of C

    @grad.deleter
    def grad(self) -> None:
        with as_plain():
            torch.Tensor.grad.__delete__(self)  # type: ignore[union-attr]  # of C

    def __copy__(self) -> Shard:
        return self.__dict__[MARK].copied()  # type: ignore[no-any-return]  # it raises


def plain(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, with parts as tensors of no class of their own, for code that runs many ops on them."""
    with as_plain():
        return [torch.Tensor.detach(t) if isinstance(t, Part) else t for t in tensors]


def refuse_transform(tensor: object, what: str) -> None:
    """Raises ShardError if user code gives a part to ``what`` asks no tensor's class."""
    if isinstance(tensor, Part) and is_asked_by_user(sys._getframe(2)):
        raise tensor.__dict__[MARK].transformed(what)


def _is_served(frame: FrameType) -> bool:
    return is_stepping() or frame.f_code.co_filename.startswith(OF_HETSPMD)


_CLASSES: dict[type, type[Shard]] = {nn.Parameter: Shard}


def shard_class(kind: type) -> type[Shard]:
    """The class that a parameter of class ``kind`` gets when it is cut."""
    if kind not in _CLASSES:
        _CLASSES[kind] = type(kind)(kind.__name__, (Shard, kind), {"plain_class": kind})
    return _CLASSES[kind]
