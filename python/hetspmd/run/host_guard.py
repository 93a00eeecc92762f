"""The Python beside a plan's graph, at run time: whether it would make the same graph, and what it leaves
behind.

Before each step the values that the trace read are compared with those of now, as references where nothing
can change them in place; after it, what forward leaves behind is put where it leaves it
(:mod:`hetspmd.trace.host`).
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import Any

import torch

from hetspmd.errors import PlanMismatchError
from hetspmd.run.kept_rows import KeptRows
from hetspmd.run.still import comparison, stays, unchanged
from hetspmd.trace.evaluate import constant_value
from hetspmd.trace.graph import Graph
from hetspmd.trace.host.cached import CALL, cache_of, prepared, results_of
from hetspmd.trace.host.discovery import rediscover
from hetspmd.trace.host.facts import Counter, Host, Read, Write
from hetspmd.trace.host.places import NOTHING, Roots, Variables, item, own, put, text
from hetspmd.trace.host.plain import MISSING, fingerprint, outline, same_function, tensors_in
from hetspmd.trace.host.templates import from_text

_KINDS = {"float64": float, "int64": int}
_DEFAULTS = {".__defaults__", ".__kwdefaults__"}
"""Holders of a function that others may replace, and that are not read themselves."""


class Guard:
    """What one trace found of Python, on one model. ``own_outputs`` is the number of outputs that are the
    model's own. ``once``: it serves the step for which it was traced and no other. ``given``: the plan may be of
    other code than the model here, which is another check's business. ``told``: see
    :class:`hetspmd.run.kept_rows.KeptRows`."""

    def __init__(
        self,
        graph: Graph,
        roots: Roots,
        device: torch.device,
        own_outputs: int,
        *,
        once: bool = False,
        from_plan: bool = False,
        told: set[str] | None = None,
    ) -> None:
        self.host: Host = graph.host
        self.once = once
        self._roots, self._device, self._own = roots, device, own_outputs
        self._rows = KeptRows(graph, own_outputs, told)
        self._constants = [constant_value(graph, c, device) for c in graph.left_behind]
        self._number_kinds = {(n.root, n.path): _KINDS[n.kind] for n in graph.host.numbers}
        self._blocker: Read | None = None
        self._same: list[tuple[dict[str, Any], str, Any]] = []
        self._equal: list[tuple[Callable[[], Any], Callable[[Any], bool]]] = []
        self._bound = False
        self._functions: dict[Read, FunctionType] = {}
        self._kept: dict[Read, Callable[[Any], bool]] = {}
        self._calls_due = True
        with self._looking():
            reads = map(self._adopted, self.host.reads) if from_plan else self.host.reads
            self.host = replace(self.host, reads=tuple(sorted(reads, key=_is_call)))
            self.holds()

    def holds(self) -> bool:
        """Whether everything that forward reads is as it was when it was traced. Cached functions are called last:
        where all else is as it was, the forward calls them."""
        if self._blocker is not None and not self._is_same(self._blocker):
            return False
        if self._bound and self._blocker is None and self._as_bound():
            return self._numbers_fit()
        self._look_again()
        other = next((read for read in self.host.reads if not self._is_same(read)), None)
        self._blocker = other if other is None or not _is_call(other) else None
        if other is not None:
            return False
        self._bind()
        return self._numbers_fit()

    def unbind(self) -> None:
        """Look up all values anew at the next comparison."""
        self._blocker, self._bound = None, False

    def _look_again(self) -> None:
        """Find the variables of functions that stand in the place of those that were known."""
        for read, function in self._functions.items():
            if self._roots.value(read.root, read.path) is not function:
                rediscover(self._roots)
                return

    def on(self, roots: Roots) -> Guard:
        """The same of another model, in which nothing has been looked at yet."""
        twin = copy.copy(self)
        twin._roots, twin._blocker, twin._bound = roots, None, False
        twin._same, twin._equal, twin._functions, twin._kept = [], [], {}, {}
        return twin

    def differences(self) -> list[tuple[Read, Any]]:
        """The reads whose values are others now, with these values."""
        with self._looking():
            return [
                (read, self._roots.value(read.root, read.path))
                for read in self.host.reads
                if not self._is_same(read)
            ]

    def values(self) -> list[tuple[str, str, str]]:
        """Of each value that was read its name, what it was and what it is."""
        with self._looking():
            return [(text(r.root, r.path), r.value, self._now(r)) for r in self.host.reads]

    def numbers(self) -> list[torch.Tensor]:
        """The numbers of the model that are inputs of the graph."""
        return [
            torch.tensor(self._roots.value(n.root, n.path), dtype=getattr(torch, n.kind), device=self._device)
            for n in self.host.numbers
        ]

    def leave(self, outputs: Sequence[torch.Tensor | None]) -> None:
        """Put what forward leaves behind where it leaves it; ``outputs`` are all of the step's, by
        position."""

        def tensor(number: int) -> Any:
            if number < 0:
                return self._constants[-1 - number]
            value = outputs[self._own + number] if self._own + number < len(outputs) else None
            if value is None:
                raise LookupError
            return value if self.host.kept[number] else value.detach()

        if self._calls_due:
            self._calls_due = False
            for read in filter(_is_call, self.host.reads):
                self._roots.value(read.root, read.path)
        self._rows.look(outputs)
        for write in self.host.writes:
            try:
                value = NOTHING if write.removed else from_text(write.value, tensor)
            except LookupError:  # outputs other than the loss were said not to be needed
                continue
            if (kind := self._number_kinds.get((write.root, write.path))) is not None:
                value = kind(value)
            holder = self._holder(write)
            if own(holder, write.path[-1]) is not value:
                put(holder, write.path[-1], value)
        for counter in self.host.counters:
            holder = self._holder(counter)
            put(holder, counter.path[-1], item(holder, counter.path[-1]) + counter.step)

    @contextmanager
    def _looking(self) -> Iterator[None]:
        """Around a look at values that is no step: cached functions are left as they are."""
        called = (
            cache_of(self._roots.value(*place))
            for place in dict.fromkeys(map(_called, self.host.reads))
            if place
        )
        before = {id(f): (f, frozenset(results_of(f))) for f in called if f is not None}
        try:
            yield
        finally:
            for function, keys in before.values():
                table = results_of(function)
                for key in table.keys() - keys:
                    del table[key]

    def _holder(self, effect: Write | Counter) -> Any:
        """What forward leaves something in. Raises PlanMismatchError if there is none here."""
        holder = self._roots.holder(effect.root, effect.path)
        if holder is NOTHING or (isinstance(effect, Counter) and item(holder, effect.path[-1]) is NOTHING):
            raise PlanMismatchError(
                f"forward changes {text(effect.root, effect.path)}, which the model does not have here; give every "
                "rank's model the same attributes, hooks and functions, at the same time"
            )
        return holder

    def _adopted(self, read: Read) -> Read:
        """A read, of a function that of the model here."""
        now = self._now(read)
        return (
            replace(read, value=now)
            if any(read.value.startswith(kind) and now.startswith(kind) for kind in ("function ", "code "))
            else read
        )

    def _now(self, read: Read) -> str:
        value = self._roots.value(read.root, read.path)
        if value is NOTHING:
            return MISSING
        return outline(value) if _gives_tensors(read, value) else fingerprint(value)

    def _is_same(self, read: Read) -> bool:
        """Whether a value is as it was read. What a function does is known since it was first seen here, and what
        tensors a cached function gives."""
        if self._now(read) != read.value:
            return False
        kept = self._kept.get(read)
        if kept is not None and not kept(self._roots.value(read.root, read.path)):
            return False
        function = self._functions.get(read)
        return function is None or same_function(function, self._roots.value(read.root, read.path))

    def _numbers_fit(self) -> bool:
        return all(type(self._roots.value(n.root, n.path)) is _KINDS[n.kind] for n in self.host.numbers)

    def _as_bound(self) -> bool:
        for attributes, name, value in self._same:
            if attributes.get(name, NOTHING) is not value:
                return False
        return all(equal(read()) for read, equal in self._equal)

    def _bind(self) -> None:
        """Remember the values, which are the right ones, so that the next comparison is a quick one."""
        modules = {
            read.root.removeprefix("globals ") for read in self.host.reads if read.root.startswith("globals ")
        }
        self._same = [(sys.modules, name, sys.modules[name]) for name in sorted(modules & sys.modules.keys())]
        self._equal = []
        for read in self.host.reads:
            holder, step = self._roots.holder(read.root, read.path), read.path[-1] if read.path else ""
            value = item(holder, step)
            if isinstance(value, FunctionType):
                self._functions[read] = value
            attributes = holder.of if isinstance(holder, Variables) else getattr(holder, "__dict__", None)
            unchanging = stays(value)
            if unchanging and isinstance(attributes, dict) and attributes.get(step[1:], NOTHING) is value:
                self._same.append((attributes, step[1:], value))
            else:
                reader = (
                    partial(self._roots.value, read.root, read.path)
                    if _DEFAULTS & set(read.path[:-1])
                    else _reader(holder, step)
                )
                if _gives_tensors(read, value):
                    self._kept.setdefault(read, unchanged(value))
                self._equal.append((reader, self._kept.get(read) or comparison(value, read.value)))
        self._bound = True


def _is_call(read: Read) -> bool:
    """Whether a read calls a cached function."""
    return any(step.startswith(CALL) for step in read.path)


def _gives_tensors(read: Read, value: Any) -> bool:
    """Whether a read is of what a call of a cached function gives, and that is tensors, or of a buffer that feeds
    one."""
    if isinstance(value, torch.Tensor) and read.value == outline(value):
        return True
    return bool(read.path) and read.path[-1].startswith(CALL) and bool(tensors_in(value))


def _called(read: Read) -> tuple[str, tuple[str, ...]] | None:
    """Where the cached function lies that a read calls, None if it calls none."""
    at = next((n for n, step in enumerate(read.path) if step.startswith(CALL)), 0)
    return (read.root, read.path[:at]) if at else None


def _result(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception:  # a function may raise anything
        return NOTHING


def _reader(holder: Any, step: str) -> Callable[[], Any]:
    if step.startswith(CALL) and cache_of(holder) is not None:
        return partial(_result, prepared(holder, step))
    if step.startswith(".") and not isinstance(holder, Variables):
        return partial(getattr, holder, step[1:], NOTHING)
    return partial(item, holder, step)
