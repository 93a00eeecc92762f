"""What counts as the loss of a model's output: found, or picked by name or index.

``loss=`` of HAP and compile is a function of the model and the batch, or says where in the model's own output the
loss is: ``"total"``, ``"losses.total"``, ``1``, ``-1``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hetspmd.errors import OptionError
from hetspmd.trace.compat.trees import flatten_with_names

Loss = Callable[..., Any]
"""``loss(model, *args, **kwargs)`` runs the model on the batch and returns the scalar loss, or an output
that holds it (see :func:`find_loss`)."""


class PickedLoss:
    """A loss that runs the model and takes its loss from ``place`` in the output."""

    def __init__(self, place: str | int) -> None:
        self.place = place

    def __call__(self, model: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The model's own output."""
        return model(*args, **kwargs)

    def of(self, output: Any) -> Any:
        """What lies at the place, None if there is no such place."""
        value = output
        for part in [self.place] if isinstance(self.place, int) else self.place.split("."):
            value = _part(value, part)
        return value


def _part(value: Any, part: str | int) -> Any:
    if isinstance(value, Mapping):
        return value.get(part)
    if isinstance(value, (tuple, list)):
        index = int(part) if isinstance(part, int) or part.lstrip("-").isdigit() else None
        if index is not None:
            return value[index] if -len(value) <= index < len(value) else None
    return getattr(value, part, None) if isinstance(part, str) else None


def as_loss(loss: Loss | str | int | None) -> Loss | None:
    """The loss as a function. Raises OptionError for what is neither a function, a name nor an index."""
    if loss is None or (callable(loss) and not isinstance(loss, type)):
        return loss
    if isinstance(loss, (str, int)) and not isinstance(loss, bool) and loss != "":
        return PickedLoss(loss)
    raise OptionError(
        f"loss is {loss!r}; give a name or an index in the model's output (loss='total', loss=1), or a function: "
        "loss=lambda model, *args, **kwargs: ..."
    )


def find_loss(output: Any, loss: Loss | None = None) -> torch.Tensor | None:
    """The scalar loss of an output: what ``loss`` picks, or the output itself, its ``.loss``, ``["loss"]``, or the
    first item of a tuple; None if there is no floating-point scalar."""
    if isinstance(loss, PickedLoss):
        candidates = [loss.of(output)]
    else:
        candidates = [output, getattr(output, "loss", None)]
        if isinstance(output, Mapping):
            candidates.append(output.get("loss"))
        if isinstance(output, (tuple, list)) and output:
            candidates.append(output[0])
    return next((c for c in candidates if _is_scalar(c)), None)


def _is_scalar(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 0 and value.is_floating_point()


def no_loss_text(output: Any, loss: Loss | None) -> str:
    """Why an output has no loss, and the line to write."""
    where = "pass labels in the batch"
    if isinstance(loss, PickedLoss):
        where = f"there is no floating-point scalar at loss={loss.place!r}"
    leaves = [(name, leaf) for name, leaf in flatten_with_names(output) if isinstance(leaf, torch.Tensor)]
    line = "loss=lambda model, *args, **kwargs: ... which runs the model and returns the loss"
    for name, leaf in leaves:
        place = name.replace("']['", ".").strip("[]'\".")
        index = int(place) if place.lstrip("-").isdigit() else place
        if _is_scalar(leaf) and name:
            line = f"loss={index!r}"
            break
        if leaf.numel() == 1 and leaf.is_floating_point() and leaf.ndim > 0:
            inner = f"model(*args, **kwargs){name}"
            line = f"loss=lambda model, *args, **kwargs: {inner}.squeeze()"
            break
        if leaf.ndim == 0 and not leaf.is_floating_point():
            kind = "complex" if leaf.is_complex() else "an integer"
            where = f"{name or 'the output'} is {kind}, and a loss is a real floating-point number"
    return (
        f"the model returns no scalar loss (it returned {_described(output)}); {where}, or say where it is: "
        f"{line}. The loss is the output itself, its .loss, its ['loss'] or the first of a tuple"
    )


def _described(output: Any) -> str:
    """A short description of an output's tensors."""
    if isinstance(output, torch.Tensor):
        kind = str(output.dtype).removeprefix("torch.")
        return f"a Tensor of {kind}{list(output.shape)}"
    if isinstance(output, Mapping):
        items = [f"{key!r}: {_described(value)}" for key, value in list(output.items())[:6]]
        return f"a {type(output).__name__} of {{{', '.join(items)}}}"
    if isinstance(output, (tuple, list)):
        return f"a {type(output).__name__} of ({', '.join(_described(value) for value in output[:6])})"
    return f"a {type(output).__name__}"
