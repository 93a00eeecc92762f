"""A schedule for people: the order in which the steps of a plan run, where collectives are read, what is saved.

::

    forward
        0  e1 = Parameter-Shard(0)
        4  start All-Gather(e1, 0)                      first read by 6
        6  e3 = mm(e2, e1)
    saved for the backward
       e3 | shard(0)

Numbers are those of the entries, counted through both graphs. A collective is started at its line and waited for
where its result is first read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from hetspmd.codec.quantities import quantity_text
from hetspmd.placement import REPLICATE, placement_text
from hetspmd.plan.plan import Plan
from hetspmd.program.buckets import transfer_text
from hetspmd.program.dataflow import Key, Values
from hetspmd.program.program import Compute
from hetspmd.program.schedule import Places, scheduled
from hetspmd.report.notation import step_text, tensor_text

_CALL = 56

_HOW = {
    "value": "",
    "mask": "by rank 0 alone, for its mask",
    "slice": "a copy of the slice",
}


def schedule_text(plan: Plan) -> str:
    """The schedule of a plan, one entry per line. Of a plan across machines it is that between machines."""
    schedule = plan.schedule
    groups = "1 group" if schedule.prefetch_distance == 1 else f"{schedule.prefetch_distance} groups"
    buckets = f"buckets of at most {quantity_text(schedule.bucket_bytes, 'bytes')}"
    if not schedule.bucket_bytes:
        buckets = "no buckets"
    lines = [f"Schedule: gathers {groups} ahead; {buckets}", "forward"]
    values = Values.of(plan.graph, plan.program)
    lines += _entries(plan, values, "forward", 0)
    if schedule.backward:
        lines.append("backward")
        lines += _entries(plan, values, "backward", len(schedule.forward))
    if schedule.saved:
        lines.append("saved for the backward")
    for saved in schedule.saved:
        value = f"{tensor_text(saved.tensor)} | {placement_text(saved.form)}"
        nbytes = quantity_text(plan.graph.tensors[saved.tensor].nbytes, "bytes")
        said = ", ".join(filter(None, (f"{nbytes} whole", _HOW[saved.how])))
        lines.append(f"       {value:<{_CALL}}  # {said}")
    return "\n".join(lines)


def schedule_document(plan: Plan) -> dict[str, Any]:
    """``forward`` and ``backward`` (lists of entries, each a list of places in ``program``; several share a
    bucket), ``saved`` (``tensor``, ``placement``, ``how``), ``prefetch_distance`` and ``bucket_bytes``."""
    schedule = plan.schedule
    return {
        "forward": [list(places) for places in schedule.forward],
        "backward": [list(places) for places in schedule.backward],
        "saved": [
            {"tensor": tensor_text(s.tensor), "placement": placement_text(s.form), "how": s.how}
            for s in schedule.saved
        ],
        "prefetch_distance": schedule.prefetch_distance,
        "bucket_bytes": schedule.bucket_bytes,
    }


def _entries(plan: Plan, values: Values, graph_name: str, first: int) -> Iterator[str]:
    """A line an entry of the forward or the backward, whose first one has the number ``first``."""
    entries: Sequence[Places] = getattr(plan.schedule, graph_name)
    graph, program = plan.graph, plan.program
    readers: dict[int, list[tuple[int, Key]]] = {}
    for at, places in enumerate(entries):
        for tensor, form in chain.from_iterable(values.reads[place] for place in places):
            readers.setdefault(tensor, []).append((at, (tensor, form)))
    names = [tensor_text(t) for t in range(len(graph.tensors))]
    for at, places in enumerate(entries):
        step = scheduled(program, places)
        if isinstance(step, Compute):
            yield f"  {first + at:>4} {step_text(graph, step)[0]}"
            continue
        read = [
            reader
            for place in places
            for tensor, form in values.writes[place]
            for reader, key in readers.get(tensor, ())
            if reader > at and form in (key[1], REPLICATE)
        ]
        said = f"first read by {first + min(read)}" if read else f"waited for at the end of the {graph_name}"
        kind = "" if len(places) == 1 else f"a bucket of {len(places)}, "
        yield f"  {first + at:>4} {'start ' + transfer_text(step, names):<{_CALL}}  # {kind}{said}"
