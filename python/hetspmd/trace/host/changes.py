"""What a forward leaves behind on modules, objects and variables: writes for after each step, or a
refusal."""

from __future__ import annotations

import collections
import inspect
import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path as File
from typing import Any

import torch
from torch import nn

from hetspmd.errors import TraceError
from hetspmd.trace.compat.tensors import is_class_of_trace
from hetspmd.trace.host.facts import Write
from hetspmd.trace.host.foreign import is_installed
from hetspmd.trace.host.places import NOTHING, Path, Roots, text
from hetspmd.trace.host.plain import fingerprint, is_plain, tensors_in
from hetspmd.trace.host.raw import elements, pairs, size
from hetspmd.trace.host.snapshot import OF_TORCH, Change
from hetspmd.trace.host.steps import ALL, leads, spoken, step_to
from hetspmd.trace.host.templates import NoTemplateError, number_of, to_text


class Left:
    """Writes, and the tensors in them in the order of their numbers.

    ``numbers`` are the places where tensors stand for numbers: what is left there becomes a number again.
    """

    def __init__(
        self, roots: Roots, changes: Iterator[Change], numbers: Collection[tuple[str, Path]] = ()
    ) -> None:
        self._roots, self._numbers = roots, frozenset(numbers)
        self.tensors: list[torch.Tensor] = []
        self.writes: dict[tuple[str, Path], Write] = {}
        self.changed: dict[tuple[str, Path], tuple[Any, Any]] = {}
        derived = _derived(roots.model)
        for change in changes:
            if change.instead:
                raise TraceError(
                    f"forward changes {where(roots, change.root, change.path)}, which no plan can do again, in "
                    f"place; {change.instead}"
                )
            if not _of_torch(change, derived):
                for inner in self._inner(change):
                    self._add(inner)

    def _add(self, change: Change) -> None:
        root, path, after = change.root, change.path, change.after
        if _alike(change.before, after):
            return
        self._check_keys(root, path)
        if not self._roots.lasts(root):
            raise TraceError(
                f"forward changes {where(self._roots, root, path)}, which no plan can find again; keep it on a "
                "module of the model, or in a module or class that can be imported"
            )
        if (root, path) in self._numbers and isinstance(after, torch.Tensor):
            self.writes[root, path] = Write(root, path, number_of(self._number(after)))
        elif after is NOTHING:
            self.writes[root, path] = Write(root, path, "null", True)
        else:
            try:
                self.writes[root, path] = Write(root, path, to_text(after, self._number))
            except NoTemplateError as error:
                raise TraceError(
                    f"forward leaves a {error} in {where(self._roots, root, path)}, which cannot be "
                    "put there after a "
                    "step that a plan computes; return it as an output, or keep tensors of it with register_buffer"
                ) from None
        self.changed[root, path] = change.before, after

    def _of_the_trace(self, root: str, key: Any, value: Any) -> bool:
        """Whether a new item of a table by the class of a tensor has nothing that a step could leave behind: an
        object for a class that is there only while the model is traced."""
        if (
            not (isinstance(key, type) and issubclass(key, torch.Tensor))
            or is_plain(value)
            or tensors_in(value)
        ):
            return False
        kind, _, name = root.partition(" ")
        home = sys.modules.get(name) if kind == "globals" else None
        return is_class_of_trace(key) or (home is not None and is_installed(home))

    def _check_keys(self, root: str, path: Path) -> None:
        """Raise TraceError where a plan could not find an item again, because of its key."""
        for depth, step in enumerate(path):
            if not leads(step):
                raise TraceError(
                    f"forward leaves another value under the key {spoken(step)[1:-1]} of "
                    f"{where(self._roots, root, path[:depth])}, and no plan can find a key of that kind again; use "
                    "strings, numbers, tuples of them, enums or dtypes as keys (type(x).__name__ for a class), or "
                    "keep the value as an attribute"
                )

    def _number(self, tensor: torch.Tensor) -> int:
        for index, other in enumerate(self.tensors):
            if other is tensor:
                return index
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def _inner(self, change: Change) -> Iterator[Change]:
        """A change, or those of the items of a container."""
        before, after = change.before, change.after
        if not change.inside:
            yield change
        elif isinstance(before, dict):
            held = dict(pairs(after))
            for key in dict.fromkeys((*before, *held)):
                old, new = before.get(key, NOTHING), held.get(key, NOTHING)
                if old is not new and not (old is NOTHING and self._of_the_trace(change.root, key, new)):
                    yield Change(change.root, (*change.path, step_to(key)), old, new)
        elif isinstance(after, (list, collections.deque)) and len(before) == size(after):
            for index, (old, new) in enumerate(zip(before, elements(after), strict=True)):
                if old is not new:
                    yield Change(change.root, (*change.path, f"[{index}]"), old, new)
        else:
            self._check_elements(change)
            yield Change(change.root, (*change.path, ALL), before, elements(after))

    def _check_elements(self, change: Change) -> None:
        """Raise TraceError where no plan could fill a list, deque or set as forward does: it keeps what was in it
        before the step, or does not say in which order its tensors are."""
        values = [value for value in elements(change.after) if not is_plain(value)]
        ids = {id(value) for value in change.before}
        if not values or (not isinstance(change.after, set) and ids.isdisjoint(map(id, values))):
            return
        name, kind = where(self._roots, change.root, change.path), type(change.after).__name__
        if isinstance(change.after, set):
            raise TraceError(
                f"forward leaves tensors in the {kind} {name}, which has no order; keep them in a list"
            )
        raise TraceError(
            f"forward adds to the {kind} {name} and keeps what the step before has put there, so that it grows or "
            "moves on in every step; return what it collects as an output of forward, or clear it in each step: "
            f"self.{change.path[-1].removeprefix('.')}.clear() at the beginning of forward"
        )


