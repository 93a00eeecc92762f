"""What was there before a trace ran the model's Python, what is there now, and putting it back.

Held are attributes of modules and objects, variables of functions, and the containers among them: as
references, so that nothing is copied but lists. Slots of parameters and buffers are left to
:mod:`hetspmd.trace.fake`.
"""

from __future__ import annotations

import collections
import operator
import sys
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from types import CellType
from typing import Any, Final

from torch import nn

from hetspmd.trace.compat.tensors import outside_modes
from hetspmd.trace.host.cached import entries_of, results_of
from hetspmd.trace.host.content import own_attributes
from hetspmd.trace.host.foreign import is_foreign, is_installed
from hetspmd.trace.host.in_place import Content
from hetspmd.trace.host.members import Members, members
from hetspmd.trace.host.places import NOTHING, Path, Variables, content
from hetspmd.trace.host.plain import is_container, is_scalar
from hetspmd.trace.host.raw import elements, pairs, refill, size
from hetspmd.trace.host.stand_ins import original
from hetspmd.trace.host.steps import step_to

OF_TORCH: Final = frozenset(vars(nn.Module())) | {"_flat_weights", "_flat_weight_refs"}
"""Attributes that every module has, and those in which torch's recurrent layers hold their parameters once more."""

_TENSORS = ("_parameters", "_buffers")
_STRUCTURE = tuple(
    name for name, value in vars(nn.Module()).items() if isinstance(value, dict) and name not in _TENSORS
)
"""Attributes of a module that hold submodules and hooks."""


@dataclass(frozen=True, slots=True)
class Change:
    """A value that is another than before; NOTHING stands for none. ``inside``: of a container that is the
    same. ``instead``: what to write, where a change cannot be made again."""

    root: str
    path: Path
    before: Any
    after: Any
    inside: bool = False
    instead: str = ""


@dataclass(slots=True)
class _Held:
    root: str
    path: Path
    live: Any
    before: Any


class Snapshot:
    """The values at places, when they were first held."""

    def __init__(self) -> None:
        self._attributes: dict[int, _Held] = {}
        self._containers: dict[int, _Held] = {}
        self._cells: dict[int, _Held] = {}
        self._variables: dict[tuple[int, str], _Held] = {}
        self._caches: dict[int, tuple[Any, frozenset[Any]]] = {}
        self._first: dict[int, frozenset[Any]] = {}
        self._installed: set[int] = set()
        self._contents: dict[int, tuple[_Held, Content]] = {}

    def attributes(self, root: str, path: Path, of: MutableMapping[str, Any]) -> dict[str, Any]:
        """Hold the attributes or variables ``of`` a holder; returns the copy."""
        key = id(of.of if isinstance(of, Members) else of)
        held = self._attributes.get(key)
        if held is None:
            held = self._attributes[key] = _Held(root, path, of, dict(of))
        before: dict[str, Any] = held.before
        return before

    def container(self, root: str, path: Path, value: Any) -> None:
        """Hold a list, dict, set or deque, and those inside it."""
        if path and path[-1][1:] in OF_TORCH:
            return
        if id(value) in self._containers or not is_container(value) or _is_of_python(value):
            return
        if not isinstance(value, (tuple, frozenset)):
            self._containers[id(value)] = _Held(root, path, value, _copied(value))
        if isinstance(value, (set, frozenset)):
            return
        for key, inner in pairs(value) if isinstance(value, dict) else enumerate(elements(value)):
            if is_container(inner):
                self.container(root, (*path, step_to(key)), inner)

    def cell(self, root: str, path: Path, cell: CellType) -> None:
        """Hold a variable of a closure."""
        self._cells.setdefault(id(cell), _Held(root, path, cell, content(cell)))

    def variable(self, root: str, path: Path, holder: Any) -> None:
        """Hold one variable of a module or attribute of a class."""
        self._variables.setdefault(
            (id(holder), path[-1]), _Held(root, path, holder, _own(holder, path[-1][1:]))
        )

    def place(self, root: str, path: Path, holder: Any) -> None:
        """Hold what lies at a place, of whatever kind its holder is."""
        if isinstance(holder, Variables):
            cell = holder.of.get(path[-1][1:])
            if isinstance(cell, CellType):
                self.cell(root, path, cell)
            else:
                self.variable(root, path, sys.modules[root.partition(" ")[2]])
        elif isinstance(holder, type):
            self.variable(root, path, holder)
        elif is_container(holder):
            self.container(root, path[:-1], holder)
        elif (attributes := members(holder)) is not None:
            self.attributes(root, path[:-1], attributes)

    def content(self, root: str, path: Path, value: Any, content: Content) -> None:
        """Hold what an object has in it that is changed in place."""
        if id(value) not in self._contents:
            with outside_modes():
                self._contents[id(value)] = _Held(root, path, value, content.read()), content

    def is_as_held(self, holder: Any, name: str) -> bool:
        """Whether a variable is still what it was when it was held."""
        held = self._variables.get((id(holder), f".{name}"))
        return held is None or _own(holder, name) is held.before

    def cache(self, function: Any, *, installed: bool = False) -> None:
        """Hold a ``functools.lru_cache``: what is put into it is thrown away. Of an ``installed`` package numbers
        and the like stay, as on one device."""
        if installed:
            self._installed.add(id(function))
        held = self._caches.setdefault(id(function), (function, frozenset(results_of(function))))
        self._first.setdefault(id(function), held[1])

    def forget_results(self) -> None:
        """Take out what all caches have got since they were found."""
        for name, (function, _) in self._caches.items():
            self._caches[name] = function, self._first[name]
        self.rewind()

    def hold_caches(self) -> None:
        """Hold what all caches have in them now."""
        for name, (function, _) in self._caches.items():
            self._caches[name] = function, frozenset(results_of(function))

    def cached(self) -> Iterator[tuple[Any, Any, Any]]:
        """What was put into caches since they were held: the functions, the keys and the results."""
        for function, keys in self._caches.values():
            if results_of(function).keys() - keys:
                yield from (
                    (function, key, result) for key, result in entries_of(function) if key not in keys
                )

    def changes(self) -> Iterator[Change]:
        """What is not as it was."""
        for held in self._attributes.values():
            if _identical(held.live, held.before):
                continue
            for name in [*held.before, *(n for n in held.live if n not in held.before)]:
                before, after = held.before.get(name, NOTHING), held.live.get(name, NOTHING)
                if before is not after:
                    yield Change(held.root, (*held.path, f".{name}"), before, after)
        for held in self._cells.values():
            if content(held.live) is not held.before:
                yield Change(held.root, held.path, held.before, content(held.live))
        for held in self._variables.values():
            if (now := _own(held.live, held.path[-1][1:])) is not held.before:
                yield Change(held.root, held.path, held.before, now)
        for held, inner in self._contents.values():
            if not inner.same(held.before, now := inner.read()):
                yield Change(held.root, held.path, held.before, now, instead=inner.instead)
        for held in self._containers.values():
            if not _same(held.live, held.before):
                yield Change(held.root, held.path, held.before, held.live, inside=True)

    def rewind(self) -> None:
        """Put everything back."""
        for held in self._attributes.values():
            if _identical(held.live, held.before):
                continue
            for name, value in held.before.items():
                if held.live.get(name, NOTHING) is not value:
                    held.live[name] = value
            if len(held.live) != len(held.before):
                for name in [n for n in held.live if n not in held.before]:
                    del held.live[name]
        for held in self._cells.values():
            if content(held.live) is not held.before:
                held.live.cell_contents = held.before
        for held in self._variables.values():
            name = held.path[-1][1:]
            if _own(held.live, name) is not held.before:
                if held.before is NOTHING:
                    delattr(held.live, name)
                else:
                    setattr(held.live, name, held.before)
        for held in self._containers.values():
            if not _same(held.live, held.before):
                refill(held.live, held.before)
        for held, inner in self._contents.values():
            if not inner.same(held.before, inner.read()):
                inner.set(held.before)
        for function, keys in self._caches.values():
            table = results_of(function)
            more = table.keys() - keys
            if more and id(function) in self._installed:
                more -= {key for key, result in entries_of(function) if is_scalar(result)}
            for key in more:
                del table[key]


