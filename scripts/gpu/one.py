"""What is in a step of hetspmd on one GPU beside PyTorch's: kernels, casts, attention; and what checks cost.

    python scripts/gpu/one.py [--rounds N] [NAME ...]

The models are those of ``benches/gpu`` at their real sizes under autocast to bfloat16. ``benches/gpu`` measures
seconds and memory of the lowered program; here it, the model itself, and each without the checks
(``check_batches=False``) take turns with eager PyTorch. The ratio is the median over turns. Kernels and casts are
counted by PyTorch's profiler in one step of each.
"""

# ruff: noqa: E402  # the benches are put on the path first
from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

sys.path[:0] = [str(Path(__file__).parents[2] / "benches")]

from emulated.arms import autocast_to
from gpu.one import Step, in_turns, made, wrapped
from gpu.points import AUTOCAST, ONE_GPU_MODELS
from local import stepper

COUNTED = ("aten::_to_copy", "aten::copy_", "aten::bmm", "cudaLaunchKernel")
DEFAULT = ("BERT", "GPT-2", "ViT")
Autocast = partial(autocast_to, "bfloat16", "cuda")


def eager(name: str) -> Step:
    """PyTorch's step."""
    model, batch = made(name, ONE_GPU_MODELS[name], AUTOCAST, "cuda")
    return stepper(model, batch, Autocast)


def hetspmds(name: str, *, lowered: bool, **options: Any) -> Step:
    """hetspmd's, of the lowered program or of the model itself."""
    model, batch = made(name, ONE_GPU_MODELS[name], AUTOCAST, "cuda")
    hap = wrapped(model, batch, Autocast, "cuda", **options)
    if lowered:
        hap.run_lowered()
    return stepper(hap, batch, Autocast)


ARMS: dict[str, Callable[[str], Step]] = {
    "eager": eager,
    "lowered": partial(hetspmds, lowered=True),
    "the model itself": partial(hetspmds, lowered=False),
    "lowered, check_batches=False": partial(hetspmds, lowered=True, check_batches=False),
    "the model itself, check_batches=False": partial(hetspmds, lowered=False, check_batches=False),
}


def counts(step: Step) -> str:
    """Kernels, casts and attention of a step."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    calls = Counter({event.key: event.count for event in found.key_averages()})
    attention = sum(n for key, n in calls.items() if "attention" in key and key.startswith("aten::_"))
    return ", ".join(f"{calls[name]} {name}" for name in COUNTED) + f", {attention} fused attention"


def measure(name: str, rounds: int) -> None:
    """Print a line per arm of a model."""
    steps: dict[str, Step] = {}

    def keep(arm: str) -> Step:
        steps[arm] = ARMS[arm](name)
        return steps[arm]

    print(f"{name} {dict(ONE_GPU_MODELS[name])}")
    found = in_turns({arm: partial(keep, arm) for arm in ARMS}, "cuda", rounds, 1)
    for arm, of in found.items():
        if "reason" in of:
            print(f"  {arm:38s} {of['reason']}", flush=True)
            continue
        ratios = sorted(
            own / base for own, base in zip(of["seconds"], found["eager"]["seconds"], strict=True)
        )
        print(
            f"  {arm:38s} {1e3 * statistics.median(of['seconds']):7.2f} ms, of eager "
            f"{statistics.median(ratios):.3f}; {of['peak'] / 2**30:.2f} GiB; {counts(steps[arm])}",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=DEFAULT, metavar="NAME", help=", ".join(ONE_GPU_MODELS))
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    if unknown := set(options.names) - ONE_GPU_MODELS.keys():
        parser.error(f"there is no {', '.join(sorted(unknown))}; NAME is one of {', '.join(ONE_GPU_MODELS)}")
    warnings.filterwarnings("ignore", category=UserWarning)
    torch.set_num_threads(1)
    print(torch.cuda.get_device_name(), torch.__version__)
    for name in options.names:
        measure(name, options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
