"""All functions and classes that a model can reach, before anything runs: every rank gives them the same names."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from torch import nn

from hetspmd.trace.host.code import CodeReader
from hetspmd.trace.host.code_digest import code_digest
from hetspmd.trace.host.content import held, is_followed_kind, own_attributes, referent
from hetspmd.trace.host.foreign import is_foreign, is_own
from hetspmd.trace.host.kinds import answers, bound_to, is_function
from hetspmd.trace.host.members import members
from hetspmd.trace.host.names import names_in
from hetspmd.trace.host.places import Path, Roots, closure, content, is_found
from hetspmd.trace.host.plain import is_container, is_scalar, type_name
from hetspmd.trace.host.raw import elements, pairs, size
from hetspmd.trace.host.snapshot import OF_TORCH

_MOST_ELEMENTS = 1000
"""Elements of the largest container that is looked into: a data set would take longer than a trace."""


def discover(roots: Roots) -> None:
    """Let ``roots`` know the functions and classes of a model, in an order that is the same on every rank."""
    walk = _Walk(roots)
    for module in roots.model.modules():
        for kind in type(module).__mro__:
            walk.kind(kind)
        if is_foreign(type(module).__module__):
            walk.layer(type(module))
    for cls in roots.batch_classes:
        for kind in cls.__mro__:
            walk.kind(kind)
    walk.value(roots.loss)
    for module in roots.model.modules():
        walk.module(module)
    walk.settle()
    roots.all_known()


def rediscover(roots: Roots) -> None:
    """Let ``roots`` know the functions that a model has now, by the names that a trace gives them."""
    roots.forget()
    discover(roots)


def own_kinds(value: Any) -> list[type]:
    """The user's classes of what a value holds, in the order in which they are met."""
    kinds: dict[type, None] = {}
    seen: dict[int, Any] = {}
    rest = [value]
    while rest:
        value = rest.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if is_own(type(value).__module__):
            kinds.setdefault(type(value))
        if isinstance(value, dict):
            rest += [part for pair in pairs(value) for part in pair]
        elif is_container(value) and size(value) <= _MOST_ELEMENTS:
            rest += elements(value)
        if not is_scalar(value) and is_own(type(value).__module__) and own_attributes(value) is not value:
            rest += (members(value) or {}).values()
    return list(kinds)


def unnamed_kinds(value: Any) -> list[type]:
    """Those of :func:`own_kinds` to which no name leads, as that of a class that is defined in a function."""
    return [kind for kind in own_kinds(value) if not is_found(kind)]


class _Walk:
    """One walk through a model and what its code names; what was met is kept, so that no id is used twice."""

    def __init__(self, roots: Roots) -> None:
        self._names = {"forward", "__call__"}
        self._installed: list[tuple[type, set[str]]] = []
        self._settling = False
        self._reader = CodeReader(roots, self._found, self._visited, everything=True)
        self._seen: dict[int, Any] = {}
        self._kinds: set[type] = set()

    def kind(self, kind: type) -> None:
        """The functions of a class of a module."""
        if kind in self._kinds or is_foreign(kind.__module__):
            return
        self._kinds.add(kind)
        if not is_own(kind.__module__):
            self._installed.append((kind, set()))
            self.settle()
            return
        for value in list(vars(kind).values()):
            self._reader.visit(value)
        self._reader.meet(kind, "", (), makes_objects=True)

    def _visited(self, function: FunctionType) -> None:
        self._names |= names_in(function.__code__)

    def settle(self) -> None:
        """Look at the members of installed packages' classes whose names the code has that was met so far. Such a
        class has many more (it loads, saves and generates), which name half of its package."""
        if self._settling:
            return
        self._settling, count = True, -1
        while count != len(self._names) + len(self._installed):
            count = len(self._names) + len(self._installed)
            for kind, met in self._installed:
                own = vars(kind)
                for name in sorted((self._names & own.keys()) - met):
                    met.add(name)
                    self._reader.visit(own[name])
        self._settling = False

    def layer(self, kind: type) -> None:
        """The user's functions in the place of those that a layer of torch's calls."""
        self._reader.library.of_class(kind)

    def module(self, module: nn.Module) -> None:
        """What lies on a module of the model."""
        self._seen[id(module)] = module
        hooks = *module._forward_hooks.values(), *module._forward_pre_hooks.values()
        for value in (*(v for n, v in vars(module).items() if n not in OF_TORCH), *hooks):
            self.value(value)

    def value(self, value: Any) -> None:
        """What a value leads to."""
        if id(value) in self._seen or not answers(value):
            return
        if is_own(type(value).__module__):
            self._reader.meet(type(value), "", (), makes_objects=True)
        if is_scalar(value):
            return
        self._seen[id(value)] = value
        if type(value) is FunctionType:
            self._reader.visit(value)
            return
        if isinstance(value, type):
            self._reader.meet(value, "", (), makes_objects=True)
        elif is_function(value):
            self._reader.visit(value)
            for _, part in bound_to(value):
                self.value(part)
        elif is_container(value) and size(value) <= _MOST_ELEMENTS:
            self._parts(value)
        elif (inside := held(referent(value))) is not None:
            self.value(inside)
        elif isinstance(value, nn.Module):
            for kind in type(value).__mro__:
                self.kind(kind)
            self.module(value)
            for inner in value.children():
                self.value(inner)
        if is_followed_kind(type(value)) and own_attributes(value) is not value:
            self._reader.meet(type(value), "", (), makes_objects=True)
            for part in list((members(value) or {}).values()):
                self.value(part)

    def _parts(self, container: Any) -> None:
        """What a container holds: of a set in an order that is the same on every rank, as far as names, code and
        the numbers around it tell its parts apart."""
        if isinstance(container, dict):
            parts = [part for pair in pairs(container) for part in pair]
        else:
            parts = list(elements(container))
        if isinstance(container, (set, frozenset)):
            parts.sort(key=_told_apart)
        for part in parts:
            self.value(part)

    def _found(self, _root: str, _path: Path, value: Any, _holder: Any) -> None:
        self.value(value)


def _told_apart(value: Any) -> tuple[str, ...]:
    """The name of a function or a class, of anything else that of its class; of a function what it does, too."""
    named = isinstance(value, (type, FunctionType))
    name = f"{type_name(type(value))} {value.__qualname__ if named else ''}"
    if not isinstance(value, FunctionType):
        return (name,)
    around = (*map(content, closure(value).values()), *(value.__defaults__ or ()))
    return (name, code_digest(value.__code__), *(repr(v) for v in around if is_scalar(v)))
