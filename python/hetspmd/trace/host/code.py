"""Which variables a function reads that are not its own: of its module, of the functions around it.

Functions that it calls by name, in the same way, count as well, unless they are torch's or the standard
library's. An attribute of a class, a module or an object counts if the code has its name.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import distributions
from pathlib import Path as File
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from hetspmd.trace.host.callables import Callables
from hetspmd.trace.host.places import NOTHING, Path, Roots, closure, content
from hetspmd.trace.host.plain import is_scalar
from hetspmd.trace.host.stand_ins import MOMENTS, is_calendar, original
from hetspmd.trace.host.steps import step_to

_FOREIGN = frozenset(sys.stdlib_module_names - {"__main__", "argparse", "types"}) | {
    "torch",
    "hetspmd",
    "numpy",
}


def is_foreign(module: object) -> bool:
    """Whether a module of this name is torch's, the standard library's or our own: no part of a user's
    model."""
    return not isinstance(module, str) or module.partition(".")[0] in _FOREIGN


@functools.cache
def is_installed(module: ModuleType) -> bool:
    """Whether a module belongs to an installed package, whose registries are no part of a model."""
    file = getattr(module, "__file__", None) or ""
    above = File(file).parents
    if any(folder.name in ("site-packages", "dist-packages") for folder in above):
        return True
    depth = module.__name__.count(".") + (File(file).stem == "__init__")
    return depth < len(above) and module.__name__.partition(".")[0] in _installed_in(above[depth])


@functools.cache
def _installed_in(folder: File) -> frozenset[str]:
    """Packages that ``pip install --target`` has put into a folder, where a user's own modules may lie too.

    What was put there has a RECORD. A user's sources that ``pip install -e .`` has linked have none; only a
    ``*.egg-info`` with their names may lie beside them.
    """
    put_there = (d for d in distributions(path=[str(folder)]) if d.read_text("RECORD"))
    files = (file.parts for d in put_there for file in d.files or ())
    return frozenset(parts[0].removesuffix(".py") for parts in files)


@functools.cache
def names_in(code: CodeType) -> frozenset[str]:
    """Names of variables and attributes in a function's code, and in functions inside it."""
    inner = (names_in(c) for c in code.co_consts if isinstance(c, CodeType))
    return frozenset(code.co_names).union(*inner)


def names_of_methods(kind: type) -> frozenset[str]:
    """Names of variables and attributes in a class's own methods, but for what makes an object."""
    found: set[str] = set()
    for name, value in vars(kind).items():
        inner = getattr(value, "fget", getattr(value, "__func__", value))
        if isinstance(inner, FunctionType) and name not in ("__init__", "__new__", "__init_subclass__"):
            found |= names_in(inner.__code__)
    return frozenset(found)


class Reader:
    """Finds the variables of functions, and tells ``found(root, path, value, holder)`` each once.

    The holder is a cell, a module, a class, or the function itself for its defaults and attributes. Classes and
    modules count where they are of dates and the code asks what day it is. ``visited`` is told every function.
    """

    def __init__(
        self,
        roots: Roots,
        found: Callable[[str, Path, Any, Any], None],
        visited: Callable[[FunctionType], None] = lambda _: None,
    ) -> None:
        self._roots, self._found, self._visited = roots, found, visited
        self._seen: set[int] = set()

    def visit(self, value: Any) -> None:
        """Look at a function, a method, or what wraps one."""
        value = value.__func__ if isinstance(value, MethodType) else value
        if isinstance(value, functools.partial):
            self.visit(value.func)
            return
        wrapped = getattr(value, "__wrapped__", None)
        if wrapped is not None and wrapped is not value:
            self.visit(wrapped)
        if not isinstance(value, FunctionType) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        home = value.__globals__.get(
            "__name__"
        )  # a wrapper has the name of what it wraps, and its own variables
        if is_foreign(home):
            return
        self._visited(value)
        names = names_in(value.__code__)
        root, module = self._roots.know_variables(value.__globals__)
        for name in sorted(names):
            if name in value.__globals__:
                self._variable(root, name, value.__globals__[name], module, names)
        root = self._roots.know(value)
        for name, cell in closure(value).items():
            self._variable(root, name, content(cell), cell, names)
        for path, found in _of_its_own(value, names):
            self._found(root.replace("closure", "function", 1), path, found, value)

    def _variable(self, root: str, name: str, value: Any, holder: Any, names: frozenset[str]) -> None:
        """A variable; of a module or a class what the code names of it."""
        value = original(value)
        if is_calendar(value) and names & MOMENTS:
            self._found(root, (f".{name}",), value, holder)
        elif isinstance(value, ModuleType):
            if not is_foreign(value.__name__):
                for inner in sorted(names & vars(value).keys()):
                    self._tell(f"globals {value.__name__}", inner, vars(value)[inner], value)
        elif isinstance(value, type):
            if not is_foreign(value.__module__):
                of = self._roots.know_class(value)
                for inner in sorted(names & vars(value).keys()):
                    self._tell(of, inner, vars(value)[inner], value)
        else:
            self._tell(root, name, value, holder)

    def _tell(self, root: str, name: str, value: Any, holder: Any) -> None:
        value = original(
            value.__get__(None, holder) if isinstance(value, (staticmethod, classmethod)) else value
        )
        if value is NOTHING or isinstance(value, (ModuleType, type, property)):
            return
        self._found(root, (f".{name}",), value, holder)
        if callable(value):
            self.visit(value)


def _of_its_own(function: FunctionType, names: frozenset[str]) -> Iterator[tuple[Path, Any]]:
    """Defaults of arguments that may change, and attributes that the function's code names."""
    for position, default in enumerate(function.__defaults__ or ()):
        if _may_change(default):
            yield (".__defaults__", step_to(position)), default
    for name, default in (function.__kwdefaults__ or {}).items():
        if _may_change(default):
            yield (".__kwdefaults__", step_to(name)), default
    for name in sorted(names & vars(function).keys()):
        if not isinstance(vars(function)[name], (ModuleType, type)):
            yield (f".{name}",), vars(function)[name]


def _may_change(default: object) -> bool:
    default = original(default)  # another thread's trace may have put a stand-in there
    if isinstance(default, BuiltinFunctionType) and isinstance(default.__self__, (ModuleType, type(None))):
        return False
    return not is_scalar(default) and not isinstance(default, (ModuleType, type))


def discover(roots: Roots) -> None:
    """Let ``roots`` know the functions of a model, in an order that is the same on every rank."""
    reader = Reader(roots, lambda *_: None)
    kinds: dict[type, None] = {}
    for module in roots.model.modules():
        kinds.update(dict.fromkeys(type(module).__mro__))
    for kind in kinds:
        if not is_foreign(kind.__module__):
            roots.know_class(kind)
            for value in list(vars(kind).values()):
                reader.visit(value.fget if isinstance(value, property) else value)
    reader.visit(roots.loss)
    callables = Callables(is_foreign)
    for module in roots.model.modules():
        for value in callables.of(module):
            reader.visit(value)
    roots.all_known()


def rediscover(roots: Roots) -> None:
    """Let ``roots`` know the functions that a model has now, by the names that a trace gives them."""
    roots.forget()
    discover(roots)
