"""Modules that a step reads and that the model does not have: a teacher in ``loss=``, a net in a plain list.

Such a module counts once anything is read of it: its parameters and buffers, the submodules that it holds, its
hooks and its class, and the same of the modules in which it lies. What is read of no part of a large net does not
count. Layers of torch read their tensors as attributes, of which the recorder is told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch import nn

from hetspmd.errors import TraceError
from hetspmd.trace.compat.tensors import is_traced
from hetspmd.trace.host.content import own_attributes
from hetspmd.trace.host.followed import Followed
from hetspmd.trace.host.foreign import is_foreign, is_own
from hetspmd.trace.host.kinds import tells_its_class
from hetspmd.trace.host.places import Path, Roots, text
from hetspmd.trace.host.plain import fingerprint, is_container
from hetspmd.trace.host.raw import elements, pairs
from hetspmd.trace.host.snapshot import Structure
from hetspmd.trace.host.steps import CALLS, calls_of, step_to

SLOTS: Final = ("_parameters", "_buffers", "_modules")
"""Attributes of a module of whose reads no one is told."""
_TENSORS: Final = SLOTS[:2]
_ONE: Final = frozenset({"forward", "training", "extra_repr"})
_OF_TREE: Final = frozenset(n for n in dir(nn.Module) if not n.startswith("_")) - _ONE
"""Methods of a module that look at all modules inside it."""

_FIRST_ASKED: Final = frozenset({"call_super_init", "__setstate__"})
"""What a module is asked for when it is made, by ``nn.Module.__init__`` or by ``copy``."""
_OF_TRACES: Final = ("torch.fx", "hetspmd.")
_SPOKEN: Final = {"_parameters": "a parameter", "_buffers": "a buffer", "_modules": "a submodule"}

Note = Callable[[tuple[str, Path], str, Any], None]


class Outside:
    """The modules of which something was read. ``note`` is told a place, the text and the value of what counts,
    ``look`` of a hook."""

    def __init__(self, roots: Roots, note: Note, look: Callable[[str, Path, Any], None]) -> None:
        self._roots, self._note, self._look = roots, note, look
        self._known: dict[int, tuple[Followed, Followed | None]] = {}
        self._held: list[tuple[Followed, Structure]] = []
        self._touched: set[int] = set()
        self._strangers: dict[int, nn.Module] = {}
        self._made: set[int] = set()
        self._installed: dict[int, nn.Module] = {}
        self._no_strangers: set[type] = set()

    def know(self, followed: Followed, within: nn.Module | None) -> None:
        """A module was found, ``within`` another one of which this is told."""
        around = None if within is None else self._known.get(id(within))
        self._known[id(followed.of)] = followed, None if around is None else around[0]
        self._held.append((followed, Structure([((), followed.of)], tensors=True)))

    def knows(self, module: object) -> bool:
        """Whether this is a module that lies outside of the model."""
        return id(module) in self._known

    def saw(self, module: Any, name: str) -> None:
        """An attribute was read, or asked for."""
        if id(module) not in self._known:
            return
        self._touch(id(module))
        if name in _OF_TREE:
            self.all_of(module)

    def stranger(self, of: Any, name: str) -> None:
        """An attribute was read of an object that no place leads to: of a module, perhaps. Those that the step
        makes itself, or copies, are asked for some names first; the trace has some of its own as well."""
        kind = type(of)
        if kind in self._no_strangers:
            return
        if issubclass(kind, nn.Module) and not kind.__module__.startswith(_OF_TRACES):
            if name in _FIRST_ASKED:
                self._made.add(id(of))
            self._strangers[id(of)] = of
        else:
            self._no_strangers.add(kind)

    def all_of(self, module: nn.Module) -> None:
        """All modules inside a module count."""
        for inner in own_attributes(module)["_modules"].values():
            if inner is not None and id(inner) in self._known:
                self._touch(id(inner))
                self.all_of(inner)

    def installed(self, value: Any) -> None:
        """A variable of an installed package was found: its modules without tensors stay as they are."""
        if isinstance(value, nn.Module):
            self._installed.update((id(module), module) for module in value.modules())
        elif is_container(value):
            for inner in [v for _, v in pairs(value)] if isinstance(value, dict) else elements(value):
                if isinstance(inner, nn.Module):
                    self.installed(inner)

    def check(self) -> None:
        """Raise TraceError for a module that cannot be found again, and for what a run has added to one, replaced
        or taken away."""
        for key, module in self._strangers.items():
            attributes = own_attributes(module)
            held = [t for kind in _TENSORS for t in attributes.get(kind, {}).values() if t is not None]
            if key in self._known:
                continue
            real = any(not is_traced(tensor) for tensor in held)
            if not real and (key in self._installed or _is_a_librarys(type(module))):
                continue
            if key not in self._made or (real and type(module) is not nn.Module):
                raise TraceError(
                    f"the step reads a {type(module).__name__}, which is no module of the model, in a way "
                    "that cannot be followed: from a set, a weak reference, under a key that is an object, in a "
                    "variable of a context; keep it in a variable, a list or an attribute, or make it a module of "
                    "the model (self.teacher = ...)"
                )
        for followed, structure in self._held:
            for _, kind in structure.changes():
                what = _SPOKEN.get(kind, "a hook")
                raise TraceError(
                    f"the step adds, removes or replaces {what} of {text(followed.root, followed.path)} "
                    f"({type(followed.of).__name__}), which is no module of the model, so that no plan does "
                    "it again; make it a module of the model (self.teacher = ...), or change it between the steps"
                )

    def rewind(self) -> None:
        """Put back what modules held when they were found."""
        for _, structure in self._held:
            structure.rewind()

    def everything(self) -> None:
        """All modules that were found count."""
        for key in list(self._known):
            self._touch(key)

    def _touch(self, module_id: int) -> None:
        if module_id in self._touched:
            return
        self._touched.add(module_id)
        followed, around = self._known[module_id]
        if around is not None:
            self._touch(id(around.of))
        root, path, module = followed.root, followed.path, followed.of
        if path and tells_its_class(module):
            self._note((root, (*path, ".__class__")), fingerprint(type(module)), type(module))
        attributes = own_attributes(module)
        for kind in _TENSORS:
            for name, tensor in list(attributes.get(kind, {}).items()):
                self._note((root, (*path, f".{name}")), fingerprint(tensor), tensor)
        if inner := attributes.get("_modules"):
            self._note((root, (*path, "._modules")), fingerprint(inner), inner)
        calls = calls_of(module)
        self._note((root, (*path, CALLS)), fingerprint(calls), calls)
        for position, called in enumerate(calls):
            if called is not None:
                self._look(root, (*path, CALLS, step_to(position)), called)


def _is_a_librarys(kind: type) -> bool:
    """Whether a class is an installed package's, such as an activation function."""
    return not is_foreign(kind.__module__) and not is_own(kind.__module__)
