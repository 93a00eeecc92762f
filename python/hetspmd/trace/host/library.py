"""Which functions and classes of torch, numpy and Python code names: who replaces one changes what the code does.

They are told by place alone; their values are read when the trace has ended, since it replaces some itself. Torch's
layers and the functions of ``torch.nn.functional`` are followed into their code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Set
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final

from torch import nn

from hetspmd.trace.host.foreign import is_foreign, is_own
from hetspmd.trace.host.names import named_in
from hetspmd.trace.host.places import Path, Roots, is_found
from hetspmd.trace.host.replaced import is_users
from hetspmd.trace.host.steps import FUNCTIONS

_UNLIKE: Final = ("hetspmd", "torch.version", "torch.ops", "platform")
"""Modules whose variables nobody replaces (torch.ops makes its own when they are first read), or that tell what a
rank's machine is."""
_VALUES: Final = (BuiltinFunctionType, MethodType, int, float, bool, str)


class Library:
    """The places by root and path. ``visit`` is told of functions of the user's that lie at one, ``found`` of
    other objects of the user's."""

    def __init__(
        self, roots: Roots, visit: Callable[[Any], None], on_variable: Callable[[str, Path, Any, Any], None]
    ) -> None:
        self.places: dict[tuple[str, Path], None] = {}
        self._roots, self._visit, self._on_variable = roots, visit, on_variable
        self._told: set[tuple[str, frozenset[str]]] = set()
        self._computed: set[str] = set()
        self._seen: set[int] = set()

    def of_module(self, module: ModuleType, names: frozenset[str]) -> None:
        """What code with these names may take of a module, and of modules in it."""
        if (module.__name__, names) in self._told or module.__name__.startswith(_UNLIKE):
            return
        self._told.add((module.__name__, names))
        for name in sorted(names & vars(module).keys()):
            value = vars(module)[name]
            if isinstance(value, ModuleType):
                if is_foreign(value.__name__):
                    self.of_module(value, names)
            elif not name.startswith("_"):
                self.variable(f"globals {module.__name__}", name, value)

    def of_computed_names(self, module: ModuleType, names: Set[str]) -> None:
        """What code may take of a module by names that it computes, and of those modules in it that it names."""
        if module.__name__.startswith(_UNLIKE) or module.__name__ in self._computed:
            return
        self._computed.add(module.__name__)
        root = f"globals {module.__name__}"
        self.places[root, (FUNCTIONS,)] = None
        for name, value in sorted(vars(module).items()):
            if isinstance(value, ModuleType):
                if name in names and is_foreign(value.__name__):
                    self.of_computed_names(value, names)
            elif is_users(value):
                self.variable(root, name, value)

    def variable(self, root: str, name: str, value: Any) -> None:
        """A variable of a module of a library."""
        if not (type(value) in _VALUES or callable(value)):
            return
        self.places[root, (f".{name}",)] = None
        if type(value) is FunctionType:
            if is_own(value.__module__):
                self._visit(value)
            elif str(value.__module__).startswith("torch.nn."):
                self._inside(value)
        elif not isinstance(value, BuiltinFunctionType) and callable(value) and _is_own(value):
            self._on_variable(root, (f".{name}",), value, value)

    def of_class(self, kind: type) -> None:
        """The methods of a class of torch's layers that its forward calls, and what they name."""
        methods = {
            name: (base, value)
            for base in reversed(kind.__mro__)
            if base is not nn.Module
            for name, value in vars(base).items()
            if isinstance(value, FunctionType)
        }
        rest, met = ["forward"], set[str]()
        while rest:
            name = rest.pop()
            if name in met or name not in methods:
                continue
            met.add(name)
            base, method = methods[name]
            if is_foreign(base.__module__) and is_found(base):
                self.places[self._roots.know_class(base), (f".{name}",)] = None
            if is_own(method.__module__):
                self._visit(method)
            else:
                self._inside(method)
                rest += sorted(named_in(method.__code__, "").names & methods.keys())

    def _inside(self, function: FunctionType) -> None:
        """What a function of torch's layers names."""
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        variables, home = function.__globals__, str(function.__globals__.get("__name__"))
        names, named = named_in(function.__code__, home)
        for name, _ in named:
            value = variables.get(name)
            if isinstance(value, ModuleType):
                if is_foreign(value.__name__):
                    self.of_module(value, names)
            elif home.startswith("torch.nn.") and isinstance(value, (FunctionType, BuiltinFunctionType)):
                self.variable(f"globals {home}", name, value)


def _is_own(value: Any) -> bool:
    """Whether a class, a method or an object is the user's, or a partial function, which may be of one."""
    if isinstance(value, functools.partial):
        return True
    of = value if isinstance(value, (type, MethodType)) else type(value)
    return is_own(of.__module__)
