"""Tensors that cached functions keep (``functools.lru_cache``), where a plan would not have them as one device has.

One device makes such a tensor in the step that asks for it first, and keeps it. A plan computes it in every step,
which is the same for a mask or a table that follows from numbers, and another for what depends on a parameter that
is trained, on a buffer that changes, on the batch or on random numbers. That is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from hetspmd.errors import TraceError
from hetspmd.trace.compat.roles import InputRole, OutputRole
from hetspmd.trace.importer import Draft, instruction_inputs


def check_kept(
    draft: Draft,
    inputs: Sequence[InputRole],
    outputs: Sequence[OutputRole],
    cached_outputs: Mapping[int, str],
    trained: Collection[str],
) -> list[OutputRole]:
    """Take the outputs ``cached_outputs``, by their indices, out of a draft; returns the roles of the others.

    ``trained`` names the parameters that are. Raises TraceError for one that changes from step to step.
    """
    if not cached_outputs:
        return list(outputs)
    written = {role.name for role in outputs if role.kind.endswith("_mutation")}
    changing = {
        value: _spoken(role)
        for value, role in zip(draft.placeholders, inputs, strict=True)
        if role.kind == "input" or role.name.removeprefix("model.") in trained or role.name in written
    }
    for instruction in draft.instructions:
        cause = next((changing[v] for v in instruction_inputs(instruction) if v in changing), None)
        if instruction.random:
            cause = "random numbers"
        if cause is not None:
            changing.update((value, cause) for value in instruction.outputs if value is not None)
    others = []
    results = []
    for value, role in zip(draft.results, outputs, strict=True):
        if role.kind != "output" or role.index not in cached_outputs:
            others.append(role)
            results.append(value)
        elif value in changing:
            raise TraceError(
                f"{cached_outputs[role.index]} keeps its first result (functools.cache), a tensor that depends on "
                f"{changing[value]}: one device computes it once, and a plan would in every step. Leave the cache "
                "out where it has to follow, or compute it once before the model is wrapped and keep it with "
                "register_buffer"
            )
    draft.results[:] = results
    return others


def _spoken(role: InputRole) -> str:
    name = role.name.removeprefix("model.")
    return "the batch" if role.kind == "input" else f"{role.kind} {name}"
