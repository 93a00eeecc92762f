"""Where a value beside the graph lies, as text that every rank can resolve on its own model.

A place is a root and a path. Roots are ``model``, ``loss`` (the function given as ``loss=``), ``class M:C``,
``globals M``, ``closure M:F`` (of the function F), ``function M:F`` (its defaults and attributes) and ``torch``
(its settings). Steps of a path are ``.name`` for an attribute or variable and ``[key]`` for an item
(:mod:`hetspmd.trace.host.steps`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import CellType, FunctionType
from typing import Any, Final

from torch import nn

from hetspmd.trace.host import raw
from hetspmd.trace.host.cached import CALL, call
from hetspmd.trace.host.members import is_slot
from hetspmd.trace.host.plain import is_container, type_name
from hetspmd.trace.host.replaced import functions_of
from hetspmd.trace.host.settings import SETTINGS
from hetspmd.trace.host.stand_ins import InPlaceOf
from hetspmd.trace.host.steps import (
    ALL,
    CALLS,
    FUNCTIONS,
    OTHERS,
    calls_of,
    key_of,
    others,
    spoken,
    step_to,
    told,
)

Path = tuple[str, ...]


class _Nothing:
    def __repr__(self) -> str:
        return "missing"


NOTHING: Final = _Nothing()
"""What is read where nothing is."""


def text(root: str, path: Path) -> str:
    """The place as people read it."""
    joined = "".join(map(spoken, path))
    if root in ("model", "loss"):
        return joined.removeprefix(".") if root == "model" else f"loss{joined}"
    kind, _, name = root.partition(" ")
    if kind == "class":
        return f"{name.rpartition(':')[2]}{joined}"
    if kind == "globals":
        return f"{joined.removeprefix('.')} of module {name}"
    if kind == "function":
        return _of_function(path, name.rpartition(":")[2])
    if kind == "closure":
        return f"{joined.removeprefix('.')}, a variable around {name.rpartition(':')[2]}"
    name = joined.removeprefix(".")
    return name if name.startswith(("numpy.", "decimal.", "sys.")) else f"torch's {name}"


def _of_function(path: Path, name: str) -> str:
    spoken = {".__defaults__": "a default", ".__kwdefaults__": "the default"}.get(path[0])
    if spoken is None:
        return f"{''.join(path).removeprefix('.')} of function {name}"
    return f"{spoken} {''.join(path[1:])} of the arguments of {name}"


class Roots:
    """What the roots are for one model and loss function."""

    def __init__(self, model: nn.Module, loss: object = None, batch_classes: Sequence[type] = ()) -> None:
        self.model, self.loss = model, loss
        self.batch_classes = list(batch_classes)
        """Classes of the batch to which no name leads (``main.<locals>.Batch``): they are a model's as well."""
        self.functions: dict[str, FunctionType] = {}
        self._classes: dict[str, type] = {}
        self.namespaces: dict[str, Namespace] = {}
        self._lasting: frozenset[str] = frozenset()

    def know(self, function: FunctionType) -> str:
        """The root of a function's closure."""
        name = root = f"closure {function.__module__}:{function.__qualname__}"
        number = 1
        while self.functions.setdefault(root, function) is not function:
            number += 1
            root = f"{name}#{number}"
        return root

    def forget(self) -> None:
        """Know no function and no class that was made in one."""
        self.functions.clear()
        self._classes.clear()
        self.namespaces.clear()

    def know_class(self, kind: type) -> str:
        """The root of a class's attributes; one that no name leads to is found if it is known."""
        name = root = f"class {kind.__module__}:{kind.__qualname__}"
        if "<locals>" not in name and _class(name) is kind:
            return root
        number = 1
        while self._classes.setdefault(root, kind) is not kind:
            number += 1
            root = f"{name}#{number}"
        return root

    def know_variables(self, of: dict[str, Any]) -> tuple[str, Any]:
        """The root of a module's variables, and what holds them: the module, if it can be imported by its name."""
        name = of["__name__"]
        module = sys.modules.get(name)
        if module is not None and vars(module) is of:
            return f"globals {name}", module
        number = 1 if module is None else 2
        while True:
            root = f"globals {name}#{number}"
            namespace = self.namespaces.setdefault(root, Namespace(of))
            if vars(namespace) is of:
                return root, namespace
            number += 1

    def all_known(self) -> None:
        """From now on :meth:`lasts` tells what was known until now."""
        self._lasting = frozenset((*self._classes, *self.namespaces, *self.functions))

    def lasts(self, root: str) -> bool:
        """Whether every rank finds this root on its own model: by its name, or where all of a model's are known."""
        return root in self._lasting or root not in (*self._classes, *self.namespaces)

    def finds(self, function: FunctionType) -> bool:
        """Whether every rank finds this function on its own model: with all of a model's, or by its name."""
        root = self.know(function)
        return root in self._lasting or _function(root.partition(" ")[2]) is function

    def holder(self, root: str, path: Path) -> Any:
        """What holds the last step of a path: an object, a mapping of variables, a container; NOTHING if
        gone."""
        kind, _, name = root.partition(" ")
        if kind == "model":
            holder: Any = self.model
        elif kind == "loss":
            holder = self.loss
        elif kind == "class":
            holder = self._classes.get(root) or _class(name)
        elif root in self.namespaces:
            holder = Variables(vars(self.namespaces[root]))
        elif kind == "globals":
            module = sys.modules.get(name)
            holder = NOTHING if module is None else Variables(vars(module))
        elif kind == "function":
            holder = self.functions.get(f"closure {name}") or _function(name)
        elif kind == "closure":
            function = self.functions.get(root) or _function(name)
            holder = NOTHING if function is NOTHING else Variables(closure(function))
        else:
            holder = Variables(SETTINGS)
        for step in path[:-1]:
            holder = item(holder, step)
        return holder

    def value(self, root: str, path: Path) -> Any:
        """The value at a place, NOTHING if there is none."""
        return item(self.holder(root, path), path[-1])


