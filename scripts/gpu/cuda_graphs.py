"""What do CUDA graphs (``HAP(..., cuda_graphs=True)``) gain on one GPU, and are the numbers those of a run without?

    python scripts/gpu/cuda_graphs.py [--seconds 230] [NAME ...]
    python scripts/gpu/cuda_graphs.py --device cpu --small

BERT-base and GPT-2 small under autocast to bfloat16, at the batch of ordinary training and with few rows, where
the host limits the step; and BERT with dropout, whose random numbers must be drawn anew in each step, also in
micro-batches. Each check is a line of JSON, and so is each arm that is timed.

A *check* is a loop that runs twice, with graphs and without, from the same weights and seed: losses, norms of
the gradients and the final parameters are compared. It has what graphs could get wrong: another batch shape,
two forwards before a backward, evaluation between forward and backward, gradients that accumulate, and weights
that move. ``exact`` says whether the bits are the same; kernels that add in any order (the gradient of an
embedding) may differ in the last ones. A *timing* takes turns of eager PyTorch, the local graphs as they are,
and the same by CUDA graphs. Exit status 1 if a check fails or a stretch is not captured.

``--device cpu`` tries the script itself: the capturer is the one for tests, and seconds say nothing.
"""

# ruff: noqa: E402  # the benches are put on the path first
from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path[:0] = [str(Path(__file__).parents[2] / "benches")]

import hetspmd
from emulated.arms import autocast_to
from gpu.one import Step, free, in_turns, made, wrapped
from gpu.points import AUTOCAST, ONE_GPU_MODELS
from hetspmd.run.simulated_capture import SimulatedCapturer
from local import stepper

FEW = {"BERT": {"batch": 4, "tokens": 128}, "GPT-2": {"batch": 2, "tokens": 128}}
SMALL = {"batch": 4, "tokens": 16, "layers": 2, "width": 64, "head": 32, "vocabulary": 128}
POINTS: dict[str, tuple[str, Mapping[str, int], float]] = {
    "BERT, few rows": ("BERT", FEW["BERT"], 0.0),
    "BERT": ("BERT", {}, 0.0),
    "GPT-2, few rows": ("GPT-2", FEW["GPT-2"], 0.0),
    "GPT-2": ("GPT-2", {}, 0.0),
    "BERT, dropout": ("BERT", FEW["BERT"], 0.1),
    "BERT, micro-batches": ("BERT", {"batch": 16, "tokens": 128}, 0.1),
}
"""The model, what is not as in ``benches/gpu``, and the probability of dropout."""
MICRO_BATCHES = {"BERT, micro-batches": 4}
TOLERANCE = 0.02
"""Of losses and norms in bfloat16, as a part of the value."""


class Point:
    """A model with its batch, and how it is wrapped."""

    def __init__(self, name: str, device: str, *, small: bool) -> None:
        self.model, own, self.dropout = POINTS[name]
        self.size = SMALL if small else {**ONE_GPU_MODELS[self.model], **own}
        self.device = device
        self.micro_batches = MICRO_BATCHES.get(name, 1)
        self.autocast = partial(autocast_to, "bfloat16", device)
        self._plan: hetspmd.Plan | None = None

    def built(self) -> tuple[nn.Module, dict[str, Tensor]]:
        """The model, the same each time."""
        model, batch = made(self.model, self.size, AUTOCAST, self.device)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = self.dropout
        return model, batch

    def hap(self, *, graphs: bool) -> tuple[hetspmd.HAP, dict[str, Tensor]]:
        """The model wrapped, by the plan of the first time; its random numbers are the same each time."""
        model, batch = self.built()
        torch.manual_seed(1)
        asked = graphs if self.device == "cuda" or not graphs else SimulatedCapturer()
        options: dict[str, Any] = {"plan": self._plan, "check_plan": False}
        if self._plan is None:
            options = {"micro_batches": self.micro_batches}
        hap = wrapped(model, batch, self.autocast, self.device, cuda_graphs=asked, **options)
        hap.run_lowered()
        self._plan = hap.plan
        return hap, batch

    def eager(self) -> Step:
        """PyTorch's step."""
        model, batch = self.built()
        return stepper(model, batch, self.autocast)

    def step(self, *, graphs: bool) -> Step:
        """hetspmd's step."""
        return stepper(*self.hap(graphs=graphs), self.autocast)


