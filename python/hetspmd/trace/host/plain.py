"""Values of Python as text that tells which two are equal.

A fingerprint is equal for values between which no forward can tell, on every rank and in another process.
Long ones are shortened to their beginning and a digest.
"""

from __future__ import annotations

import collections
import enum
import functools
import hashlib
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any, Final

import torch
from torch import nn

from hetspmd.trace.compat.tensors import outside_modes
from hetspmd.trace.flat_bytes import flat_bytes
from hetspmd.trace.host.code_digest import code_digest
from hetspmd.trace.host.content import basis, content, has_basis, is_followed_kind, own_attributes, referent
from hetspmd.trace.host.members import members
from hetspmd.trace.host.raw import elements, pairs

MISSING: Final = "missing"
"""The fingerprint of an attribute that is not there."""

_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_CONTAINERS = (list, tuple, set, frozenset, dict, collections.deque)
_ENUMERATED = (*_TORCH, enum.Enum)
_KNOWN: Final = {id(kind): True for kind in _SCALARS} | {
    id(kind): False
    for kind in (FunctionType, BuiltinFunctionType, MethodType, ModuleType, type, *_CONTAINERS, torch.Tensor)
}
"""Whether values of just these classes are scalars, by the ids of the classes: no value needs to be asked."""
_LONGEST_TEXT = 160
"""Characters of a value's text that is held whole; of a longer one half of them and a digest."""
_TOLD = (int, str, bool, float, type(None), tuple, enum.Enum, *_TORCH)
"""Keys of a dict to whose values steps lead (:mod:`hetspmd.trace.host.steps`)."""


def type_name(kind: type) -> str:
    """``package.module.Class``, without the package for builtins."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def is_scalar(value: object) -> bool:
    """Whether a value is a number, string, None, enum, dtype or the like, which nothing can change in
    place."""
    verdict = _KNOWN.get(id(type(value)))
    return isinstance(value, _ENUMERATED) or _is_derived(value) if verdict is None else verdict


def _is_derived(value: object) -> bool:
    """Whether a value is of a class that a user has derived from that of a number or a string."""
    return isinstance(value, _SCALARS[:-1]) and not hasattr(type(value), "tobytes")


def is_container(value: object) -> bool:
    """Whether a value is a list, tuple, set, dict or deque, or derived from one."""
    return isinstance(value, _CONTAINERS) and not isinstance(value, torch.Size)


def is_plain(value: Any) -> bool:
    """Whether a value is made of numbers, strings and the like alone, and does not hold itself."""
    try:
        return _is_plain(value)
    except RecursionError:
        return False


def _is_plain(value: Any) -> bool:
    if is_container(value):
        parts = (
            [part for pair in pairs(value) for part in pair] if isinstance(value, dict) else elements(value)
        )
        return all(map(_is_plain, parts))
    return is_scalar(value)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a value that is one, or a container of some."""
    if isinstance(value, torch.Tensor):
        return [value]
    if not is_container(value):
        return []
    parts = [v for _, v in pairs(value)] if isinstance(value, dict) else elements(value)
    return [t for inner in parts for t in tensors_in(inner)]


def tensors_behind(value: Any, past: Iterable[object] = ()) -> list[torch.Tensor]:
    """The tensors of a value, also those of objects, modules and functions of the user's in it, ``past`` which it
    does not look."""
    tensors: list[torch.Tensor] = []
    seen = {id(other): other for other in past}
    rest = [value]
    while rest:
        value = rest.pop()
        if id(value) in seen or is_scalar(value) or isinstance(value, (type, ModuleType)):
            continue
        seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif is_container(value):
            rest += [v for _, v in pairs(value)] if isinstance(value, dict) else elements(value)
        elif isinstance(value, partial):
            rest += [value.func, value.args, value.keywords]
        elif isinstance(value, FunctionType):
            rest += [c.cell_contents for c in value.__closure__ or () if c != CellType()]
            rest += [value.__defaults__, value.__kwdefaults__]
        elif isinstance(value, MethodType):
            rest += [value.__self__, value.__func__]
        elif isinstance(value, nn.Module) or is_followed_kind(type(value)):
            rest += (members(value) or {}).values()
    return tensors


