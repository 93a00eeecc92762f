"""What a forward does with the state it leaves, found by rehearsals: runs of its Python on fake tensors
alone.

A number that it increases and does nothing else with is a counter. Each candidate is replaced by a stand-in
that can be added to, and notices whatever else is done to it. A tensor that it leaves where it has read
nothing is tried in that place: a forward that reads it again carries it from step to step, which only
buffers may do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode

from hetspmd.errors import HetspmdError
from hetspmd.trace.compat.trees import flatten
from hetspmd.trace.graph import Graph
from hetspmd.trace.host.facts import Counter
from hetspmd.trace.host.finish import carried
from hetspmd.trace.host.plain import is_container
from hetspmd.trace.host.raw import elements, pairs
from hetspmd.trace.host.recorder import Place
from hetspmd.trace.host.templates import numbers_in
from hetspmd.trace.host.watch import HostWatch

_MOST_COUNTERS = 8
"""Counters that are looked for in one model: each takes a run of its forward."""


class _Noticed(Exception):
    """A stand-in was used for something else than counting."""


class _Counting:
    """Stands for a number that is only added to: ``step`` is what was added."""

    noticed: list[str]
    step: int | float

    def __init__(self, noticed: list[str], step: int | float = 0) -> None:
        object.__setattr__(self, "noticed", noticed)
        object.__setattr__(self, "step", step)

    def __add__(self, other: Any) -> _Counting:
        if type(other) not in (int, float):
            self._notice("added to")
        return _Counting(self.noticed, self.step + other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> _Counting:
        if type(other) not in (int, float):
            self._notice("subtracted from")
        return _Counting(self.noticed, self.step - other)

    def _notice(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        self.noticed.append("used")
        raise _Noticed


def _noticing(self: _Counting, *_args: Any, **_kwargs: Any) -> Any:
    return self._notice()


for _name in (
    "__bool__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__index__", "__int__",
    "__float__", "__complex__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__floordiv__",
    "__rfloordiv__", "__mod__", "__rmod__", "__pow__", "__rpow__", "__rsub__", "__neg__", "__pos__", "__abs__",
    "__round__", "__str__", "__repr__", "__format__", "__divmod__", "__and__", "__or__", "__xor__", "__lshift__",
    "__rshift__", "__invert__", "__getattr__", "__deepcopy__", "__reduce_ex__", "__len__", "__iter__",
):  # fmt: skip
    setattr(_Counting, _name, _noticing)


def settled(graph: Graph, watch: HostWatch, call: Callable[[], Any]) -> Graph:
    """The graph with its counters told from other state. Raises TraceError for tensors that are carried.

    ``call`` runs the forward on fake tensors.
    """
    host, changes = graph.host, watch.state_changes
    assert changes is not None
    counters = []
    for place, (before, after) in list(changes.changed.items())[:_MOST_COUNTERS]:
        if place not in watch.recorder.reads or not _both_numbers(before, after):
            continue
        step = _counted(watch, place, call)
        if step is not None and step == after - before:
            counters.append(Counter(*place, step))
    places = {(c.root, c.path) for c in counters}
    for write in host.writes:
        place = write.root, write.path
        if any(n >= 0 for n in numbers_in(write.value)) and _may_be_read(watch, place):
            after = changes.changed[place][1]
            if isinstance(after, torch.Tensor) and _is_read(watch, place, after, call):
                raise carried(watch, *place)
    if not counters:
        return graph
    host = replace(
        host,
        reads=tuple(r for r in host.reads if (r.root, r.path) not in places),
        writes=tuple(w for w in host.writes if (w.root, w.path) not in places),
        counters=tuple(counters),
    )
    return replace(graph, host=host)


def wants_trials(graph: Graph, watch: HostWatch) -> bool:
    """Whether there is anything to find out: state that forward has read and leaves another value of."""
    assert watch.state_changes is not None
    return any(_may_be_read(watch, place) for place in watch.state_changes.changed)


def _may_be_read(watch: HostWatch, place: Place) -> bool:
    """Whether forward has read what a place held before; of an item it cannot be told."""
    return place in watch.recorder.reads or place[1][-1].startswith("[")


def _both_numbers(before: Any, after: Any) -> bool:
    return all(type(v) in (int, float) for v in (before, after)) and type(before) is type(after)


def _counted(watch: HostWatch, place: Place, call: Callable[[], Any]) -> int | float | None:
    """By how much a run increases a number that it does nothing else with; None if it does."""
    noticed: list[str] = []
    try:
        output, changes = watch.rehearse({place: _Counting(noticed)}, call)
    except (_Noticed, HetspmdError):
        return None
    except Exception:  # what a model does with a number that is none may raise anything
        return None
    number = changes.pop(place, None)
    others = any(_holds(value) for value in changes.values()) or any(map(_holds, flatten(output)[0]))
    if noticed or others or type(number) is not _Counting:
        return None
    step: int | float = object.__getattribute__(number, "step")
    return step


def _is_read(watch: HostWatch, place: Place, like: torch.Tensor, call: Callable[[], Any]) -> bool:
    """Whether a run that finds a tensor at a place reads it."""
    probe = torch.zeros(like.shape, dtype=like.dtype, device="meta")
    watch.recorder.probes[id(probe)] = probe
    use = _Use(probe)
    try:
        with use:
            watch.rehearse({place: probe}, call)
    except Exception:  # a tensor that was read may be unfit for anything
        pass
    finally:
        del watch.recorder.probes[id(probe)]
    return watch.recorder.touched or use.noticed


class _Use(TorchFunctionMode):
    """Notices whether anything is computed of a tensor."""

    def __init__(self, of: torch.Tensor) -> None:
        super().__init__()
        self._of, self.noticed = of, False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = dict(kwargs or {})
        if any(leaf is self._of for leaf in _leaves((*args, *keywords.values()))):
            self.noticed = True
        return func(*args, **keywords)


def _holds(value: Any) -> bool:
    return any(type(v) is _Counting for v in _leaves(value))


def _leaves(value: Any) -> Iterator[Any]:
    if is_container(value):
        for inner in elements(value):
            yield from _leaves(inner)
        for _, inner in pairs(value) if isinstance(value, dict) else ():
            yield from _leaves(inner)
    else:
        yield value
