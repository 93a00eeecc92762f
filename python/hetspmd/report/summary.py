"""What was decided and what it costs, for people: what ``print(plan)`` and ``hetspmd compile`` show."""

from __future__ import annotations

from hetspmd.cluster.collective_kinds import KINDS
from hetspmd.cluster.machines import device_word
from hetspmd.codec.quantities import quantity_text, seconds_text
from hetspmd.codec.tables import counted, shortened, table
from hetspmd.cost.step import idle_seconds
from hetspmd.placement import is_sharded, sharded_dim
from hetspmd.plan.plan import Plan
from hetspmd.plan.plan_facts import by_kind, rows_of_turns, segment_modules, sent, storage, transfers
from hetspmd.program.micro_batches import MicroBatches
from hetspmd.program.program import communication_text
from hetspmd.report.limits import limits, limits_text
from hetspmd.report.machine_report import inside_text
from hetspmd.report.measured_report import measured_text
from hetspmd.report.notation import tensor_text
from hetspmd.report.recomputing import recomputing_text
from hetspmd.report.zero_text import zero_text

_MOST_COLLECTIVES = 12
"""Collectives of a table: the dearest, on one screen."""
_ROUNDING_PART = 1e-9
"""The part of the seconds of all stages: what the two simulations may differ by where nothing overlaps."""


def plan_text(plan: Plan) -> str:
    """Cluster, ratios, parameters, collectives, cost beside the baselines, how good the search was, and what limits
    the step."""
    parts = [_cluster(plan), _devices(plan), _parameters(plan), _collectives(plan), _cost(plan)]
    if plan.inside is not None:
        parts.insert(2, inside_text(plan))
    if plan.batches is not None:
        parts.insert(1, f"{_micro_batches(plan, plan.batches)}. {zero_text(plan)}")
    if plan.cluster.steps:
        parts.insert(1, measured_text(plan))
    if plan.graph.recomputed:
        parts.insert(-2, recomputing_text(plan))
    return "\n\n".join([*parts, limits_text(plan, limits(plan))])


def _bytes(value: float) -> str:
    return quantity_text(value, "bytes")


def _cluster(plan: Plan) -> str:
    body = "\n".join("  " + line for line in str(plan.cluster).splitlines())
    return f"Cluster of {counted(plan.world, 'device')}\n{body}"


def _micro_batches(plan: Plan, batches: MicroBatches) -> str:
    """How the samples are divided in time."""
    once = sum(phase != "in" for phase in batches.loop.phases)
    if batches.own_turns:
        said = (
            f"Micro-batches: {batches.count} at most. No device waits for another one in the loop, and each takes "
            "its samples in turns of its own"
        )
    else:
        rows = sorted({batches.turns.units[axis] for axis in batches.loop.axes})
        sizes = "; ".join(", ".join(map(str, units)) for units in rows)
        said = f"Micro-batches: {batches.count}, of {sizes} samples, one after the other"
    return (
        f"{said}. {counted(len(batches.summed), 'tensor')} are summed over them, and "
        f"{counted(once, 'instruction')} run once, outside of the loop"
    )


def _devices(plan: Plan) -> str:
    cost, word = plan.cost, device_word(plan.cluster)
    several = plan.segment_shares if len(plan.ratios) > 1 else ()
    turns = {rank: f"{len(rows)} x {max(rows)}" for rank, rows in rows_of_turns(plan).items()}
    rows = [
        [
            str(rank),
            device.name,
            f"{100 * share:.1f} %" if rank in plan.active else "idle",
            *(f"{100 * row[rank]:.1f} %" if rank in plan.active else "" for row in several),
            *((turns.get(rank, ""),) if turns else ()),
            seconds_text(cost.per_device_compute[rank]),
            _bytes(cost.memory_bytes[rank]),
        ]
        for rank, (device, share) in enumerate(zip(plan.cluster.devices, plan.shares, strict=True))
    ]
    names = [f"segment {s}" for s in range(len(several))]
    header = [word, "device", "share", *names, *(["turns"] if turns else []), "computes", "peak memory"]
    text = "Sharding ratios\n" + table(header, rows, right=tuple(range(2, len(header))))
    for s, (first, last) in enumerate(segment_modules(plan.graph)[: len(several)]):
        text += f"\n  segment {s}: {first or 'the model'} to {last or 'the model'}"
    if plan.idle:
        seconds = idle_seconds(plan.graph, plan.program, plan.cluster, plan.active)
        text += (
            f"\n  idle devices hold no parameters and compute nothing; sending them the results takes "
            f"{seconds_text(seconds)}"
        )
    for rank, (device, needed) in enumerate(zip(plan.cluster.devices, cost.memory_bytes, strict=True)):
        if needed > device.memory:
            text += f"\n  {word} {rank} needs {_bytes(needed)} and has {_bytes(device.memory)}"
    return text