def outline(value: Any) -> str:
    """The text of a value that is a tensor or a container of some, which are told by dtype and shape alone: devices
    that are not alike may compute other last bits."""
    if isinstance(value, torch.Tensor):
        return f"tensor {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if not is_container(value):
        return fingerprint(value)
    parts = [p for pair in pairs(value) for p in pair] if isinstance(value, dict) else elements(value)
    return f"{type_name(type(value))}({', '.join(map(outline, parts))})"


def fingerprint(
    value: object, opaque: list[str] | None = None, met: dict[type | FunctionType, bool] | None = None
) -> str:
    """The value's text. Modules and objects that are followed have only their type's: what is read of them
    counts. ``opaque`` is filled with the classes of objects in it of which nothing can be told, ``met`` with the
    functions and classes in it and the classes of objects in it, each with whether it is in it itself."""
    text = repr(value) if type(value) in _SCALARS else _text(value, _Walk(opaque, met))
    if len(text) <= _LONGEST_TEXT:
        return text
    return f"{text[: _LONGEST_TEXT // 2]}... #{hashlib.sha1(text.encode(errors='replace')).hexdigest()[:16]}"


class _Walk:
    """One walk through a value: ``within`` are the objects on the way; ``whole``: what no step leads to, so that
    nothing follows it."""

    def __init__(self, opaque: list[str] | None, met: dict[type | FunctionType, bool] | None) -> None:
        self.opaque: list[str] = [] if opaque is None else opaque
        self.met: dict[type | FunctionType, bool] = {} if met is None else met
        self.within: list[int] = []
        self.whole = False

    def into(self, value: object, part: Callable[[], str]) -> str:
        """The text of a part of a value, "..." if that is on the way already."""
        if id(value) in self.within:
            return "..."
        self.within.append(id(value))
        try:
            return part()
        finally:
            self.within.pop()

    def wholly(self, part: Callable[[], str]) -> str:
        """The text of a part with all that it holds."""
        before, self.whole = self.whole, True
        try:
            return part()
        finally:
            self.whole = before


def _text(value: object, walk: _Walk) -> str:
    value = referent(value)
    kind = type(value)
    if kind in _SCALARS:
        return f"{value!r}"
    walk.met.setdefault(kind, False)
    if isinstance(value, (type, FunctionType)):
        walk.met[value] = True
    if isinstance(value, enum.Enum):
        return f"{type_name(kind)}.{value.name}"
    if isinstance(value, _TORCH):
        return str(value)
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, nn.Module):
        return f"module {type_name(kind)}"
    if isinstance(value, _CONTAINERS):
        return walk.into(value, lambda: _container(value, walk))
    if _is_derived(value):
        return f"{type_name(kind)} {_of_base(value)}"
    if isinstance(value, type):
        return f"class {type_name(value)}"
    if isinstance(value, ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, CodeType):
        return f"code {code_digest(value)}"
    if callable(value) and (function := _callable(value, walk)):
        return function
    if hasattr(kind, "dtype") and hasattr(kind, "tobytes"):
        return _array(value, walk)
    if isinstance(value, (slice, range)):
        return repr(value)
    return walk.into(value, lambda: _object(value, walk))


def _object(value: object, walk: _Walk) -> str:
    """An object whose attributes are followed, or all that it holds."""
    kind = type(value)
    if not walk.whole and is_followed_kind(kind):
        held = basis(value, lambda part: _text(part, walk)) if has_basis(kind) else ""
    else:
        held = walk.wholly(lambda: _told(value, walk))
    return f"object {type_name(kind)} {held or ''}".rstrip()


