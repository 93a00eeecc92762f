"""Recorded steps beside the simulated one: for trace viewers, and as text that says where the prediction is off.

All seconds are means over the recorded steps, so that on each device (each accelerator of a machine, beside what is
predicted for the machine)

    step = computes + copies + issues + for transfers + for devices + optimizer + rest

where *copies* are slices, copies and the unpacking of what was received, which the cost model takes for free; waits
are split as :mod:`hetspmd.cost.timeline` splits them, by whether the communication stream carries anything; and
*rest* is what passes between the local graphs: autograd, the caller's own code, the batch.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hetspmd.codec.quantities import seconds_text
from hetspmd.codec.tables import shortened, table
from hetspmd.record.measured import MeasuredSteps
from hetspmd.report.timeline_text import THREADS, collective_roles, process_entries

if TYPE_CHECKING:
    from hetspmd.cost.timeline import Timeline
    from hetspmd.plan.plan import Plan

_MOST_OPS = 12
"""Ops of a table: those that differ most, on one screen."""
_PARTS = ("instruction", "local", "issue", "transfers", "devices", "optimizer")


def chrome_trace(measured: MeasuredSteps) -> str:
    """The layout of :func:`hetspmd.report.timeline_text.chrome_trace`; ``args`` also tell the step's part
    (``what``) and
    when a collective was issued by this rank and completed, in microseconds."""
    entries: list[dict[str, Any]] = []
    active = {device for plan in measured.plans for device in plan.active}
    for rank, (name, device) in enumerate(zip(measured.devices, measured.machines, strict=True)):
        entries += process_entries(rank, name + ("" if device in active else " (idle)"))
    sources = [{i.name: i.source for i in plan.graph.instructions} for plan in measured.plans]
    roles = [_roles(plan) for plan in measured.plans]
    for span in measured.spans:
        waits = span.what == "wait"
        args: dict[str, Any] = {"what": span.what}
        of = (roles if waits else sources)[span.plan].get(span.name, "") if span.plan >= 0 else ""
        if of:
            args["of"] = of
        stream = "waiting" if waits else "compute"
        name = f"wait for {span.name}" if waits else span.name
        entries.append(_complete(span.device, stream, name, span.start, span.end, args))
    for one in measured.carried:
        of = roles[one.plan].get(one.name, "") if one.plan >= 0 else ""
        for rank, (start, end) in one.streams.items():
            seen: dict[str, Any] = {
                "issued": one.issued[rank] * 1e6,
                "completed": one.completed[rank] * 1e6,
            }
            args = {**seen, "of": of} if of else seen
            entries.append(_complete(rank, "communication", one.name, start, end, args))
    document = {"displayTimeUnit": "ms", "traceEvents": entries, "otherData": {"clocks": _clocks(measured)}}
    return json.dumps(document, separators=(",", ":"))


def recording_text(measured: MeasuredSteps) -> str:
    """Measured against simulated, for each plan that ran: by device, by op, by kind of collective."""
    parts = []
    for index, plan in enumerate(measured.plans):
        if any(r.plan == index for r in measured.runs):
            part = _Comparison(measured, index, plan)
            parts += [part.devices(), part.ops(), part.collectives()]
    return "\n\n".join(parts) if parts else "No step was recorded"


def _complete(
    rank: int, stream: Any, name: str, start: float, end: float, args: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": rank,
        "tid": THREADS[stream],
        "cat": stream,
        "name": name,
        "ts": start * 1e6,
        "dur": (end - start) * 1e6,
        "args": dict(args),
    }


def _clocks(measured: MeasuredSteps) -> str:
    if not measured.clock_error:
        return "The ranks share one clock"
    return f"The ranks' clocks agree to {seconds_text(measured.clock_error)}"


def _roles(plan: Plan) -> dict[str, str]:
    return collective_roles(plan.timeline())


def _ratio(measured: float, predicted: float) -> str:
    return f"{measured / predicted:.2f}" if predicted > 0 else ""


class _Comparison:
    """The runs of one plan against its timeline."""

    def __init__(self, measured: MeasuredSteps, index: int, plan: Plan) -> None:
        self.measured, self.index, self.plan = measured, index, plan
        self.timeline: Timeline = plan.timeline()
        graph = plan.graph
        self.op_of = {i.name: i.op for i in graph.instructions}
        self.sources = {i.name for i in graph.instructions if i.is_source}
        forwards = [r.device for r in measured.runs if r.plan == index and r.graph == "forward"]
        self.steps = max(Counter(forwards).values(), default=1)
        self._attribute()

    def _attribute(self) -> None:
        """Seconds by device and part, and the steps' own: from a forward's start to the end of what follows it,
        up to the next forward."""
        self.parts: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self.whole: dict[int, float] = defaultdict(float)
        self.by_op: dict[str, float] = defaultdict(float)
        for rank in range(len(self.measured.devices)):
            runs = [r for r in self.measured.runs if r.device == rank]
            spans = [s for s in self.measured.spans if s.device == rank]
            exposed = self.measured.exposed(rank)
            begins = [r for r in runs if r.graph == "forward"]
            for at, first in enumerate(begins):
                if first.plan != self.index:
                    continue
                stop = begins[at + 1].start if at + 1 < len(begins) else float("inf")
                inside = [s for s in spans if first.start <= s.start < stop]
                last = [r.end for r in runs if first.start <= r.start < stop] + [s.end for s in inside]
                self.whole[rank] += (max(last) - first.start) / self.steps
                for span in inside:
                    if span.what == "wait":
                        carried = exposed(span.start, span.end)
                        self.parts[rank]["transfers"] += carried / self.steps
                        self.parts[rank]["devices"] += (span.end - span.start - carried) / self.steps
                        continue
                    self.parts[rank][span.what] += (span.end - span.start) / self.steps
                    if span.what == "instruction":
                        self.by_op[self.op_of[span.name]] += (span.end - span.start) / self.steps

    def devices(self) -> str:
        """Each device's step in parts, the prediction beneath."""
        timeline = self.timeline
        rows = []
        for rank, name in enumerate(self.measured.devices):
            device = self.measured.machines[rank]
            if device not in self.plan.active:
                rows.append([str(rank), name, "idle", *[""] * 8])
                continue
            mine = [self.parts[rank][part] for part in _PARTS]
            rest = max(0.0, self.whole[rank] - sum(mine))
            values = [self.whole[rank], *mine, rest]
            rows.append([str(rank), name, "measured", *map(seconds_text, values)])
            events = [e for e in timeline.events if e.device == device and e.stream == "compute"]
            steps = sum(e.end - e.start for e in events if e.name in self.sources)
            computes = sum(e.end - e.start for e in events) - steps
            issues = max(0.0, timeline.compute_seconds[device] - computes - steps)
            issues = 0.0 if issues < 1e-12 else issues
            waits = [timeline.exposed_seconds[device], sum(timeline.waits_for[device])]
            predictions = [timeline.end_seconds[device], computes, 0.0, issues, *waits, steps]
            rows.append(["", "", "predicted", *map(seconds_text, predictions), ""])
        header = [
            "rank", "device", "", "step", "computes", "copies", "issues", "for transfers", "for devices",
            "optimizer", "rest",
        ]  # fmt: skip
        count = f"{self.steps} step{'' if self.steps == 1 else 's'}"
        title = f"Measured (mean of {count}) and predicted seconds. {_clocks(self.measured)}"
        return title + "\n" + table(header, rows, right=tuple(range(3, 11)))

    def ops(self) -> str:
        """The ops whose seconds differ the most from the prediction, summed over the devices."""
        predicted: dict[str, float] = defaultdict(float)
        accelerators = Counter(self.measured.machines)
        for event in self.timeline.events:
            if event.stream == "compute" and event.name not in self.sources:
                each = event.end - event.start
                predicted[self.op_of[event.name]] += accelerators[event.device] * each
        ops = sorted({*predicted, *self.by_op}, key=lambda op: (-abs(self.by_op[op] - predicted[op]), op))
        rows = []
        for op in ops[:_MOST_OPS]:
            got, want = self.by_op[op], predicted[op]
            change = seconds_text(abs(got - want))
            sign = "+" if got >= want else "-"
            rows.append([op, seconds_text(got), seconds_text(want), _ratio(got, want), sign + change])
        total, want = sum(self.by_op.values()), sum(predicted.values())
        more = f" (the largest differences of {len(ops)})" if len(ops) > _MOST_OPS else ""
        title = (
            f"Ops, summed over devices{more}: {seconds_text(total)} measured, {seconds_text(want)} predicted"
        )
        return (
            title
            + "\n"
            + table(["op", "measured", "predicted", "ratio", "difference"], rows, right=(1, 2, 3, 4))
        )

    def collectives(self) -> str:
        """Seconds in which collectives of each kind hold the stream (the mean over ranks), and are waited for."""
        carried: dict[str, float] = defaultdict(float)
        waited: dict[str, float] = defaultdict(float)
        counts: dict[str, int] = defaultdict(int)
        for one in self.measured.carried:
            if one.plan == self.index:
                held = [end - start for start, end in one.streams.values()]
                carried[_kind(one.name)] += sum(held) / len(held) / self.steps
                counts[_kind(one.name)] += 1
        for span in self.measured.spans:
            if span.plan == self.index and span.what == "wait":
                waited[_kind(span.name)] += (span.end - span.start) / self.steps
        planned: dict[str, float] = defaultdict(float)
        blocked: dict[str, float] = defaultdict(float)
        for t in self.timeline.transfers:
            if t.step is not None:
                planned[_kind(t.name)] += t.end - t.start
                blocked[_kind(t.name)] += t.waited
        rows = [
            [
                shortened(kind, 24),
                f"{counts[kind] / self.steps:g}",
                *map(seconds_text, (carried[kind], planned[kind], waited[kind], blocked[kind])),
            ]
            for kind in sorted({*carried, *planned}, key=lambda k: (-carried[k], k))
        ]
        if not rows:
            return "No collective was recorded"
        header = ["collectives", "a step", "carried", "predicted", "waited, all devices", "predicted"]
        title = f"Communication stream: busy for {seconds_text(sum(carried.values()))}, "
        title += f"predicted {seconds_text(sum(planned.values()))}"
        return title + "\n" + table(header, rows, right=(1, 2, 3, 4, 5))


def _kind(name: str) -> str:
    return name.partition("(")[0]
