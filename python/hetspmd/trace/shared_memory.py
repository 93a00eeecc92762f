"""Views of a model's parameters and buffers that were made before the trace: ``self.row = self.weight.data[0]``.

On one device such a view changes with the tensor that it shows. In a graph it is a tensor with the values that it
has when the step is traced, which is the same only where they stay.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from hetspmd.errors import TraceError
from hetspmd.trace.compat.roles import OutputRole
from hetspmd.trace.host.changes import where
from hetspmd.trace.host.own_memory import memory
from hetspmd.trace.host.plain import tensors_in
from hetspmd.trace.host.watch import HostWatch
from hetspmd.trace.importer import Draft


def check_views(
    draft: Draft,
    outputs: Sequence[OutputRole],
    trained: Collection[str],
    watch: HostWatch,
) -> None:
    """Raise TraceError for a view, among the tensors with values that a trace met, of what changes between steps.

    ``trained`` names the parameters that are.
    """
    changing = {*trained, *(r.name.removeprefix("model.") for r in outputs if r.kind.endswith("_mutation"))}
    for tensor in draft.data.values():
        name = watch.memories.get(memory(tensor), "")
        if name in changing:
            raise TraceError(
                f"forward reads {_place(tensor, watch)}, a view of {name} that was made before: it would stay as "
                f"it is now while {name} changes. Make the view in forward, from self.{name}"
            )


def _place(tensor: torch.Tensor, watch: HostWatch) -> str:
    """Where forward has found a tensor."""
    for place, value in watch.recorder.values.items():
        if any(memory(other) == memory(tensor) for other in tensors_in(value)):
            return where(watch.roots, *place)
    return "a tensor"