class Namespace:
    """Holds the variables of a module that cannot be imported: of a file that was executed."""

    def __init__(self, of: dict[str, Any]) -> None:
        self.__dict__ = of


def is_found(kind: type) -> bool:
    """Whether a class's name leads to it; torch makes classes that no name leads to (``ParametrizedLinear``)."""
    return _class(f"{kind.__module__}:{kind.__qualname__}") is kind


def _class(name: str) -> Any:
    home, _, qualified = name.partition(":")
    value = sys.modules.get(home, NOTHING)
    for part in qualified.split("."):
        value = getattr(value, part, NOTHING)
    return value


def _function(name: str) -> Any:
    """The function of a module or a class that a name leads to, NOTHING if none does."""
    function = NOTHING if "<" in name or "#" in name else _class(name)
    function = getattr(function, "__func__", function)
    return function if isinstance(function, FunctionType) else NOTHING


class Variables:
    """The variables of a module or a closure, or settings, by name."""

    def __init__(self, of: Mapping[str, Any]) -> None:
        self.of = of


def closure(function: FunctionType) -> dict[str, CellType]:
    """The cells around a function, by name."""
    cells = function.__closure__
    return {} if cells is None else dict(zip(function.__code__.co_freevars, cells, strict=True))


def item(holder: Any, step: str) -> Any:
    """One step from a holder, NOTHING if there is nothing."""
    if holder is NOTHING:
        return NOTHING
    if isinstance(holder, Variables):
        if step == FUNCTIONS:
            return functions_of(holder.of)
        value = holder.of.get(step if step in holder.of else step[1:], NOTHING)
        if isinstance(value, CellType):
            return content(value)
        return value() if holder.of is SETTINGS and value is not NOTHING else value
    if step.startswith("."):
        try:
            value = getattr(holder, step[1:], NOTHING)
        except Exception:  # a property may raise anything
            return NOTHING
        return value.before if isinstance(value, InPlaceOf) else value
    if step == ALL:
        return _extent(holder)
    if step.startswith(CALL):
        try:
            return call(holder, step)
        except Exception:  # a function may raise anything
            return NOTHING
    if step == CALLS:
        return calls_of(holder)
    if step == OTHERS:
        return others(holder) if isinstance(holder, dict) else NOTHING
    try:
        return raw.at(holder, key_of(step)) if is_container(holder) else holder[key_of(step)]
    except (KeyError, IndexError, TypeError, ValueError, RecursionError):
        return NOTHING


def _extent(holder: Any) -> Any:
    """A container's class, with its keys or its number of elements; NOTHING for anything else."""
    if isinstance(holder, dict) or not isinstance(holder, Mapping):
        if not is_container(holder):
            return NOTHING
        parts = raw.elements(holder) if isinstance(holder, dict) else [raw.size(holder)]
    else:
        parts = list(holder)
    return type_name(type(holder)), *parts


def content(cell: CellType) -> Any:
    """What a cell holds, NOTHING if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return NOTHING


def put(holder: Any, step: str, value: Any) -> None:
    """Put a value one step from a holder; NOTHING removes it. Attributes of modules are set beside torch's
    own."""
    if isinstance(holder, Variables):
        held = holder.of.get(step[1:])
        if isinstance(held, CellType):
            held.cell_contents = value
        elif value is NOTHING:
            holder.of.pop(step[1:], None)  # type: ignore[attr-defined]  # of a module, a dict
        else:
            holder.of[step[1:]] = value  # type: ignore[index]  # of a module, a dict
    elif step.startswith("."):
        attributes = None if isinstance(holder, type) else getattr(holder, "__dict__", None)
        if value is NOTHING:
            delattr(holder, step[1:])
        elif is_slot(holder, step[1:]):
            object.__setattr__(holder, step[1:], value)
        elif attributes is not None:
            attributes[step[1:]] = value
        else:
            setattr(holder, step[1:], value)
    elif step == ALL:
        if is_container(holder):
            raw.refill(holder, value)
        else:
            holder.clear()
            holder.extend(value) if hasattr(holder, "extend") else holder.update(value)
    elif value is NOTHING:
        del holder[key_of(step)]
    elif is_container(holder):
        raw.put(holder, key_of(step), value)
    else:
        holder[key_of(step)] = value


def own(holder: Any, step: str) -> Any:
    """What one step from a holder finds that is its own and not its class's."""
    attributes = getattr(holder, "__dict__", None)
    if isinstance(holder, (Variables, type)) or not step.startswith(".") or not isinstance(attributes, dict):
        return item(holder, step)
    if is_slot(holder, step[1:]):
        return item(holder, step)
    return attributes.get(step[1:], NOTHING)


def items(container: Any) -> list[tuple[str, Any]]:
    """The elements of a container to which steps lead, each with its step."""
    if not is_container(container) or isinstance(container, (set, frozenset)):
        return []
    pairs = raw.pairs(container) if isinstance(container, dict) else enumerate(raw.elements(container))
    return [(step_to(k), v) for k, v in pairs if told(k)]
