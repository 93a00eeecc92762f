"""One of four gloo ranks that train the digits demo's network; ``python endurance_worker.py RANK PORT OUT DELAYS``.

With DELAYS = 1 every rank sleeps for a random while before some collectives and steps. Every step writes down the
loss, and every tenth what the process holds: live tensors, their bytes, resident memory, threads and open files.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import json
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from hetspmd.dist.communicator import Work
from hetspmd.dist.process_group import ProcessGroupCommunicator
from hetspmd.run.module import HAP

WORLD, STEPS, BATCH = 4, 200, 24
CLUSTER = Path(__file__).parents[2] / "examples" / "clusters" / "four-boards.yaml"


class Network(nn.Module):
    """The demo's network, smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.classifier = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.classifier(self.features(images).flatten(1))
        return cross_entropy(logits, labels), logits


class Delayed(ProcessGroupCommunicator):
    """Sleeps a little before a third of the primitives, differently on every rank."""

    dice: random.Random | None = None

    def _issued(self, work: Any, *buffers: torch.Tensor) -> Work:
        if self.dice is not None and self.dice.random() < 0.3:
            time.sleep(self.dice.random() * 2e-3)
        return super()._issued(work, *buffers)


def held() -> dict[str, int]:
    """Live tensors, their bytes, resident bytes less what the allocator has free, threads, open files."""
    if sys.platform == "linux":
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    tensors = [t for t in gc.get_objects() if isinstance(t, torch.Tensor)]
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "tensors": len(tensors), "bytes": sum(t.numel() * t.itemsize for t in tensors),
        "resident": pages * os.sysconf("SC_PAGE_SIZE"), "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(), "files": len(os.listdir("/proc/self/fd")),
    }  # fmt: skip


def main(rank: int, port: int, out: Path, delays: bool) -> None:
    """Train and write what was seen."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    communicator = Delayed()
    if delays:
        communicator.dice = random.Random(rank)
    torch.manual_seed(0)
    data = torch.randn(STEPS, BATCH, 1, 8, 8)
    labels = torch.randint(0, 10, (STEPS, BATCH))
    model = HAP(
        copy.deepcopy(Network()), CLUSTER, example={"images": data[0], "labels": labels[0]},
        process_group=communicator,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, holdings = [], []
    for step in range(STEPS):
        if communicator.dice is not None and communicator.dice.random() < 0.2:
            time.sleep(communicator.dice.random() * 2e-2)
        optimizer.zero_grad()
        loss, _ = model(images=data[step], labels=labels[step])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        del loss, _
        if step % 10 == 3:
            dist.barrier()
            communicator.settle()
            gc.collect()
            holdings.append(held())
    divided = sum(bool(s.extents) for s in model.parameter_shards().values())
    out.write_text(json.dumps({"losses": losses, "held": holdings, "divided": divided}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4] == "1")
