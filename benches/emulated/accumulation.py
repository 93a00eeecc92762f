"""How a data-parallel arm takes its rows: in micro-batches, with or without recomputation, sharded for how long.

The settings are those that users of DDP and FSDP2 turn: gradient accumulation, ``torch.utils.checkpoint`` around
every block, ``reshard_after_forward``, and whether gradients are reduced in each micro-batch or in the last one
alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from emulated.workloads import Workload


@dataclass(frozen=True)
class Setting:
    """What is turned.

    micro_batches  that a rank's rows are divided into, as equal as can be
    recompute      the backward computes the activations inside of each block again
    reshard        FSDP2 frees gathered parameters after the forward and the backward of each micro-batch (ZeRO-3);
                   otherwise they stay until the last micro-batch's backward (ZeRO-2)
    sync_each      gradients are reduced in each micro-batch; otherwise they are summed whole and reduced in the
                   last
    ahead          FSDP2 gathers the next block's parameters while a block computes; as it is, it waits on CPUs for
                   each of its collectives, which have no streams there
    """

    micro_batches: int = 1
    recompute: bool = False
    reshard: bool = True
    sync_each: bool = False
    ahead: bool = False

    def __str__(self) -> str:
        parts = [f"{self.micro_batches} micro-batch{'es' if self.micro_batches > 1 else ''}"]
        parts += ["recomputation"] if self.recompute else []
        parts += ["resharding" if self.reshard else "no resharding"]
        if self.micro_batches > 1:
            parts.append(f"reduced in {'each' if self.sync_each else 'the last'}")
        parts += ["gathered ahead"] if self.ahead else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Part:
    """One micro-batch of a rank: its rows, and what they are of the weight of all rows of all ranks."""

    batch: dict[str, Tensor]
    share: float


def micro_batches(work: Workload, start: int, rows: int, count: int) -> list[Part]:
    """``rows`` of the batch from ``start`` on, in ``count`` micro-batches.

    Where there are fewer rows than that, the last micro-batches are of one row that weighs nothing: all ranks have
    to take part in the collectives.
    """
    whole = float(work.weights.sum())
    made = min(count, rows)
    bounds = list(pairwise(start + rows * i // made for i in range(made + 1)))
    bounds += [(start, start)] * (count - made)
    return [
        Part(
            {name: value[low : max(high, low + 1)].clone() for name, value in work.batch.items()},
            float(work.weights[low:high].sum()) / whole,
        )
        for low, high in bounds
    ]


def recompute_blocks(work: Workload) -> None:
    """Have the backward compute what is inside of each block again."""
    from torch.utils.checkpoint import checkpoint

    for name in work.blocks:
        block: Any = work.model.get_submodule(name)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def begin(model: nn.Module, setting: Setting, last: bool) -> None:
    """Tell the wrapper what to do in the micro-batch that comes; nothing for a model without one."""
    from torch.distributed.fsdp import FSDPModule

    if setting.micro_batches == 1:
        return
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = setting.sync_each or last
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(setting.sync_each or last)
        model.set_reshard_after_backward(setting.reshard or last)


def fully_sharded(work: Workload, world: int, setting: Setting) -> nn.Module:
    """The model by FSDP2: every block and the whole, which is told first what it holds between the two passes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(next(work.model.parameters()).device.type, (world,))
    for name in work.blocks:
        fully_shard(work.model.get_submodule(name), mesh=mesh, reshard_after_forward=setting.reshard)
    sharded: Any = fully_shard(work.model, mesh=mesh)
    if setting.ahead:
        sharded._set_unshard_async_op(True)
        for name, after in pairwise(work.blocks):
            block: Any = work.model.get_submodule(name)
            block.set_modules_to_forward_prefetch([work.model.get_submodule(after)])
    return work.model
