"""Which variables a function reads that are not its own: of its module, of the functions around it.

Functions that it calls by name, in the same way, count as well, unless they are torch's or the standard
library's. An attribute of a class, a module or an object counts if the code has its name.
"""

from __future__ import annotations

import builtins
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from enum import Enum
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from hetspmd.trace.host.cached import is_cache
from hetspmd.trace.host.classes import Classes, Met
from hetspmd.trace.host.foreign import is_foreign, is_installed, is_own
from hetspmd.trace.host.kinds import answers, parts_of
from hetspmd.trace.host.library import Library
from hetspmd.trace.host.names import calls_plainly, computes_names, constants_in, named_in, names_in
from hetspmd.trace.host.places import NOTHING, Path, Roots, closure, content
from hetspmd.trace.host.plain import fingerprint, is_plain, is_scalar
from hetspmd.trace.host.sources import Kind
from hetspmd.trace.host.stand_ins import is_asking, original
from hetspmd.trace.host.steps import step_to
from hetspmd.trace.host.wrapped import asked_for, functions_in, registered, unbound

__all__ = ["CodeReader", "is_foreign", "is_installed", "names_of_methods"]


def names_of_methods(kind: type) -> frozenset[str]:
    """Names of variables and attributes in a class's own methods, but for what makes an object."""
    names: set[str] = set()
    for name, value in vars(kind).items():
        inner = getattr(value, "fget", getattr(value, "__func__", value))
        if isinstance(inner, FunctionType) and name not in ("__init__", "__new__", "__init_subclass__"):
            names |= names_in(inner.__code__)
    return frozenset(names)