def _parameters(plan: Plan) -> str:
    groups = storage(plan)
    total = sum(g.nbytes for g in groups)
    count = sum(g.count for g in groups)
    title = f"Parameters: {count} tensors, {_bytes(total)}"
    if all(not is_sharded(g.form) for g in groups):
        return f"{title}, all replicated"
    rows = [
        [
            g.pattern,
            str(g.count),
            _shape(g.shapes),
            f"dim {sharded_dim(g.form)}: {' + '.join(map(str, g.extents))}"
            if is_sharded(g.form)
            else "replicated",
            _bytes(g.nbytes),
        ]
        for g in groups
    ]
    return title + "\n" + table(["name", "count", "shape", "stored", "bytes"], rows, right=(1, 4))


def _shape(shapes: tuple[tuple[int, ...], ...]) -> str:
    if len(shapes) > 1:
        return f"{len(shapes)} shapes"
    return "x".join(map(str, shapes[0])) or "scalar"


def _collectives(plan: Plan) -> str:
    collectives = sent(plan)
    if not collectives:
        return "Collectives: none"
    rows = [
        [KINDS[kind].text, str(count), _bytes(nbytes), seconds_text(seconds)]
        for kind, count, nbytes, seconds in by_kind(collectives)
    ]
    times = transfers(plan)
    shared = (
        f", in {times} transfers: small ones share buckets of up to {_bytes(plan.costs.bucket_bytes)}"
        if times < len(collectives)
        else ""
    )
    ahead = plan.schedule.prefetch_distance
    early = f"; parameters are gathered {ahead} groups ahead" if ahead > 1 else ""
    text = f"Collectives: {len(collectives)}{shared}{early}\n" + table(
        ["kind", "count", "bytes", "seconds"], rows, right=(1, 2, 3)
    )
    dearest = sorted(collectives, key=lambda c: (-c.seconds, c.position))[:_MOST_COLLECTIVES]
    top = [
        [
            communication_text(c.step, tensor_text(c.step.tensor)),
            shortened(c.role, 56),
            _bytes(c.nbytes),
            seconds_text(c.seconds),
        ]
        for c in dearest
    ]
    title = "The dearest" if len(collectives) > _MOST_COLLECTIVES else "Each of them"
    return text + f"\n\n{title}\n" + table(["collective", "of", "bytes", "seconds"], top, right=(2, 3))


def _cost(plan: Plan) -> str:
    cost, search = plan.cost, plan.search
    rows = [["this program", seconds_text(cost.step_seconds), ""]]
    rows += [
        [
            name.replace("_", " "),
            seconds_text(seconds),
            "does not fit"
            if name in plan.over_memory
            else f"{seconds / cost.step_seconds:.2f}x"
            if cost.step_seconds
            else "",
        ]
        for name, seconds in sorted(plan.baselines.items())
    ]
    overlap = cost.stage_seconds - cost.step_seconds
    if abs(overlap) <= _ROUNDING_PART * cost.stage_seconds:
        overlap = 0.0
    lines = [
        f"Predicted step: {seconds_text(cost.step_seconds)}; {seconds_text(cost.compute_seconds)} computation + "
        f"{seconds_text(cost.communication_seconds)} communication in {counted(cost.stages, 'stage')}, "
        f"of which {seconds_text(overlap)} overlap",
        table(["in the same cost model", "seconds", "slower"], rows, right=(1, 2)),
        f"Search: cost {seconds_text(search.cost)}, lower bound {seconds_text(search.lower_bound)}, gap "
        f"{100 * search.gap:.2g} %, stopped: {search.stop_reason}, "
        f"{counted(search.expansions, 'expansion')}, {counted(len(plan.iterations), 'round')} with the ratios",
    ]
    return "\n".join(lines)