class Structure:
    """Submodules and hooks of modules at one time: unlike other attributes, a trace changes them itself. With
    ``tensors`` also which parameters and buffers they hold."""

    def __init__(self, modules: list[tuple[Path, nn.Module]], *, tensors: bool = False) -> None:
        self._held = [
            (path, name, live, dict(live))
            for path, module in modules
            for attributes in (own_attributes(module),)
            for name in (*_STRUCTURE, *(_TENSORS if tensors else ()))
            if (live := attributes.get(name)) is not None
        ]

    def changes(self) -> Iterator[tuple[Path, str]]:
        """Where something was added, removed or replaced: the module, and the attribute of torch's.

        Hooks that an installed package adds when a model is first called, to look on, do not count.
        """
        for path, name, live, before in self._held:
            if _same(live, before):
                continue
            added = [v for key, v in live.items() if key not in before] if name not in _TENSORS else []
            if not (added and all(map(_of_a_package, added)) and before.items() <= live.items()):
                yield path, name

    def rewind(self) -> None:
        """Put everything back."""
        for _, _, live, before in self._held:
            if not _same(live, before):
                refill(live, before)


def _of_a_package(hook: Any) -> bool:
    module = sys.modules.get(str(getattr(hook, "__module__", None)))
    return not isinstance(hook, nn.Module) and module is not None and is_installed(module)


def _is_of_python(value: Any) -> bool:
    """Whether a dict is Python's own: the variables of one of its modules, or of torch's, or all modules."""
    if type(value) is not dict:
        return False
    if value is sys.modules:
        return True
    name = value.get("__name__")
    if not isinstance(name, str) or not is_foreign(name):
        return False
    return getattr(sys.modules.get(name), "__dict__", None) is value


def _own(holder: Any, name: str) -> Any:
    return original(vars(holder).get(name, NOTHING))  # another thread's trace may have put a stand-in there


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return dict(pairs(value))
    return set(elements(value)) if isinstance(value, set) else elements(value)


def _same(live: Any, saved: Any) -> bool:
    if _identical(live, saved):
        return True
    if size(live) != len(saved):
        return False
    if isinstance(saved, dict):
        return all(a is c and b is d for (a, b), (c, d) in zip(pairs(live), saved.items(), strict=True))
    if isinstance(saved, set):
        return set(elements(live)) == saved
    return all(a is b for a, b in zip(elements(live), saved, strict=True))


def _identical(live: Any, saved: Any) -> bool:
    """Whether an ordinary dict has the very keys and values of another one, in its order; False for all else."""
    if type(live) is not dict and type(live) is not collections.OrderedDict:
        return False
    return len(live) == len(saved) and (
        not saved
        or (all(map(operator.is_, live, saved)) and all(map(operator.is_, live.values(), saved.values())))
    )
