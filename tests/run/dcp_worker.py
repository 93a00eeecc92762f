"""What each process of tests/run/test_torch_checkpoints.py runs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from divided import CLUSTER, X, net, shards, train
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import hetspmd
from hetspmd.run.module import HAP

LR = 0.01
BEFORE, AFTER = 2, 2


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR)


def worker(rank: int, world: int, folder: str) -> None:
    """Save with torch.distributed.checkpoint, in each way of docs/training.md, and go on in another plan."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    model = net()
    first = hetspmd.compile(model, (X,), CLUSTER, constraints=shards(model))
    other = hetspmd.compile(model, (X,), CLUSTER, constraints={"*.weight": "replicated"})
    assert first.parameter_layout() != other.parameter_layout()
    found: dict[str, Any] = {}
    hap = HAP(net(), CLUSTER, plan=first, gather_state=True)
    optimizer = adamw(hap)
    train(hap, BEFORE, optimizer)
    state = {
        "model": hap.full_state_dict(),
        "optimizer": hetspmd.full_optimizer_state_dict(hap, optimizer),
    }
    dcp.save(state, checkpoint_id=f"{folder}/whole")
    waiting = dcp.async_save(copy.deepcopy(state), checkpoint_id=f"{folder}/later")
    dcp.save({"model": hap, "optimizer": optimizer}, checkpoint_id=f"{folder}/stateful")
    waiting.result()
    try:
        get_model_state_dict(hap)
    except AttributeError as error:
        found["refused"] = str(error)
    for name in ("whole", "later"):
        again = HAP(net(), CLUSTER, plan=other)
        fresh = adamw(again)
        read = {key: zeros(value) for key, value in state.items()}
        dcp.load(read, checkpoint_id=f"{folder}/{name}")
        again.load_full_state_dict(read["model"])
        hetspmd.load_full_optimizer_state_dict(again, fresh, read["optimizer"])
        found[name] = train(again, AFTER, fresh)
    again = HAP(net(), CLUSTER, plan=other, gather_state=True)
    fresh = adamw(again)
    train(again, 1, fresh)  # an optimizer has state only after a step
    dcp.load({"model": again, "optimizer": fresh}, checkpoint_id=f"{folder}/stateful")
    found["stateful"] = train(again, AFTER, fresh)
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def zeros(value: Any) -> Any:
    """The same structure without what was saved."""
    if isinstance(value, dict):
        return type(value)((key, zeros(part)) for key, part in value.items())
    if isinstance(value, list):
        return [zeros(part) for part in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else value