def _told(value: object, walk: _Walk) -> str:
    text = content(value, lambda part: _text(part, walk))
    if text is None:
        walk.opaque.append(type_name(type(value)))
    return text or ""


def _of_base(value: Any) -> str:
    base: Any = next(base for base in _SCALARS if isinstance(value, base))
    return str(base.__repr__(value))


def _container(value: Any, walk: _Walk) -> str:
    kind = type(value)
    name = "" if kind in _CONTAINERS else type_name(kind)
    if isinstance(value, dict):
        return f"{name}{{{', '.join(f'{_key(k, walk)}: {_item(k, v, walk)}' for k, v in pairs(value))}}}"
    if isinstance(value, (set, frozenset)):
        parts = sorted(walk.wholly(partial(_text, v, walk)) for v in elements(value))
        return f"{name or kind.__name__}({', '.join(parts)})"
    opening, closing = "[]" if isinstance(value, list) else "()"
    return f"{name}{opening}{', '.join(_text(v, walk) for v in elements(value))}{closing}"


def _key(key: Any, walk: _Walk) -> str:
    return _text(key, walk) if isinstance(key, _TOLD) else walk.wholly(lambda: _text(key, walk))


def _item(key: Any, value: Any, walk: _Walk) -> str:
    return _text(value, walk) if isinstance(key, _TOLD) else walk.wholly(lambda: _text(value, walk))


def _tensor(value: torch.Tensor) -> str:
    about = f"tensor {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    about += " with a gradient" if value.requires_grad else ""
    if value.is_meta or value.layout != torch.strided or type(value) not in (torch.Tensor, nn.Parameter):
        return about
    with outside_modes(), torch.no_grad():
        raw = flat_bytes(value).cpu()
        return f"{about} {zlib.crc32(raw.numpy().data)}" if raw.numel() else about


def _array(value: Any, walk: _Walk) -> str:
    about = f"array {value.dtype}{list(value.shape)}"
    if getattr(value.dtype, "hasobject", False):
        return f"{about} {walk.wholly(lambda: _text(value.tolist(), walk))}"
    return f"{about} {zlib.crc32(value.tobytes())}"


def _callable(value: Any, walk: _Walk) -> str:
    if isinstance(value, MethodType):
        owner = value.__self__
        owner_name = f"class {type_name(owner)}" if isinstance(owner, type) else type_name(type(owner))
        return f"method {_callable(value.__func__, walk)} of {owner_name}"
    if isinstance(value, functools.partial):
        parts = (_text(part, walk) for part in (value.func, value.args, value.keywords))
        return f"partial {' '.join(parts)}"
    if isinstance(value, FunctionType):
        does = f" {code_digest(value.__code__)} {_plain_around(value)}" if walk.whole else ""
        return f"function {value.__module__}.{value.__qualname__}{does}".rstrip()
    if isinstance(value, (BuiltinFunctionType, MethodWrapperType)) or _is_named(value):
        return f"function {getattr(value, '__module__', '')}.{value.__qualname__}"
    return ""


def _is_named(value: Any) -> bool:
    """Whether a callable has a name of its own, as methods of C and what ``functools`` makes of a function."""
    return "__qualname__" in vars(type(value)) or "__qualname__" in own_attributes(value)


def same_function(one: FunctionType, other: object) -> bool:
    """Whether two functions of one name do the same: by their code, defaults and the variables around them."""
    if one is other:
        return True
    if not isinstance(other, FunctionType) or code_digest(one.__code__) != code_digest(other.__code__):
        return False
    return _around(one) == _around(other)


def _around(function: FunctionType) -> list[str]:
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return [fingerprint(v) for v in (function.__defaults__, function.__kwdefaults__, *cells)]


def _plain_around(function: FunctionType) -> str:
    """The numbers, strings and the like among a function's defaults and the variables around it."""
    cells = (cell.cell_contents for cell in function.__closure__ or () if cell != CellType())
    held = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *cells)
    return " ".join(fingerprint(value) for value in held if is_scalar(value))