def loop(point: Point, *, graphs: bool) -> tuple[list[float], list[Tensor], str]:
    """Losses and norms, the final parameters, and what was captured."""
    hap, batch = point.hap(graphs=graphs)
    optimizer = torch.optim.AdamW(hap.parameters(), lr=1e-4)
    fewer = {name: value[: len(value) // 2] for name, value in batch.items()}
    found: list[float | Tensor] = []

    def loss_of(rows: dict[str, Tensor]) -> Tensor:
        with point.autocast():
            loss: Tensor = hap(**rows)
        found.append(loss.detach())
        return loss

    def evaluate() -> None:
        hap.eval()
        with torch.no_grad():
            loss_of(fewer)
        hap.train()

    for number in range(10):
        optimizer.zero_grad()
        if number in (4, 8):
            losses = [loss_of(batch), loss_of(fewer), loss_of(batch)]
        else:
            losses = [loss_of(fewer if number % 3 == 2 else batch)]
        if number % 2:
            evaluate()
        if number == 6:
            weight = max(hap.parameters(), key=lambda p: p.numel())
            weight.data = weight.data.clone()
        for loss in losses:
            (loss / len(losses)).backward()
        found.append(nn.utils.clip_grad_norm_(hap.parameters(), 1.0))
        optimizer.step()
    numbers = [float(value) for value in found]
    return numbers, [p.detach().clone() for p in hap.parameters()], str(hap.cuda_graphs_report())


def check(name: str, point: Point) -> bool:
    """Print whether the loop with graphs finds what it finds without; whether it does not."""
    want, final, _ = loop(point, graphs=False)
    got, own, report = loop(point, graphs=True)
    apart = max(abs(g - w) / max(abs(w), 1e-6) for g, w in zip(got, want, strict=True))
    scale = max(float(w.abs().max()) for w in final)
    parameters = max(float((g - w).abs().max()) for g, w in zip(own, final, strict=True)) / scale
    lines = report.splitlines()
    captured = not any("not captured" in line or line.split(": ")[-1].startswith("0 of") for line in lines)
    wrong = not apart <= TOLERANCE or not captured
    say(
        name, "check", ok=not wrong, exact=got == want and parameters == 0.0, numbers=len(want), apart=apart,
        parameters_apart=parameters, last=got[-1], report=lines,
    )  # fmt: skip
    return wrong


def timing(name: str, point: Point, rounds: int, steps: int) -> bool:
    """Print seconds and memory of each arm; whether one failed."""
    arms: dict[str, Callable[[], Step]] = {
        "eager": point.eager,
        "without graphs": partial(point.step, graphs=False),
        "with graphs": partial(point.step, graphs=True),
    }
    found = in_turns(arms, point.device, rounds, steps)
    base = found["eager"].get("seconds")
    for arm, of in found.items():
        if "reason" in of:
            say(name, arm, reason=of["reason"])
            continue
        ratios = [own / eager for own, eager in zip(of["seconds"], base or of["seconds"], strict=True)]
        say(
            name, arm, seconds=statistics.median(of["seconds"]), of_eager=statistics.median(ratios),
            launching=statistics.median(of["launched"]), peak=of["peak"], losses=of["losses"],
        )  # fmt: skip
    return any("reason" in of for of in found.values())


def say(name: str, what: str, **fields: Any) -> None:
    print(json.dumps({"point": name, "what": what, **fields}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=list(POINTS), metavar="NAME", help="; ".join(POINTS))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="tiny models, to try the script")
    parser.add_argument("--seconds", type=float, default=230.0, help="after which nothing is begun")
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    if unknown := set(options.names) - POINTS.keys():
        parser.error(f"there is no {', '.join(sorted(unknown))}; NAME is one of {'; '.join(POINTS)}")
    warnings.filterwarnings("ignore", category=UserWarning)
    torch.set_num_threads(1)
    began, failed = time.monotonic(), False
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    say("", "machine", device=device, torch=torch.__version__)
    for name in options.names:
        point = Point(name, options.device, small=options.small)
        parts: dict[str, Callable[[], bool]] = {"timing": partial(timing, name, point, options.rounds, 3)}
        if name != point.model:  # with few rows: the check is of the graphs, not of their size
            parts = {"check": partial(check, name, point), **parts}
        for part, run in parts.items():
            if time.monotonic() - began > options.seconds:
                say(name, part, skipped="the time is over")
                continue
            try:
                failed |= run()
            except Exception as error:
                failed = True
                say(name, part, reason=f"{type(error).__name__}: {error}"[:600])
            free()
    say("", "end", failed=failed, seconds=time.monotonic() - began)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
