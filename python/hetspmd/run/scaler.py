"""Loss scaling (float16) where gradients lie in shards.

A scaler skips a step in which a gradient is not finite. A rank sees its own shards only, so that one would skip
what another takes, and the ranks would part. Here all ranks share what each has found: one all-gather of one
number per rank in every step.
"""

from __future__ import annotations

from typing import Any

import torch

from hetspmd.run.owners import owners


class GradScaler(torch.amp.GradScaler):
    """:class:`torch.amp.GradScaler` for the parameters of a HAP module; made and used in the same way.

    Every rank must make one with the same arguments. Raises GradientError, in the first ``unscale_`` or ``step``,
    for an optimizer of parameters of no HAP module.
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, *args: Any
    ) -> dict[torch.device, torch.Tensor]:
        found: dict[torch.device, torch.Tensor] = super()._unscale_grads_(optimizer, *args)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for part in owners(parameters):
            own = torch.zeros(1, device=part.device)
            for flag in found.values():
                own += flag.to(part.device)
            flags = own.new_empty(part.communicator.world)
            part.communicator.all_gather(flags, own).wait()
            shared = (flags.sum() > 0).to(torch.float32)
            found[part.device] = torch.maximum(found.get(part.device, shared), shared.reshape(()))
        return found
