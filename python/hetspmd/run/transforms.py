"""Transforms of torch around a call of a HAP module, which see a plan's ops and no model, are refused by name."""

from __future__ import annotations

from hetspmd.errors import GradientError, TraceError
from hetspmd.trace.compat.func_transforms import transform_around


def refuse_transforms() -> None:
    """Raise TraceError where the call is recorded (``torch.jit.trace``, ``torch.export``), and GradientError within
    ``torch.func`` (``vmap``, ``grad``, ``jvp``) and forward-mode differentiation."""
    around = transform_around()
    if not around:
        return
    if around in ("torch.jit.trace", "torch.export"):
        raise TraceError(
            f"{around} would record one rank's program, with its collectives, and not the model. Write, on every "
            "rank, model = hap.full_module(), and trace or export that"
        )
    raise GradientError(
        f"{around} around a HAP module: a plan computes the loss and the gradients of parameters, and nothing "
        "else. Write what is differentiated or mapped inside of the model or in loss=, or, on every rank, "
        "model = hap.full_module(), and transform that"
    )
