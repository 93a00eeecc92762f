"""One GPU: a training step of hetspmd beside PyTorch's, in turns in one process, and the memory of each.

A turn is some steps in a row, after which the host waits for the device; its seconds are the mean of a step. Arms
take turns, in an order that is reversed each time. A step is forward, backward and AdamW's step.

Memory is what the arm holds between its steps (parameters, moments, gradients) and what a step adds at its peak. A
CUDA graph keeps the memory of its step in a pool of its own, which counts as held.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

import hetspmd
from emulated.arms import autocast_to
from emulated.worker import Context
from gpu.points import ARMS, AUTOCAST, COMPILED, PURE
from local import stepper
from trust.models import build

WARM = 3
"""Steps of an arm before the first that is timed, beside the two whose losses are read."""

Step = Callable[[], Tensor]
Found = dict[str, Any]
"""The fields of :class:`gpu.results.Arm`."""


def made(
    model: str, size: Mapping[str, int], precision: str, device: str
) -> tuple[nn.Module, dict[str, Tensor]]:
    """A seeded model and batch, made on the device: a billion numbers are drawn there in no time."""
    with torch.device(device):
        network, batch = build(model, **size)
    if precision == PURE:
        network = network.to(torch.bfloat16)
        batch = {n: v.to(torch.bfloat16) if v.is_floating_point() else v for n, v in batch.items()}
    return network, batch


def cluster(device: str) -> dict[str, Any]:
    """A cluster of this one device, with its memory. One device has one program, whatever its rates are."""
    memory = torch.cuda.get_device_properties(device).total_memory if device == "cuda" else 64 << 30
    rates = {"flops": "100 TFLOP/s", "memory_bandwidth": "1TB/s"}
    return {"devices": [{**rates, "memory": f"{memory}B"}]}


def wrapped(
    network: nn.Module, batch: Mapping[str, Tensor], autocast: Callable[[], Any], device: str, **options: Any
) -> hetspmd.HAP:
    """The model as a user of one device has it."""
    with autocast():
        return hetspmd.HAP(network, cluster(device), example=dict(batch), **options)


def makers(
    part: str, model: str, size: Mapping[str, int], precision: str, device: str
) -> dict[str, Callable[[], Step]]:
    """What makes the step of each arm of a part."""
    compiled = part == COMPILED
    torchs, own = ARMS[part]

    def autocast() -> AbstractContextManager[object]:
        return autocast_to("bfloat16" if precision == AUTOCAST else "", device)

    def by_torch() -> Step:
        network, batch = made(model, size, precision, device)
        module: Any = torch.compile(network) if compiled else network
        return stepper(module, batch, autocast)

    def by_hetspmd() -> Step:
        network, batch = made(model, size, precision, device)
        hap = wrapped(network, batch, autocast, device, compile=compiled)
        hap.run_lowered()  # a HAP of one device would run the model as it is
        return stepper(hap, batch, autocast)

    return {torchs: by_torch, own: by_hetspmd}


def measure(
    context: Context, *, part: str, model: str, size: dict[str, int], precision: str, device: str, rounds: int,
    steps: int,
) -> dict[str, Found]:  # fmt: skip
    """The arms of a point of one GPU."""
    del context
    torch.compiler.reset()
    return in_turns(makers(part, model, size, precision, device), device, rounds, steps)


def in_turns(
    make: Mapping[str, Callable[[], Step]], device: str, rounds: int, steps: int
) -> dict[str, Found]:
    """The arms in turns; one that cannot be made, or that fails before the first turn, has its reason instead."""
    ready: dict[str, Step] = {}
    found: dict[str, Found] = {}
    held: dict[str, int] = {}
    for name, build_step in make.items():
        free()
        before = holds(device)
        try:
            step, losses = _begun(build_step)
        except Exception as error:
            found[name] = {"reason": reason_of(error, beside=len(ready))}
            continue
        gc.collect()
        held[name] = holds(device) - before
        ready[name], found[name] = step, {"losses": losses, "seconds": [], "launched": []}
    for turn in range(rounds):
        for name in list(ready) if turn % 2 else reversed(list(ready)):
            seconds, launched = timed(ready[name], steps, device)
            found[name]["seconds"].append(seconds)
            found[name]["launched"].append(launched)
    for name, step in ready.items():
        found[name]["peak"] = peak(step, held[name]) if device == "cuda" else None
    return found


def _begun(build_step: Callable[[], Step]) -> tuple[Step, list[float]]:
    """An arm's step, after those that are not timed, and the losses of the first two."""
    step = build_step()
    losses = [float(step()), float(step())]
    for _ in range(WARM):
        step()
    return step, losses


def timed(step: Step, steps: int, device: str) -> tuple[float, float]:
    """Seconds of a step, and the part of them until the host has launched all."""
    wait = torch.cuda.synchronize if device == "cuda" else _nothing
    wait()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    launched = time.perf_counter() - began
    wait()
    whole = time.perf_counter() - began
    return whole / steps, launched / whole


def peak(step: Step, held: int) -> int:
    """Bytes at the peak of a step of an arm that holds ``held`` between steps, other arms left out."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return held + torch.cuda.max_memory_allocated() - before


def holds(device: str) -> int:
    """Bytes of the device that this process's tensors, and the pools of its CUDA graphs, hold; 0 on a CPU."""
    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    pools = [s for s in torch.cuda.memory_snapshot() if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0)]
    idle: int = sum(s["total_size"] - s["allocated_size"] for s in pools)
    return torch.cuda.memory_allocated() + idle


def free() -> None:
    """Give back what nothing refers to."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def reason_of(error: BaseException, *, beside: int = 0) -> str:
    """An error in a line; of memory that ends, how many other arms held some."""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    if isinstance(error, torch.OutOfMemoryError):
        return f"out of memory beside {beside} other arms: {text}"
    return text


def _nothing() -> None:
    """A CPU has done what it was asked."""
