"""Whether a value that a plan's trace has read is still what it was, as quickly as its kind allows.

A comparison is made once, of the right value, and asked before each step. What nothing can change in place is
compared by reference alone, everything else by its content: tensors and arrays with a copy or a digest, since
``.data``, ``.numpy()`` and views of other libraries change them without a trace.
"""

from __future__ import annotations

from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import torch
from torch import nn

from hetspmd.dist.digest import digest
from hetspmd.trace.flat_bytes import flat_bytes
from hetspmd.trace.host.content import has_basis, is_followed_kind
from hetspmd.trace.host.places import NOTHING
from hetspmd.trace.host.plain import fingerprint, is_container, is_scalar, outline, tensors_in
from hetspmd.trace.host.raw import elements, pairs, size

Comparison = Callable[[Any], bool]

_LARGEST_COPY: Final = 1 << 20
"""Bytes of a tensor or array up to which a copy is compared; of a larger one a digest, to hold little memory."""


def stays(value: object) -> bool:
    """Whether nothing that counts of a value can change while it is the same object. What is read of a module,
    a function or an object that is followed is compared by itself."""
    if type(value) is tuple:
        return all(map(stays, value))
    if is_scalar(value) or isinstance(value, (FunctionType, MethodType, type, ModuleType, nn.Module)):
        return True
    if isinstance(value, torch.Tensor) or is_container(value):
        return False
    return is_followed_kind(type(value)) and not has_basis(type(value))


def comparison(value: Any, text: str) -> Comparison:
    """Whether another value is as this one, whose fingerprint is ``text``.

    An object that holds others must be the same one, since what is read of it is looked for there.
    """
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if value is NOTHING or is_scalar(value):
        return lambda now: now is value or (now is not NOTHING and fingerprint(now) == text)
    if isinstance(value, (MethodType, BuiltinFunctionType)):
        return lambda now: now is value or (now == value and fingerprint(now) == text)
    if type(value) is tuple and all(map(stays, value)):
        return lambda now: now is value or (type(now) is tuple and _same_parts(now, value))
    if stays(value):
        return lambda now: now is value
    if is_container(value):
        return _container(value, text)
    if hasattr(type(value), "dtype") and hasattr(type(value), "tobytes"):
        return _array(value, text)
    return lambda now: now is value and fingerprint(now) == text


def unchanged(value: Any) -> Comparison:
    """Whether another value, a tensor or a container of some, has what this one has now; it may be made anew."""
    about, parts = outline(value), [_equal(tensor) for tensor in tensors_in(value)]

    def same(now: Any) -> bool:
        if now is NOTHING or outline(now) != about:
            return False
        return all(part(tensor) for part, tensor in zip(parts, tensors_in(now), strict=True))

    return same


def _equal(value: torch.Tensor) -> Comparison:
    """Whether a tensor has the content of this one. The same one on another device, whose content would be waited
    for, is told by its version."""
    if not _has_content(value):
        return _version(value)
    look = _copy if value.numel() * value.element_size() <= _LARGEST_COPY else _digest
    about, held = (value.dtype, value.shape, value.device, value.requires_grad), look(value)
    version = None if value.device.type == "cpu" or value.is_inference() else value._version

    def same(now: Any) -> bool:
        if version is not None and now is value and now._version == version:
            return True
        return (now.dtype, now.shape, now.device, now.requires_grad) == about and torch.equal(look(now), held)

    return same


def _has_content(value: torch.Tensor) -> bool:
    plain = type(value) in (torch.Tensor, nn.Parameter)
    return plain and not value.is_meta and value.layout == torch.strided


def _container(value: Any, text: str) -> Comparison:
    """By the elements of lists and dicts of values that stay; by text of anything else."""
    if isinstance(value, dict):
        held = dict(pairs(value))
        if all(map(stays, held.values())) and all(map(is_scalar, held)):
            return lambda now: now is value and _same_items(now, held)
    elif isinstance(value, (list, tuple)):
        items = elements(value)
        if all(map(stays, items)):
            return lambda now: now is value and _same_elements(now, items)
    return lambda now: now is value and fingerprint(now) == text


def _same_items(now: Any, held: dict[Any, Any]) -> bool:
    if size(now) != len(held):
        return False
    return all(a == c and b is d for (a, b), (c, d) in zip(pairs(now), held.items(), strict=True))


def _same_elements(now: Any, held: list[Any]) -> bool:
    return size(now) == len(held) and all(a is b for a, b in zip(elements(now), held, strict=True))


def _same_parts(now: tuple[Any, ...], held: tuple[Any, ...]) -> bool:
    """Whether a tuple, which may be made anew whenever it is asked for, has what another one has."""
    return len(now) == len(held) and all(
        a is b or (is_scalar(b) and type(a) is type(b) and fingerprint(a) == fingerprint(b))
        for a, b in zip(now, held, strict=True)
    )


def _tensor(value: torch.Tensor) -> Comparison:
    if not _has_content(value):
        return _version(value)
    look = _copy if value.numel() * value.element_size() <= _LARGEST_COPY else _digest
    about, held = (value.dtype, value.shape, value.device, value.requires_grad), look(value)

    def same(now: Any) -> bool:
        if now is not value or (value.dtype, value.shape, value.device, value.requires_grad) != about:
            return False
        return torch.equal(look(value), held)

    return same


def _version(value: torch.Tensor) -> Comparison:
    version = value._version, value.requires_grad
    return lambda now: now is value and (value._version, value.requires_grad) == version


def _array(value: Any, text: str) -> Comparison:
    """An array of numpy, by the same means."""
    try:
        view = torch.from_numpy(value) if value.flags.writeable else None  # torch warns of others
    except (
        TypeError,
        ValueError,
        RuntimeError,
        AttributeError,
    ):  # of another library, of objects, turned round
        view = None
    if view is None:
        return lambda now: now is value and fingerprint(now) == text
    same, about = _tensor(view), (value.shape, value.dtype, value.ctypes.data)
    return lambda now: now is value and (value.shape, value.dtype, value.ctypes.data) == about and same(view)


def _bytes(value: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return flat_bytes(value)


def _copy(value: torch.Tensor) -> torch.Tensor:
    return _bytes(value).clone()


def _digest(value: torch.Tensor) -> torch.Tensor:
    return digest(value.detach(), whole=True)
