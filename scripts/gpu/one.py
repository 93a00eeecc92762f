"""What a step of hetspmd costs on one GPU beside PyTorch: seconds, memory, kernels, casts; and what checks cost.

    python scripts/gpu/one.py [--rounds N] [--compile] [NAME ...]

The models are BERT, GPT-2 and ViT of the usual base size under autocast to bfloat16. PyTorch's step and that of
the lowered program take turns in one process (``benches/local.py``); the ratio is the median over pairs. The steps
of the checks are those of a HAP with ``check_batches=False`` and without, likewise in turns. Kernels and casts are
counted by PyTorch's profiler in one step of each.
"""

# ruff: noqa: E402  # the benches are put on the path first
from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

sys.path[:0] = [str(Path(__file__).parents[2] / "benches")]

from hetspmd.dist.simulate import run_ranks

import hetspmd
from local import CLUSTER, stepper
from trust.models import build

SIZES = {
    "BERT": {"batch": 64, "tokens": 128, "layers": 12, "width": 768},
    "GPT-2": {"batch": 8, "tokens": 512, "layers": 12, "width": 768},
    "ViT": {"batch": 64, "layers": 12, "width": 768},
}
COUNTED = ("aten::_to_copy", "aten::copy_", "aten::bmm", "cudaLaunchKernel")
WARM = 3
"""Steps before the first that is measured."""
Step = Callable[[], None]


def autocast() -> torch.autocast:
    return torch.autocast("cuda", torch.bfloat16)


def on_gpu(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model, batch = build(name, **SIZES[name])
    return model.cuda(), {key: value.cuda() for key, value in batch.items()}


def arms(name: str, compile: bool) -> dict[str, Step]:
    """A training step of each way to run the model."""

    def wrapped(lowered: bool, **options: Any) -> Step:
        model, batch = on_gpu(name)

        def body(communicator: Any) -> nn.Module:
            with autocast():
                hap = hetspmd.HAP(model, CLUSTER, example=batch, process_group=communicator, **options)
            if lowered:
                hap.run_lowered()
            return hap

        step: Step = stepper(run_ranks(1, body)[0], batch, autocast)
        return step

    model, batch = on_gpu(name)
    made = {"eager": stepper(model, batch, autocast), "hetspmd, lowered": wrapped(True)}
    made["hetspmd, the model itself"] = wrapped(False)
    made["lowered, check_batches=False"] = wrapped(True, check_batches=False)
    if compile:
        made["torch.compile"] = stepper(torch.compile(on_gpu(name)[0]), batch, autocast)
        made["hetspmd, compile=True"] = wrapped(True, compile=True)
    return made


def seconds(step: Step) -> tuple[float, float]:
    """Of the clock until the GPU is done, and of the CPU."""
    torch.cuda.synchronize()
    wall, host = time.perf_counter(), time.thread_time()
    step()
    host = time.thread_time() - host
    torch.cuda.synchronize()
    return time.perf_counter() - wall, host


def peak(step: Step) -> float:
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    step()
    return (torch.cuda.max_memory_allocated() - base) / 2**30


def counts(step: Step) -> str:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    calls = Counter({event.key: event.count for event in found.key_averages()})
    attention = sum(n for key, n in calls.items() if "attention" in key and key.startswith("aten::_"))
    return ", ".join(f"{calls[name]} {name}" for name in COUNTED) + f", {attention} fused attention"


def measure(name: str, rounds: int, compile: bool) -> None:
    steps = arms(name, compile)
    for step in steps.values():
        for _ in range(WARM):
            step()
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in steps}
    for turn in range(rounds):
        for kind in list(steps) if turn % 2 else reversed(list(steps)):
            times[kind].append(seconds(steps[kind]))
    print(f"{name} {SIZES[name]}")
    for kind, step in steps.items():
        ratios = sorted(own[0] / eager[0] for own, eager in zip(times[kind], times["eager"], strict=True))
        wall, host = (1e3 * statistics.median(each) for each in zip(*times[kind], strict=True))
        quarter = len(ratios) // 4
        print(
            f"  {kind:30s} {wall:7.2f} ms, of eager {statistics.median(ratios):.3f} ({ratios[quarter]:.3f} to "
            f"{ratios[-1 - quarter]:.3f}); host {host:6.2f} ms; {peak(step):.2f} GiB over what is held; "
            f"{counts(step)}",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=list(SIZES), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compile", action="store_true", help="torch.compile and HAP(compile=True) too")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)
    torch.set_num_threads(1)
    print(torch.cuda.get_device_name(), torch.__version__)
    for name in options.names:
        measure(name, options.rounds, options.compile)
    return 0


if __name__ == "__main__":
    sys.exit(main())
