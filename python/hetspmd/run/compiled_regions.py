"""``HAP(..., compile=True)``: what lies between two communications of a local graph goes through ``torch.compile``.

A stretch (:mod:`hetspmd.run.stretches`) is of ATen ops here, with the copies that make their operands lie as
the kernels read them, and ``torch.compile`` sees it whole; collectives and other calls that are no ATen ops
stay between. Random numbers are drawn before the stretch that reads them (:mod:`hetspmd.lower.draws`), in the
order in which the graph draws them. So they are given to what is compiled, and nothing of it depends on them.

Stretches compile when they first run. That may take longer than other ranks wait, so they are told
(:meth:`~hetspmd.dist.communicator.Communicator.busy`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx, nn

from hetspmd.dist.random import may_draw
from hetspmd.errors import OptionError
from hetspmd.lower import calls
from hetspmd.lower.emit import take_saved
from hetspmd.rules.kernels import lies_as_compiled
from hetspmd.run.stretches import FREE, TAKEN, Taken, cut
from hetspmd.trace.compat.compilers import compiled_taking
from hetspmd.trace.compat.tensors import is_op

Busy = Callable[[], AbstractContextManager[None]]
Call = Callable[[list[Any]], Any]
"""Computes a stretch: it is given its inputs as a list, which it may empty, and returns its outputs."""
Made = dict[tuple[object, ...], tuple[Call, bool]]
"""What was compiled, by what it computes, of which values, and whether it must be given values that lie so."""
_DRAWING = (calls.noise, calls.draw)
_STRIDE, _DTYPE = torch.Tensor.stride, torch.Tensor.dtype.__get__  # type: ignore[attr-defined]  # a getset descriptor of C


def compile_options(asked: bool | Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments of ``torch.compile``, None where nothing is compiled. Raises OptionError for anything else
    than a bool or a mapping by names, and for names that torch.compile does not have."""
    if isinstance(asked, bool):
        return {} if asked else None
    if isinstance(asked, Mapping) and all(isinstance(key, str) for key in asked):
        parameters = inspect.signature(torch.compile).parameters
        known = [name for name in parameters if name != "model"]
        wrong = [key for key in asked if key not in known]
        if wrong and "kwargs" not in parameters:  # as where somebody has wrapped it
            raise OptionError(
                f"compile={{{wrong[0]!r}: ...}}: torch.compile has no such argument; it has {', '.join(known)}"
            )
        return dict(asked)
    raise OptionError(f"compile is True, False or a dict of torch.compile's arguments, not {asked!r}")


def in_stretches(
    module: fx.GraphModule,
    options: Mapping[str, Any],
    busy: Busy,
    made: Made | None = None,
    *,
    begins: Taken = lambda _: False,
    reads: Taken = lambda _: False,
) -> fx.GraphModule:
    """A copy of a local graph that runs its stretches compiled; ``busy`` surrounds a stretch's first run.

    ``made`` holds what was compiled for stretches of other graphs; ``begins`` and ``reads`` are those of
    :func:`~hetspmd.run.stretches.cut`.
    """
    shared: Made = {} if made is None else made
    name = f"Compiled{type(module).__name__}"
    return cut(
        module,
        name,
        _compiles,
        lambda stretch: _Stretch(stretch, options, busy, shared),
        begins=begins,
        reads=lambda node: node.target in _DRAWING or reads(node),
        takes=True,
    )


class _Stretch(nn.Module):
    """A stretch. One that computes the same as another, of tensors of the same shapes, is compiled with it.

    It is given the list of the saved tensors first, if it takes some. Those go when the compiled stretch has read
    them (:mod:`hetspmd.trace.compat.compilers`), where the compiler does that.
    """

    def __init__(self, graph: fx.GraphModule, options: Mapping[str, Any], busy: Busy, made: Made) -> None:
        super().__init__()
        self._graph, self._options, self._busy, self._made = graph, options, busy, made
        inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
        self._taken: list[int] = [node.meta[TAKEN] for node in inputs if TAKEN in node.meta]
        self._free = bool(graph.graph.output_node().meta[FREE])
        self._call: Call | None = None
        self._like: tuple[list[object], ...] = ()
        """What the inputs are like for which the stretch has been compiled."""

    def forward(self, *given: Any) -> Any:
        values = list(given)
        if self._taken:
            saved = values.pop(0)
            values = [take_saved(saved, place) for place in self._taken] + values
            del saved
        del given
        if self._call is None or not self._fits(values):
            self._compile(values)
        assert self._call is not None
        return self._call(values)

    def _fits(self, values: list[Any]) -> bool:
        """Whether inputs lie as those for which the stretch has been compiled; their shapes are the program's."""
        return not self._like or self._like == _likeness(values)

    def _compile(self, values: list[Any]) -> None:
        """Find or make the compiled stretch for inputs like these."""
        key = _text(self._graph.graph), self._free, *_kinds(values)
        self._like = ()
        if key not in self._made:
            self._made[key] = self._compiled(values)
        self._call, checks = self._made[key]
        if checks:
            self._like = _likeness(values)

    def _compiled(self, values: list[Any]) -> tuple[Call, bool]:
        """What is called for the stretch, and whether inputs must be like those for which it is compiled."""
        with self._busy():
            taking = compiled_taking(self._graph, self._options, values, free=self._free)
        if taking is not None:
            return taking, True
        whole = torch.compile(self._graph, **{"fullgraph": True, "dynamic": False, **self._options})
        return _Whole(whole, self._busy), False


class _Whole:
    """What ``torch.compile`` has returned, which compiles at its first call."""

    def __init__(self, call: Callable[..., Any], busy: Busy) -> None:
        self._call, self._busy, self._first = call, busy, True

    def __call__(self, values: list[Any]) -> Any:
        """The outputs of the stretch."""
        with self._busy() if self._first else nullcontext():
            self._first = False
            return self._call(*values)


def _likeness(values: list[Any]) -> tuple[list[object], ...]:
    return list(map(_STRIDE, values)), list(map(_DTYPE, values))


def _text(graph: fx.Graph) -> str:
    """What a stretch computes, whatever its values are called."""
    places = {node: f"%{place}" for place, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), places.__getitem__)
        lines.append("" if node.op == "placeholder" else f"{node.target} {args} {kwargs}")
    return "\n".join(lines)


def _kinds(values: Sequence[Any]) -> Iterator[object]:
    """Of each value what a compiler looks at, and which other value is the same."""
    first: dict[int, int] = {}
    for place, value in enumerate(values):
        yield first.setdefault(id(value), place)
        if isinstance(value, torch.Tensor):
            yield type(value), value.dtype, value.device, tuple(value.shape), value.stride()
        else:
            yield repr(value)


def _compiles(node: fx.Node) -> bool:
    """Whether a stretch takes a call: of an op that draws no random numbers, as attention without dropout is, or of
    what such ops read their operands through."""
    if is_op(node.target):
        return not may_draw(node.target, node.args, node.kwargs)
    return bool(node.users) and all(
        _compiles(user) and lies_as_compiled(node.target, str(user.target)) for user in node.users
    )
