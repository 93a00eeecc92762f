"""What of torch knows HAP modules, from the first one on."""

from __future__ import annotations

from hetspmd.run.clipping import reach_torch
from hetspmd.run.gathered import reach_loading
from hetspmd.run.optimizer_guard import watch_optimizers
from hetspmd.run.scaler import reach_torch_scaler
from hetspmd.run.wrappers import reach_wrappers


def reach() -> None:
    """Let torch's functions and classes look for HAP modules. Further calls change nothing."""
    reach_torch()
    reach_torch_scaler()
    watch_optimizers()
    reach_wrappers()
    reach_loading()
