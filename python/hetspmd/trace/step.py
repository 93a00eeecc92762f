"""The traced function: model and loss as one module from flat tensors to ``(loss, *other outputs)``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hetspmd.errors import TraceError
from hetspmd.trace.assignments import Assignments, named_writes
from hetspmd.trace.compat import flatten, unflatten
from hetspmd.trace.slots import Slots

Loss = Callable[..., Any]
"""``loss(model, *args, **kwargs)`` runs the model on the batch and returns the scalar loss, or an output
that holds it (see :func:`find_loss`)."""

_LITERALS = (type(None), bool, int, float, str)


def find_loss(output: Any) -> torch.Tensor | None:
    """The scalar loss of an output: the output itself, its ``.loss``, ``["loss"]``, or the first item of a
    tuple; None if there is no floating-point scalar."""
    candidates = [output, getattr(output, "loss", None)]
    if isinstance(output, Mapping):
        candidates.append(output.get("loss"))
    if isinstance(output, (tuple, list)) and output:
        candidates.append(output[0])
    for found in candidates:
        if isinstance(found, torch.Tensor) and found.ndim == 0 and found.is_floating_point():
            return found
    return None


class Step(nn.Module):
    """``forward(*tensors)`` rebuilds the batch, runs the model and returns the loss first (if any).

    After a call, ``slots`` lists the leaves of the model's output: an index into the returned tensors, or a
    literal; ``output_spec`` is the output's pytree spec. An opaque object in the output, such as a key-value
    cache, comes back as None: it is no result of a training step. ``updates`` maps what the model's parameters and
    buffers are given in other ways than by ops, by name, to an index into the returned tensors; they come last.
    ``changed`` maps inputs that are written to, by position, to the line that does so.
    """

    def __init__(
        self, model: nn.Module, loss: Loss | None, leaves: list[Any], spec: Any, *, training: bool
    ) -> None:
        super().__init__()
        self.model = model
        self._loss = loss
        self._leaves = leaves
        self._spec = spec
        self._training_step = training
        self.slots: list[tuple[int | None, Any]] = []
        self.output_spec: Any = None
        self.has_loss = False
        self.updates: dict[str, int] = {}
        self.changed: dict[int, str] = {}
        self._places = Slots(model)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]
        args, kwargs = unflatten(leaves, self._spec)
        with self._places.kept():
            with Assignments(self.model, tensors) as assignments, named_writes():
                output = (
                    self._loss(self.model, *args, **kwargs) if self._loss else self.model(*args, **kwargs)
                )
            updates = self._places.updates(assignments.assigned)
        self.changed = assignments.changed
        returned = self._returned(output)
        self.updates = {name: len(returned) + i for i, name in enumerate(updates)}
        return (*returned, *(value.detach() for value in updates.values()))

    def _returned(self, output: Any) -> list[torch.Tensor]:
        """The loss, if there is one, and the other tensors of the model's output."""
        loss = find_loss(output)
        if loss is None and self._training_step:
            kind = "Tensor" if isinstance(output, torch.Tensor) else type(output).__name__
            raise TraceError(
                f"the model returns no scalar loss (it returned a {kind}); pass labels in the "
                "batch, or loss=lambda model, *args, **kwargs: ... which runs the model and returns the loss"
            )
        self.has_loss = loss is not None
        flat, self.output_spec = flatten(output)
        returned: list[torch.Tensor] = [] if loss is None else [loss]
        self.slots = []
        for leaf in flat:
            if not isinstance(leaf, torch.Tensor):
                self.slots.append((None, leaf if isinstance(leaf, _LITERALS) else None))
            elif leaf is loss:
                self.slots.append((0, None))
            else:
                self.slots.append((len(returned), None))
                returned.append(leaf.detach())
        return returned
