"""What the accelerators of machines do of a plan across them, for people and as JSON."""

from __future__ import annotations

from typing import Any

from hetspmd.cluster.machines import accelerator
from hetspmd.codec.quantities import quantity_text, seconds_text
from hetspmd.codec.tables import table
from hetspmd.lower.lowering import nested_of, turns_of
from hetspmd.plan.plan import Plan
from hetspmd.program.levels import Both, NestedStep, between, within


def inside_text(plan: Plan) -> str:
    """Accelerators, their memory, and collectives inside."""
    inside = inside_document(plan)
    if inside is None:
        return ""
    rows = []
    for rank, device in enumerate(plan.cluster.devices):
        machine, held = device.machine, inside["memory_bytes"][rank]
        rows.append(
            [
                str(rank),
                device.name,
                str(inside["accelerators"][rank]),
                "" if machine is None else quantity_text(machine.inside.bandwidth, "bytes/s"),
                quantity_text(held, "bytes"),
                quantity_text(accelerator(device).memory, "bytes"),
            ]
        )
    header = ["device", "name", "accelerators", "inside", "peak memory of each", "of"]
    seconds = seconds_text(inside["seconds"])
    in_each = f". {inside['in_loop']} collectives run in each micro-batch" if plan.batches is not None else ""
    return (
        "Across machines, data parallel inside in even shares\n"
        f"{table(header, rows, right=(2, 3, 4, 5))}\n"
        f"  {inside['across']} collectives between machines in {inside['transfers']} transfers of three steps, "
        f"{inside['inside']} inside in {inside['inside_transfers']}; {inside['alike']} of {inside['computed']} ops "
        f"run alike on all accelerators of a machine; both add {seconds}{in_each}"
    )


def _steps(plan: Plan) -> tuple[tuple[NestedStep, ...], tuple[NestedStep, ...]]:
    """What each accelerator does, and what of that it does in each micro-batch."""
    if plan.batches is None:
        nested = nested_of(plan)
        return (*nested.forward, *nested.backward), ()
    turns, _ = turns_of(plan, plan.batches)
    return (*turns.before, *turns.turn, *turns.after), turns.turn


def inside_document(plan: Plan) -> dict[str, Any] | None:
    """Per device ``accelerators`` and ``memory_bytes`` of one of them; ``seconds`` that they add to the step;
    numbers of collectives ``across``, of the ``transfers`` that carry them (small ones share buckets), of those
    ``inside`` and of their ``inside_transfers``, of both ``in_loop`` that run in each micro-batch, of ops that are
    ``computed``, and that all accelerators compute ``alike``. None for a plan that is not across machines."""
    if plan.inside is None:
        return None
    steps, in_loop = _steps(plan)
    computed = [s for s in steps if isinstance(s, Both) and not plan.theory.rules[s.instruction].alias]
    return {
        "accelerators": list(plan.cluster.accelerators),
        "memory_bytes": list(plan.inside.memory_bytes),
        "seconds": plan.inside.seconds,
        "in_loop": sum(len(between(s)) + len(within(s)) for s in in_loop),
        "across": sum(len(between(s)) for s in steps),
        "transfers": sum(bool(between(s)) for s in steps),
        "inside": sum(len(within(s)) for s in steps),
        "inside_transfers": sum(bool(within(s)) for s in steps),
        "computed": len(computed),
        "alike": sum(s.inner.factor is None and s.inner.name == "always" for s in computed),
    }
