"""Whether what a plan file says of the Python beside its graph can be: places, templates, and the tensors
they name."""

from __future__ import annotations

from typing import Any

from hetspmd.errors import PlanError
from hetspmd.trace.graph import Graph
from hetspmd.trace.host.cached import is_call
from hetspmd.trace.host.templates import numbers_in


def check_host(graph: Graph) -> None:
    """Raise PlanError, naming the place, unless the graph's host and what it leaves behind are in order."""
    host = graph.host
    for kind, places in (
        ("reads", host.reads),
        ("writes", host.writes),
        ("counters", host.counters),
        ("numbers", host.numbers),
    ):
        for place in places:
            _place(kind, place)
    for counter in host.counters:
        if isinstance(counter.step, bool):
            raise _fail("counters", "count by true or false")
    inputs = {i.tensor for i in graph.inputs if i.leaf == -1}
    numbers = [n.tensor for n in host.numbers]
    if sorted(numbers) != sorted(inputs) or any(n.kind not in ("int64", "float64") for n in host.numbers):
        raise _fail("numbers", "are not inputs of the graph")
    if len(host.kept) > len(graph.outputs):
        raise _fail("kept", f"tells of {len(host.kept)} outputs, the graph has {len(graph.outputs)}")
    for write in host.writes:
        try:
            named = numbers_in(write.value)
        except (ValueError, TypeError, RecursionError, AttributeError) as error:
            raise _fail("writes", f"holds a value that cannot be read ({error})") from error
        for number in named:
            if type(number) is not int or not -len(graph.left_behind) <= number < len(host.kept):
                raise _fail("writes", f"names tensor {number!r}, which is not left behind")


def _place(kind: str, place: Any) -> None:
    steps_fit = all((len(step) > 1 and step[0] in ".[") or is_call(step) for step in place.path)
    if not place.path or not steps_fit or place.root.partition(" ")[0] not in _ROOTS:
        raise _fail(kind, f"names the place {place.root!r} {list(place.path)}, which there cannot be")


_ROOTS = ("model", "loss", "class", "globals", "closure", "function", "torch")


def _fail(where: str, problem: str) -> PlanError:
    return PlanError(f"the plan's graph is damaged: its {where} {problem}; compile the plan again")
