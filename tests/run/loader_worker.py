"""What one gloo process of tests/run/test_loader_gloo.py does; results go to files, one per rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loader_cases import (
    SEED,
    TRAININGS,
    Rows,
    Training,
    data_parallel,
    epochs,
    loss_of,
    mlp,
    on_a_rank,
    optimizer_of,
    padded,
)
from torch.utils.data import DataLoader

import hetspmd
from hetspmd.errors import HetspmdError
from hetspmd.run.module import HAP

ODD = 1
STOP = 2
"""Batches after which the second epoch is broken off and gone on with."""


class Augmented(Rows):
    """Adds what it draws; every rank is seeded otherwise."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(index)
        return {**sample, "x": sample["x"] + torch.rand(6)}


def resumed(training: Training) -> dict[str, Any]:
    """Two epochs, of which the second is gone on with by another module and loader."""

    def made(hap: HAP) -> tuple[Any, torch.optim.Optimizer]:
        options: dict[str, Any] = {"shuffle": True, "seed": SEED, "num_workers": 1}
        batches = hetspmd.loader(training.rows, hap, batch_size=training.batch_size, **options)
        return batches, optimizer_of("AdamW", hap)

    def step(hap: HAP, batch: Any, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(hap(**batch))
        loss.backward()
        optimizer.step()
        return loss.detach()

    hap = training.hap()
    batches, optimizer = made(hap)
    losses = epochs(hap, batches, optimizer, 1)
    iterator = iter(batches)
    losses += [step(hap, next(iterator), optimizer) for _ in range(STOP)]
    state = batches.state_dict(), hap.full_state_dict()
    of_optimizer = hetspmd.full_optimizer_state_dict(hap, optimizer)
    again = training.hap()
    batches, optimizer = made(again)
    batches.load_state_dict(state[0])
    again.load_full_state_dict(state[1])
    hetspmd.load_full_optimizer_state_dict(again, optimizer, of_optimizer)
    losses += epochs(again, batches, optimizer, 1)
    return {"losses": losses, "final": again.full_state_dict()}


def augmented(training: Training) -> list[torch.Tensor]:
    """Rows that several ranks load, with what their samples draw."""
    torch.manual_seed(dist.get_rank())
    hap = training.hap()
    rows = Augmented(**training.rows.columns)
    batches = hetspmd.loader(
        rows, hap, batch_size=9, shuffle=True, seed=SEED, num_workers=dist.get_rank() % 2
    )
    return epochs(hap, batches, optimizer_of("SGD", hap))


def steps(hap: HAP, batches: Any) -> None:
    for batch in batches:
        loss_of(hap(**batch)).backward()


def own(training: Training, hap: HAP, **options: Any) -> Any:
    options = {"batch_size": training.batch_size, "shuffle": True, "seed": SEED, **options}
    return hetspmd.loader(training.rows, hap, **options)


def plain(training: Training, hap: HAP) -> None:
    batches = own(training, hap)
    steps(hap, DataLoader(training.rows, 9) if hap.rank == ODD else batches)


def seeds(training: Training, hap: HAP) -> None:
    own(training, hap, seed=hap.rank)


def order(training: Training, hap: HAP) -> None:
    found = list(range(23)) if hap.rank != ODD else list(reversed(range(23)))
    steps(hap, own(training, hap, sampler=found, shuffle=False, seed=None))


def lengths(training: Training, hap: HAP) -> None:
    own(training, hap, drop_last=hap.rank == ODD)


def pads(training: Training, hap: HAP) -> None:
    steps(hap, own(training, hap, collate_fn=padded))


def stops(training: Training, hap: HAP) -> None:
    """One rank takes a batch less, and evaluates."""
    batches = own(training, hap)
    for number, batch in enumerate(batches):
        if hap.rank == ODD and number == 2:
            break
        loss_of(hap(**batch)).backward()
    hap.full_state_dict()


WRONG: dict[str, Callable[[Training, HAP], None]] = {
    f.__name__: f for f in (plain, seeds, order, lengths, pads, stops)
}


def wrong(name: str) -> dict[str, Any]:
    training = data_parallel()
    hap = training.hap(timeout=60.0)
    begin = time.monotonic()
    try:
        WRONG[name](training, hap)
    except HetspmdError as error:
        return {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - begin}
    return {"error": "none", "text": "", "seconds": time.monotonic() - begin}


def worker(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", world_size=world, rank=rank)
    results: dict[str, Any] = {}
    for name, make in TRAININGS.items():
        results[f"train {name}"] = on_a_rank(make(), num_workers=int(name == "mlp"))
    results["resumed"] = resumed(data_parallel())
    results["augmented"] = augmented(mlp())
    for name in WRONG:
        results[name] = wrong(name)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def read(folder: Path, world: int) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]
