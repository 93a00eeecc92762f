"""The ranks of a run, hidden from libraries that would make something of them.

Accelerate, Hugging Face Trainer and Lightning read in the environment that ``torchrun`` has started several
processes, deal out the batches among them and wrap the model in DistributedDataParallel. HAP is one model over all
ranks: such a library must do on every rank what it does in a single process.
"""

from __future__ import annotations

import os
import sys
from typing import Final

import torch.distributed as dist

from hetspmd.errors import WorldSizeError

NAMES: Final = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "SLURM_NTASKS",
    "SLURM_PROCID", "SLURM_LOCALID",
)  # fmt: skip
"""What is taken out of the environment."""


def hide_ranks() -> int:
    """Let Accelerate, Trainer and Lightning run on every rank as in a single process.

    Call it after ``init_process_group`` and before ``Accelerator()``, ``TrainingArguments(...)`` or
    ``lightning.Trainer(...)``. Every rank then takes the same global batch, clips, evaluates and saves as one
    device does, into a folder that must be the rank's own. Processes that this one starts see no ranks
    either.

    In one process a library takes the first GPU that it sees, or all of them (Trainer: DataParallel, which is
    refused). Where a machine has several GPUs, let each rank see only its own, before anything uses CUDA:
    ``os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]``. It is ``cuda:0`` then.

    Returns:
        The rank of this process.

    Raises:
        WorldSizeError: ``init_process_group`` has not been called, or Accelerate has seen the ranks already.
    """
    if not dist.is_initialized():
        raise WorldSizeError(
            "hide_ranks() takes away what init_process_group() reads; call it afterwards: "
            'torch.distributed.init_process_group("gloo"); rank = hetspmd.hide_ranks()'
        )
    state = sys.modules.get("accelerate.state")
    seen = {} if state is None else getattr(state.PartialState, "_shared_state", {})
    if seen.get("num_processes", 1) > 1:
        raise WorldSizeError(
            f"Accelerate has seen {seen['num_processes']} processes already; call hetspmd.hide_ranks() before "
            "Accelerator(), PartialState() or TrainingArguments(...) is made"
        )
    for name in NAMES:
        os.environ.pop(name, None)
    return dist.get_rank()