def numbers_of(change: Change) -> list[object]:
    """The numbers of a value that has changed, or of a container's items, if they were numbers before, too."""
    if not change.inside:
        return [change.after] if _is_number(change.before) and _is_number(change.after) else []
    after = change.after
    held = [v for _, v in pairs(after)] if isinstance(after, dict) else elements(after)
    return [value for value in held if _is_number(value)]


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _of_torch(change: Change, derived: set[tuple[Path, str]]) -> bool:
    """Whether a module's attribute is torch's own, or one that torch's own hooks compute anew in every
    step."""
    if change.root != "model" or not change.path[-1].startswith("."):
        return False
    name = change.path[-1][1:]
    return (
        (name in OF_TORCH and name != "training") or "_hooks_" in name or (change.path[:-1], name) in derived
    )


def _derived(model: nn.Module) -> set[tuple[Path, str]]:
    """Attributes that ``weight_norm``, ``spectral_norm`` and ``prune`` derive from parameters by hooks."""
    attributes: set[tuple[Path, str]] = set()
    for path, module in model.named_modules():
        for hook in module._forward_pre_hooks.values():
            if type(hook).__module__.startswith("torch.nn.utils"):
                name = getattr(hook, "name", getattr(hook, "_tensor_name", None))
                attributes.add((tuple(f".{p}" for p in path.split(".") if p), str(name)))
    return attributes


def _alike(before: Any, after: Any) -> bool:
    return (
        is_plain(before)
        and is_plain(after)
        and type(before) is type(after)
        and fingerprint(before) == fingerprint(after)
    )


def where(roots: Roots, root: str, path: Path) -> str:
    """A place with its module's class, and the line of the model that names it."""
    line = line_of(roots, root, path)
    owner = ""
    if root == "model":
        module, rest = owner_of(roots.model, path)
        name = "".join(path[: len(path) - len(rest)]).removeprefix(".")
        owner = f" of module {name} ({type(module).__name__})" if name else f" of {type(module).__name__}"
        name = "".join(map(spoken, rest)).removeprefix(".")
    else:
        name = text(root, path)
    return f"{name}{owner}{f' at {line}' if line else ''}"


def owner_of(model: nn.Module, path: Path) -> tuple[nn.Module, Path]:
    """The innermost module on the way to a place, and the rest of the path."""
    for index, step in enumerate(path):
        inner = model._modules.get(step[1:]) if step.startswith(".") else None
        if inner is None:
            return model, path[index:]
        model = inner
    return model, ()


def line_of(roots: Roots, root: str, path: Path) -> str:
    """``file:line`` where the model's code writes an attribute or variable, or else names it; "" if not found."""
    names = [step[1:] for step in path if step.startswith(".") and step[1:].isidentifier()]
    kinds: list[type] = []
    if root == "model":
        module, rest = owner_of(roots.model, path)
        names = [step[1:] for step in rest if step.startswith(".")]
        kinds = [k for m in (module, *roots.model.modules()) for k in type(m).__mro__]
    if not names:
        return ""
    functions = [
        function
        for kind in dict.fromkeys(kinds)
        if not _is_torch(kind)
        for name, function in sorted(vars(kind).items(), key=lambda item: item[0] != "forward")
        if inspect.isfunction(function) and name != "__init__"
    ]
    functions += [
        f
        for f in (*_functions(roots.model), *roots.functions.values(), roots.loss)
        if inspect.isfunction(f) and f.__name__ != "__init__"
    ]
    name = re.escape(names[0])
    named = rf"\.{name}\b" if root == "model" else rf"\b{name}\b"
    for pattern in (rf"{named}{_WRITES}", named):
        for function in dict.fromkeys(functions):
            if line := _line(function, pattern):
                return line
    return ""


_WRITES = r"\s*(\[[^]]*\]\s*)?(,[^=]*)?([-+*/]?=(?!=)|\.append|\.extend|\.add\b|\.insert)"
"""What follows an attribute in code that writes it."""


def _functions(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        yield from (value for value in vars(module).values() if inspect.isfunction(value))
        yield from (*module._forward_hooks.values(), *module._forward_pre_hooks.values())


def _line(function: Any, pattern: str) -> str:
    try:
        file = inspect.getsourcefile(function) or ""
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError):
        return ""
    for offset, line in enumerate(lines):
        if re.search(pattern, line.partition("#")[0]):
            return f"{file}:{first + offset}"
    return ""


def _is_torch(kind: type) -> bool:
    own = str(File(torch.__file__).parent)
    try:
        return (inspect.getsourcefile(kind) or "").startswith(own)
    except TypeError:
        return True
