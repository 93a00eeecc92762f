"""The classes that a model's code meets: of its modules and objects, and those that it names.

A method is reached in ways in which no one asks the object for it: as that of a base class, by an operator, as a
property, by autograd. So each function of a class counts whose name stands in code that counts, and those that are
called without a name. The same holds for what a class keeps in attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from hetspmd.trace.host.foreign import is_own
from hetspmd.trace.host.places import Path, Roots

_CONSTRUCTORS: Final = frozenset(
    {"__init__", "__new__", "__post_init__", "__init_subclass__", "__set_name__"}
)
_NEVER: Final = frozenset({
    "__class__", "__deepcopy__", "__copy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__",
    "__del__", "__class_getitem__", "__sizeof__", "__subclasshook__", "__doc__", "__dict__",
    "__weakref__", "__module__", "__annotations__", "__slots__", "__qualname__", "__match_args__",
})  # fmt: skip
_OF_AUTOGRAD: Final = frozenset({"forward", "backward", "setup_context", "vjp", "jvp"})


@dataclass(slots=True)
class Met:
    """A class, where it lies, and its members that have not counted yet. ``makes_objects``: the code makes objects
    of it."""

    kind: type
    root: str
    path: Path
    makes_objects: bool
    pending: dict[str, Any] = field(default_factory=dict)

    def due(self, counts: Callable[[str, Any], bool] | None) -> Iterator[tuple[str, Any]]:
        """The members that count from now on, if ``counts`` says so of a name and a value; all of them if it is
        None."""
        for name in sorted(self.pending):
            named = counts is None or self._unnamed(name) or counts(name, self.pending[name])
            if name not in _NEVER and named:
                yield name, self.pending.pop(name)

    def _unnamed(self, name: str) -> bool:
        """Whether a member is reached without its name."""
        if name in _CONSTRUCTORS:
            return self.makes_objects
        if name.startswith("__") and name.endswith("__"):
            return True
        if issubclass(self.kind, torch.autograd.Function):
            return name in _OF_AUTOGRAD
        return name == "forward" and self.makes_objects and issubclass(self.kind, nn.Module)


class Classes:
    """The classes that were met, each once."""

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self._met: dict[type, Met] = {}
        self.extent = 0
        """A number that grows whenever there is anything new about these classes."""

    def meet(self, kind: type, root: str, path: Path, *, makes_objects: bool) -> bool:
        """Meet a class that lies at a place, and its bases; whether anything is new about that."""
        before = self.extent
        if type(kind) is not type and is_own(type(kind).__module__):
            self.meet(type(kind), root, (*path, ".__class__"), makes_objects=False)
        for index, base in enumerate(kind.__mro__):
            if not is_own(base.__module__):
                continue
            met = self._met.get(base)
            if met is None:
                place = self._place(base, root, (*path, ".__mro__", f"[{index}]") if index else path)
                met = self._met[base] = Met(base, *place, makes_objects, dict(vars(base)))
                self.extent += 1 + makes_objects
            elif makes_objects and not met.makes_objects:
                met.makes_objects = True
                self.extent += 1
        return self.extent > before

    def __iter__(self) -> Iterator[Met]:
        return iter(list(self._met.values()))

    def _place(self, kind: type, root: str, path: Path) -> tuple[str, Path]:
        """Where a class lies: by its name if that leads to it, as it mostly does."""
        named = self._roots.know_class(kind)
        return (named, ()) if self._roots.holder(named, ("",)) is kind else (root, path)
