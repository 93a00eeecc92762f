"""Tensors that cached functions keep (``functools.lru_cache``), where a plan would not have them as one device has.

One device makes such a tensor in the step that asks for it first, and keeps it. A plan computes it in every step.
That is the same for a mask or a table that follows from numbers, or from a buffer that stays: whether it has stayed
is looked at before each step. It is another for what depends on a parameter (a frozen one may be moved between
steps), on a buffer that the step changes, on the batch or on random numbers, which is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetspmd.errors import TraceError
from hetspmd.trace.compat.roles import InputRole, OutputRole
from hetspmd.trace.importer import Draft, instruction_inputs


def check_kept(
    draft: Draft,
    inputs: Sequence[InputRole],
    outputs: Sequence[OutputRole],
    cached_outputs: Mapping[int, str],
) -> tuple[list[OutputRole], list[str]]:
    """Take the outputs ``cached_outputs``, by their indices, out of a draft.

    Returns the roles of the others, and the names of the buffers on which the outputs depend. Raises TraceError for
    one that changes from step to step.
    """
    if not cached_outputs:
        return list(outputs), []
    written = {role.name for role in outputs if role.kind.endswith("_mutation")}
    changing = {
        value: _spoken(role)
        for value, role in zip(draft.placeholders, inputs, strict=True)
        if role.kind in ("input", "parameter") or role.name in written
    }
    buffers = {
        value: {role.name.removeprefix("model.")}
        for value, role in zip(draft.placeholders, inputs, strict=True)
        if role.kind == "buffer"
    }
    for instruction in draft.instructions:
        behind = set().union(*(buffers.get(v, ()) for v in instruction_inputs(instruction)))
        buffers.update((value, behind) for value in instruction.outputs if value is not None and behind)
        cause = next((changing[v] for v in instruction_inputs(instruction) if v in changing), None)
        if instruction.random:
            cause = "random numbers"
        if cause is not None:
            changing.update((value, cause) for value in instruction.outputs if value is not None)
    others, results, feeding = [], [], set[str]()
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
        elif value is not None:
            feeding.update(buffers.get(value, ()))
    draft.results[:] = results
    return others, sorted(feeding)


def _spoken(role: InputRole) -> str:
    name = role.name.removeprefix("model.")
    return "the batch" if role.kind == "input" else f"{role.kind} {name}"
