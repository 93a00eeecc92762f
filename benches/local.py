"""What a program costs on one device, beside eager PyTorch: CPU seconds and peak memory of a training step.

Each model is trained twice from the same weights, as it is and as the one rank of a ``HAP``; a step is forward,
backward and AdamW's step. Steps of the two take turns; the ratio is the median over pairs of neighbours, so
that what else the machine does falls on both. One thread, seconds of CPU time. The peak is counted on a step
apart (:class:`emulated.memory.LiveBytes`), parameters and AdamW's moments included. With --compile both are
compiled, with --dropout every nn.Dropout of the models, which have none otherwise, drops that part.

python benches/local.py [--rounds N] [--compile] [--dropout P] [--write docs/local.md] [NAME ...]
"""

from __future__ import annotations

import argparse
import gc
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hetspmd
from emulated.memory import LiveBytes
from hetspmd.dist.simulated_world import run_ranks
from trust.models import MODELS, build

ROOT = Path(__file__).parents[1]
MARKS = ("<!-- table -->\n", "<!-- end of table -->")
CLUSTER = {
    "devices": [{"flops": "100 GFLOP/s", "memory": "64GiB", "memory_bandwidth": "10GB/s"}],
    "network": {"bandwidth": "10Gbit/s", "latency": "50us"},
}
Autocast = Callable[[], AbstractContextManager[object]]

STEPS = 2
"""Steps before the first that is measured."""


@dataclass(frozen=True)
class Measured:
    """Seconds of each step of both, in pairs, and peak bytes of a step of both."""

    name: str
    eager: tuple[float, ...]
    hap: tuple[float, ...]
    eager_bytes: int
    hap_bytes: int

    @property
    def ratios(self) -> list[float]:
        return sorted(h / e for e, h in zip(self.eager, self.hap, strict=True))

    def row(self) -> str:
        """The line of the table."""
        ratios = self.ratios
        return (
            f"| {self.name} | {statistics.median(self.eager):.3f} | {statistics.median(self.hap):.3f} "
            f"| {statistics.median(ratios):.3f} | {ratios[len(ratios) // 4]:.3f} to "
            f"{ratios[-1 - len(ratios) // 4]:.3f} | {self.eager_bytes / 1e6:.1f} | {self.hap_bytes / 1e6:.1f} "
            f"| {self.hap_bytes / self.eager_bytes:.3f} |"
        )


HEAD = """| model | eager, s | hetspmd, s | ratio | middle half | eager, MB | hetspmd, MB | ratio |
|---|---|---|---|---|---|---|---|"""


def stepper(
    model: nn.Module, batch: dict[str, torch.Tensor], autocast: Autocast = nullcontext
) -> Callable[[], torch.Tensor]:
    """A training step of a model that returns the loss; the step returns it, too."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with autocast():
            loss: torch.Tensor = model(**batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def clock(device: torch.device) -> Callable[[], float]:
    """Reads seconds of CPU time; for a GPU, of the wall clock when it has done what it was asked."""
    if device.type == "cpu":
        return time.process_time

    def now() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return now


def wrapped(
    model: nn.Module,
    batch: dict[str, torch.Tensor],
    communicator: Any,
    *,
    compile: bool | dict[str, Any] = False,
) -> nn.Module:
    """The lowered graphs of the model as the one rank of its program, which run where it draws random numbers."""
    hap = hetspmd.HAP(model, CLUSTER, example=batch, process_group=communicator, compile=compile)
    hap.run_lowered()
    return hap


def built(name: str, dropout: float, **options: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model and its batch, with so much dropout."""
    model, batch = build(name, **options)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
    return model, batch


def peaks(name: str, *, dropout: float = 0.0, **options: int) -> tuple[int, int]:
    """Peak bytes of a step, eager and as one rank of a HAP."""

    def peak(wrap: Callable[[nn.Module, dict[str, torch.Tensor]], nn.Module]) -> int:
        with LiveBytes() as counter:
            model, batch = built(name, dropout, **options)
            step = stepper(wrap(model, batch), batch)
            for _ in range(STEPS):
                counter.reset_peak()
                step()
            return counter.peak

    def body(communicator: Any) -> tuple[int, int]:
        return peak(lambda model, _: model), peak(lambda model, batch: wrapped(model, batch, communicator))

    (found,) = run_ranks(1, body)
    return found


def seconds(
    name: str, rounds: int, *, compile: bool = False, device: str = "cpu", dtype: torch.dtype | None = None,
    dropout: float = 0.0, **options: int,
) -> tuple[tuple[float, ...], tuple[float, ...]]:  # fmt: skip
    """Seconds of each step, eager (or compiled) and as one rank of a HAP, in pairs; under autocast to ``dtype`` if
    one is given."""
    place = torch.device(device)
    now = clock(place)

    def autocast() -> AbstractContextManager[object]:
        return nullcontext() if dtype is None else torch.autocast(place.type, dtype)

    def body(communicator: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
        model, on_host = built(name, dropout, **options)
        other, _ = built(name, dropout, **options)
        batch = {key: value.to(place) for key, value in on_host.items()}
        own = torch.compile(model.to(place)) if compile else model.to(place)
        with autocast():
            hap = wrapped(other.to(place), batch, communicator, compile=compile)
        arms = stepper(own, batch, autocast), stepper(hap, batch, autocast)
        times: tuple[list[float], list[float]] = ([], [])
        for turn in range(-STEPS, rounds):
            for arm in (0, 1) if turn % 2 else (1, 0):
                gc.collect()
                began = now()
                arms[arm]()
                if turn >= 0:
                    times[arm].append(now() - began)
        return tuple(times[0]), tuple(times[1])

    (found,) = run_ranks(1, body)
    return found


def measure(name: str, rounds: int, *, compile: bool = False, dropout: float = 0.0) -> Measured:
    """Both quantities of one model; bytes are of what is not compiled."""
    eager, hap = seconds(name, rounds, compile=compile, dropout=dropout)
    return Measured(name, eager, hap, *peaks(name, dropout=dropout))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(MODELS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=15, help="pairs of steps (default: %(default)s)")
    parser.add_argument("--compile", action="store_true", help="torch.compile beside HAP(compile=True)")
    parser.add_argument(
        "--dropout", type=float, default=0.0, help="of every nn.Dropout (default: %(default)s)"
    )
    parser.add_argument("--write", type=Path, help="put the table between the marks of this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=UserWarning)
    lines = [HEAD]
    print(HEAD)
    for name in options.names:
        lines.append(measure(name, options.rounds, compile=options.compile, dropout=options.dropout).row())
        print(lines[-1], flush=True)
    if options.write is not None:
        text = options.write.read_text(encoding="utf-8")
        pattern = re.compile(f"(?<={re.escape(MARKS[0])}).*?(?={re.escape(MARKS[1])})", re.DOTALL)
        options.write.write_text(pattern.sub("\n".join(lines) + "\n", text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