class CodeReader:
    """Finds the variables of functions, and calls ``on_variable(root, path, value, holder)`` once for each.

    The holder is a cell, a module, a class, or the function itself for its defaults and attributes. Classes and
    modules count where they are of dates and the code asks what day it is. ``visited`` is told every function,
    ``cached`` each that keeps its results, wherever it lies: in a class, around a method, in a partial function.
    ``everything``: all members of classes count, and what does not answer is passed by.
    """

    def __init__(
        self,
        roots: Roots,
        on_variable: Callable[[str, Path, Any, Any], None],
        visited: Callable[[FunctionType], None] = lambda _: None,
        cached: Callable[[Any], None] = lambda _: None,
        *,
        everything: bool = False,
    ) -> None:
        self._roots, self._on_variable, self._visited, self._cached = roots, on_variable, visited, cached
        self._seen: set[int] = set()
        self._told: set[tuple[str, str, frozenset[str]]] = set()
        self._looked: set[tuple[int, str]] = set()
        self._classes = Classes(roots)
        self._names: set[str] = set()
        self._texts: set[str] = set()
        self._computing = False
        self.asked: list[tuple[Kind, str, str]] = []
        self.library = Library(roots, self.visit, on_variable)
        self._everything, self._settling, self._settled = everything, False, -1

    def bases(self) -> Iterator[tuple[tuple[str, Path], str]]:
        """The bases of the user's classes that were met and may be given others, by place."""
        for met in self._classes:
            if met.root and met.kind.__bases__ != (object,):
                yield (met.root, (*met.path, ".__mro__")), fingerprint(met.kind.__mro__)

    @property
    def names(self) -> Set[str]:
        """All names in the code of the user's functions that were met so far."""
        return self._names

    def visit(self, value: Any) -> None:
        """Look at a function, a method, or what wraps one: also as it lies in a class."""
        value = unbound(value)
        is_plain = type(value) is FunctionType
        if is_plain:
            if id(value) in self._seen:
                return
            self._seen.add(id(value))
        elif is_cache(value):
            self._cached(value)
        if (names := asked_for(value)) - self._names:
            self._names |= names
            self._settle()
        for function in functions_in(value):
            self.visit(function)
        # A wrapper has the name of what it wraps, and its own variables.
        if not is_plain or is_foreign(home := value.__globals__.get("__name__")):
            return
        self._visited(value)
        self._look_at(value, str(home))
        self._settle()

    def meet(self, kind: type, root: str, path: Path, *, makes_objects: bool = False) -> None:
        """Look at a class of the user's that lies at a place; ``makes_objects``: the code may make some."""
        if self._classes.meet(kind, root, path, makes_objects=makes_objects):
            self._settle(new=True)

    def _look_at(self, function: FunctionType, home: str) -> None:
        names, named = named_in(function.__code__, home)
        if is_own(home):
            self._names |= names
            if computes_names(function.__code__):
                self._texts |= {
                    text for text in constants_in(function.__code__) if len(text) >= _FEWEST_LETTERS
                }
                self._computing = True
        variables, imported = function.__globals__, sys.modules
        root, module = self._roots.know_variables(variables)
        looked, home_id = self._looked, id(variables)
        for name, qualified in named:
            if (home_id, name) in looked:
                continue
            if name in variables:
                if not issubclass(type(variables[name]), (ModuleType, type)):  # of those the names count
                    looked.add((home_id, name))
                self._variable(root, name, variables[name], module, names)
            elif (loaded_module := imported.get(name) or imported.get(qualified)) is not None:
                self._variable(root, name, loaded_module, module, names)
            if name not in variables and name in vars(builtins) and is_own(home):
                self.library.variable("globals builtins", name, vars(builtins)[name])
        if names & _COMPUTING and is_own(home):
            for name in self._computed(variables):
                self._variable(root, name, variables[name], module, names)
        if is_own(home) and (names & _IMPORTING or names >= _LOADED):
            for loaded_module in _modules(constants_in(function.__code__), home):
                self._inner(self._roots.know_variables(vars(loaded_module))[0], loaded_module, names)
        if is_own(home):
            self.asked += _asked_by(function, names)
            self._library_by_text(function, [name for pair in named for name in pair])
        root = self._roots.know(function)
        for name, cell in closure(function).items():
            self._variable(root, name, content(cell), cell, names)
        for path, value in _of_its_own(function, names):
            self._on_variable(root.replace("closure", "function", 1), path, value, function)
        if is_own(home) and names & _ENVIRONMENT:
            for key in _variables_of(constants_in(function.__code__)):
                place = "globals os", (".environ", step_to(key))
                self._on_variable(*place, os.environ.get(key, NOTHING), os.environ)

    def _library_by_text(self, function: FunctionType, named: Iterable[str]) -> None:
        """The modules of libraries of which a function takes what has a name that it computes."""
        code = function.__code__
        names = names_in(code)
        if not (names & _GETTERS or computes_names(code)):
            return
        texts = constants_in(code)
        parts = names.union(part for text in texts for part in text.split("."))
        held = {name: content(cell) for name, cell in closure(function).items()}
        candidates = [held.get(n, function.__globals__.get(n, sys.modules.get(n))) for n in (*held, *named)]
        if names >= _LOADED or names & _IMPORTING:
            candidates += [sys.modules.get(text) for text in sorted(texts)]
        for module in candidates:
            if isinstance(module, ModuleType) and is_foreign(module.__name__):
                self.library.of_computed_names(module, parts)

    def _variable(self, root: str, name: str, value: Any, holder: Any, names: frozenset[str]) -> None:
        """A variable; of a module or a class what the code names of it."""
        if self._everything and not answers(value):
            return
        value = original(value)
        if type(value) is FunctionType:
            self._tell(root, (f".{name}",), value, holder)
        elif is_asking(value, names):
            self._on_variable(root, (f".{name}",), value, holder)
        elif isinstance(value, ModuleType):
            if is_foreign(value.__name__):
                self.library.of_module(value, names)
            else:
                self._inner(f"globals {value.__name__}", value, names)
        elif isinstance(value, type):
            if is_own(value.__module__):
                self._on_variable(root, (f".{name}",), value, holder)
                self.meet(value, root, (f".{name}",), makes_objects=True)
            elif not is_foreign(value.__module__):
                self._inner(self._roots.know_class(value), value, names)
        else:
            self._tell(root, (f".{name}",), value, holder)

    def _inner(self, root: str, holder: Any, names: frozenset[str]) -> None:
        """What the code names of a module, or of a class of an installed package."""
        computed = names & _ASKING and isinstance(holder, ModuleType) and is_own(holder.__name__)
        asked = self._computed(vars(holder)) if computed else ()
        if isinstance(holder, ModuleType) and is_own(holder.__name__):
            asked = [*asked, *(vars(holder).keys() & {"__getattr__"})]
        for name in sorted((names & vars(holder).keys()).union(asked)):
            value = vars(holder)[name]
            if isinstance(value, (ModuleType, type)) and isinstance(holder, ModuleType):
                if (root, name, names) not in self._told:
                    self._told.add((root, name, names))
                    self._variable(root, name, value, holder, names)
            else:
                self._tell(root, (f".{name}",), value, holder)

    def _tell(self, root: str, path: Path, value: Any, holder: Any) -> None:
        if type(value) is not FunctionType:
            value = original(
                value.__get__(None, holder) if isinstance(value, (staticmethod, classmethod)) else value
            )
            if value is NOTHING or isinstance(value, (ModuleType, type, property)):
                return
        self._on_variable(root, path, value, holder)
        if callable(value):
            self.visit(value)

    def _settle(self, *, new: bool = False) -> None:
        """Look at members of classes until none counts that has not been looked at."""
        if self._settling:
            return
        self._settling, extent = True, -1 if new else self._settled
        try:
            while extent != (extent := self._extent()):
                for met in self._classes:
                    for name, value in met.due(None if self._everything else self._counts):
                        self._member(met, name, value)
        finally:
            self._settling, self._settled = False, extent

    def _extent(self) -> int:
        """A number that is another one whenever there is anything new to look at."""
        return len(self._names) + len(self._texts) + self._computing + self._classes.extent

    def _computed(self, variables: Mapping[str, Any]) -> list[str]:
        """The names of a module's variables that code may compute: numbers, strings and the like, and functions in
        whose names a text of the code occurs."""
        home = variables.get("__name__")
        functions = (n for n, v in variables.items() if type(v) is FunctionType and v.__module__ == home)
        told = (name for name in functions if any(text in name for text in self._texts))
        return [*_plain_ones(variables), *told]

    def _counts(self, name: str, value: Any) -> bool:
        """Whether a member of a class may be read: it is named, or its name may be computed."""
        if name in self._names or (isinstance(value, Enum) and parts_of(value)):
            return True
        if not self._computing or name.startswith("__"):
            return False
        return is_plain(value) or any(text in name for text in self._texts)

    def _member(self, met: Met, name: str, value: Any) -> None:
        """A member of a class counts."""
        place = (*met.path, f".{name}")
        if isinstance(value, _MADE_OF_FUNCTIONS) or _is_special(name):
            self.visit(value)
            if isinstance(value, functools.singledispatchmethod):
                place = (*met.path, ".__dict__", step_to(name), ".dispatcher", ".registry")
                self._on_variable(met.root, place, registered(value), value)
        elif isinstance(value, type):
            self._on_variable(met.root, place, value, met.kind)
            self.meet(value, met.root, place, makes_objects=True)
        elif is_cache(value):
            self._tell(met.root, place, value, met.kind)
        elif hasattr(type(value), "__get__") and is_own(type(value).__module__):
            self._on_variable(met.root, (*met.path, ".__dict__", step_to(name)), value, value)
        elif not hasattr(type(value), "__get__") or isinstance(
            value, (FunctionType, staticmethod, classmethod)
        ):
            self._tell(met.root, place, value, met.kind)


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


