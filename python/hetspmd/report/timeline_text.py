"""A simulated step for people (who waits for whom) and for trace viewers (Chrome trace JSON)."""

from __future__ import annotations

import json
from typing import Any

from hetspmd.codec.quantities import seconds_text
from hetspmd.codec.tables import shortened, table
from hetspmd.cost.timeline import Stream, Timeline, Transfer
from hetspmd.plan.plan_facts import tensor_roles
from hetspmd.program.program import Communicate

_BAR_CHARACTERS = 32
"""Characters of a bar, beside which a line has room for its numbers."""
_MOST_WAITS = 8
"""Waits of a table: the longest, on one screen."""
THREADS: dict[Stream, int] = {"compute": 0, "waiting": 0, "communication": 1}


def timeline_text(timeline: Timeline) -> str:
    """Step time with and without overlap, what each device does with it, and the dearest waits."""
    return "\n\n".join([_headline(timeline) + "\n" + _devices(timeline), _waits(timeline)])


def chrome_trace(timeline: Timeline) -> str:
    """The trace viewers' JSON: one process per device, its compute (with waits) and communication stream as
    threads, complete events in microseconds."""
    entries: list[dict[str, Any]] = []
    for rank, name in enumerate(timeline.devices):
        idle = "" if rank in timeline.active else " (idle)"
        entries += process_entries(rank, name + idle)
    sources = {i.name: i.source for i in timeline.graph.instructions}
    roles = collective_roles(timeline)
    for event in timeline.events:
        computes = event.stream == "compute"
        of = sources[event.name] if computes else roles[event.name]
        turn = "" if event.turn is None else f" (turn {event.turn + 1})"
        entry: dict[str, Any] = {
            "ph": "X",
            "pid": event.device,
            "tid": THREADS[event.stream],
            "cat": event.stream,
            "name": f"wait for {event.name}" if event.stream == "waiting" else event.name + turn,
            "ts": event.start * 1e6,
            "dur": (event.end - event.start) * 1e6,
        }
        entries.append({**entry, "args": {"of": of}} if of else entry)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": entries}, separators=(",", ":"))


def process_entries(rank: int, name: str) -> list[dict[str, Any]]:
    """A device as a process of two threads."""
    return [
        _named("process_name", rank, 0, f"rank {rank}: {name}"),
        _named("process_sort_index", rank, 0, rank),
        _named("thread_name", rank, 0, "compute"),
        _named("thread_name", rank, 1, "communication"),
    ]


def _named(what: str, rank: int, thread: int, value: str | int) -> dict[str, Any]:
    key = "sort_index" if what.endswith("sort_index") else "name"
    return {"ph": "M", "pid": rank, "tid": thread, "name": what, "args": {key: value}}


def collective_roles(timeline: Timeline) -> dict[str, str]:
    """Collective name to what its tensor is in the model's own terms."""
    roles = tensor_roles(timeline.graph)
    return {
        t.name: roles[t.step.tensor] if isinstance(t.step, Communicate) else "" for t in timeline.transfers
    }


def _headline(timeline: Timeline) -> str:
    step, stages = timeline.step_seconds, timeline.stage_seconds
    saved = f", {100 * (1 - step / stages):.0f} % less than without overlap" if 0 < step < stages else ""
    return (
        f"Two streams: {seconds_text(step)} a step{saved} ({seconds_text(stages)} in the stage model), forward "
        f"until {seconds_text(timeline.forward_seconds)}, communication stream busy for "
        f"{seconds_text(timeline.communication_seconds)}"
    )


def _devices(timeline: Timeline) -> str:
    rows = []
    for rank, name in enumerate(timeline.devices):
        if rank not in timeline.active:
            rows.append([str(rank), name, "idle", "", "", "", "", ""])
            continue
        compute, exposed = timeline.compute_seconds[rank], timeline.exposed_seconds[rank]
        others = timeline.waits_for[rank]
        most = max(range(len(others)), key=others.__getitem__)
        step = timeline.step_seconds
        rows.append(
            [
                str(rank),
                name,
                seconds_text(compute),
                seconds_text(exposed),
                seconds_text(sum(others)),
                f"rank {most}" if others[most] > 0 else "",
                _bar(compute, exposed, sum(others), step),
                f"{100 * compute / step:.0f} %" if step else "",
            ]
        )
    header = ["rank", "device", "computes", "waits for transfers", "for devices", "mostly", "", "busy"]
    legend = "  # computes   - waits for a transfer   . waits for a device   (blank: has finished)"
    return table(header, rows, right=(2, 3, 4, 7)) + "\n" + legend


def _bar(compute: float, exposed: float, others: float, step: float) -> str:
    """The step's seconds in ``_BAR_CHARACTERS``, each boundary rounded to the nearest."""
    if step <= 0:
        return ""
    width = _BAR_CHARACTERS
    ends = [
        round(width * min(1.0, s / step)) for s in (compute, compute + exposed, compute + exposed + others)
    ]
    return "|" + ("#" * ends[0] + "-" * (ends[1] - ends[0]) + "." * (ends[2] - ends[1])).ljust(width) + "|"


def _waits(timeline: Timeline) -> str:
    waits = sorted((t for t in timeline.transfers if t.waited > 0), key=lambda t: -t.waited)
    if not waits:
        return "No device waits for a collective"
    roles = collective_roles(timeline)
    rows = [
        [
            shortened(t.name, 40),
            shortened(roles[t.name], 44),
            seconds_text(t.end - t.start),
            seconds_text(t.waited),
            _cause(timeline, t),
        ]
        for t in waits[:_MOST_WAITS]
    ]
    header = ["collective", "of", "takes", "waited", "begins when"]
    title = (
        f"Waits, summed over devices (the longest of {len(waits)})" if len(waits) > _MOST_WAITS else "Waits"
    )
    return f"{title}\n" + table(header, rows, right=(2, 3))


def _cause(timeline: Timeline, transfer: Transfer) -> str:
    """Why a collective does not begin sooner: the stream is busy, or a device is the last to issue it."""
    if transfer.start > transfer.ready:
        return f"the stream is free, {seconds_text(transfer.start - transfer.ready)} late"
    late = transfer.ready - transfer.issued
    if late <= 0 or len(timeline.active) == 1:
        return "issued, by all at once"
    return f"rank {transfer.last} issues it, {seconds_text(late)} after the first"