_MADE_OF_FUNCTIONS = (
    property,
    functools.cached_property,
    functools.partialmethod,
    functools.singledispatchmethod,
)
_FEWEST_LETTERS = 3
"""Letters of a text from which a name that has them may be computed with it: shorter ones are in any name."""
_COMPUTING = frozenset({"globals", "eval", "exec", "__globals__", "f_globals"})
_ASKING = frozenset({"getattr", "vars", "__dict__"})
"""What reads variables by names that the code may compute: of its own module, of another one."""
_GETTERS = frozenset({"attrgetter", "methodcaller"})
_IMPORTING = frozenset({"import_module", "__import__", "getmodule"})
_LOADED = frozenset({"sys", "modules"})
"""What finds a module by a name that is text."""
_ENVIRONMENT = frozenset({"environ", "getenv"})
_OF_A_RANK = frozenset({
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK", "CUDA_VISIBLE_DEVICES", "HOSTNAME",
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURMD_NODENAME", "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_NODE_RANK", "PMI_RANK",
    "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK",
})  # fmt: skip
"""Variables of the environment that differ between ranks as they should."""


def _asked_by(function: FunctionType, names: frozenset[str]) -> Iterator[tuple[Kind, str, str]]:
    """What a function asks of classes of C in whose place nothing can stand: of which kind, what, and where."""
    if "datetime64" in names and constants_in(function.__code__) & {"now", "today"}:
        yield "clock", 'numpy.datetime64("now")', function.__qualname__
    if names >= {"Generator", "seed"} and calls_plainly(function.__code__, "seed"):
        yield "bytes", "torch.Generator.seed", function.__qualname__


def _modules(texts: frozenset[str], home: str) -> list[ModuleType]:
    """The user's modules that code may find by their names: its own, and those whose names it has as text; all of
    them if it has the name of no module."""
    loaded = {name: module for name, module in list(sys.modules.items()) if isinstance(module, ModuleType)}
    named = texts & loaded.keys()
    any_of = (name for name, module in loaded.items() if getattr(module, "__file__", None) and is_own(name))
    names = {home, *(filter(is_own, named) if named else any_of)}
    return [loaded[name] for name in sorted(names & loaded.keys())]


def _variables_of(texts: frozenset[str]) -> list[str]:
    """The variables of the environment that code with these texts may ask for: those of these names, and those
    whose names begin or end with one of them, which the code may compute."""
    parts = tuple(text for text in texts if text.isidentifier() and len(text) > 1)
    computed = {key for key in os.environ if key.startswith(parts) or key.endswith(parts)}
    return sorted((texts | computed) - _OF_A_RANK)


def _plain_ones(variables: Mapping[str, Any]) -> list[str]:
    """The names of variables that are made of numbers, strings and the like."""
    return [n for n, v in variables.items() if not n.startswith("__") and answers(v) and is_plain(v)]


def _of_its_own(function: FunctionType, names: frozenset[str]) -> Iterator[tuple[Path, Any]]:
    """Defaults of arguments that may change, and attributes: all of the user's functions, which others may read."""
    for position, default in enumerate(function.__defaults__ or ()):
        if _may_change(default):
            yield (".__defaults__", step_to(position)), default
    for name, default in (function.__kwdefaults__ or {}).items():
        if _may_change(default):
            yield (".__kwdefaults__", step_to(name)), default
    attributes = vars(function)
    own = bool(attributes) and is_own(function.__globals__.get("__name__"))
    for name in (
        sorted(n for n in attributes if n in names or (own and not n.startswith("__"))) if attributes else ()
    ):
        if not isinstance(attributes[name], (ModuleType, type)):
            yield (f".{name}",), attributes[name]


def _may_change(default: object) -> bool:
    if is_scalar(default):
        return False
    default = original(default)  # another thread's trace may have put a stand-in there
    if isinstance(default, BuiltinFunctionType) and isinstance(default.__self__, (ModuleType, type(None))):
        return False
    return not is_scalar(default) and not isinstance(default, (ModuleType, type))
