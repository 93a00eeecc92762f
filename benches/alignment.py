"""A linear layer's three products on slices of its weight that are multiples of 64 elements, of 32, ..., of 1.

    python benches/alignment.py [--rows 32] [--columns 20000] [--outputs 4096] [--device cuda] [--dtype bfloat16]

The weight has ``--outputs`` rows and, divided along dim 1, about ``--columns`` columns on this device. The widths
take turns; the table has medians of seconds over those of the first width, a multiple of 64. Outputs are written to
memory that is there before. On a CPU one thread computes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Final

import torch

MULTIPLES: Final = (64, 32, 16, 8, 4, 2, 1)
PRODUCTS: Final = ("forward", "input's gradient", "weight's gradient")


def widths(columns: int) -> dict[int, int]:
    """By multiple, the width nearest above ``columns`` that is one of it and of no larger power of two."""
    least = -(-columns // 64) * 64
    return {m: least + m if m < 64 else least for m in MULTIPLES}


def products(
    rows: int, columns: int, outputs: int, device: str, dtype: torch.dtype
) -> list[Callable[[], object]]:  # fmt: skip
    """The three products of a layer with a weight of ``outputs`` x ``columns``, on ``rows`` rows."""
    randn = partial(torch.randn, device=device, dtype=dtype)
    x, gradient, weight = randn(rows, columns), randn(rows, outputs), randn(outputs, columns)
    y, of_x, of_weight = torch.empty_like(gradient), torch.empty_like(x), torch.empty_like(weight)
    return [
        lambda: torch.mm(x, weight.t(), out=y),
        lambda: torch.mm(gradient, weight, out=of_x),
        lambda: torch.mm(gradient.t(), x, out=of_weight),
    ]


def seconds(
    rows: int, columns: int, outputs: int, device: str, dtype: torch.dtype, rounds: int
) -> dict[int, list[float]]:  # fmt: skip
    """By multiple, the median seconds of each product."""
    calls = {m: products(rows, width, outputs, device, dtype) for m, width in widths(columns).items()}
    found: dict[int, list[list[float]]] = {m: [[] for _ in PRODUCTS] for m in calls}
    for turn in range(rounds + 1):
        for m, of in calls.items():
            for times, call in zip(found[m], of, strict=True):
                took = _timed(call, device)
                if turn:
                    times.append(took)
    return {m: [median(times) for times in of] for m, of in found.items()}


def _timed(call: Callable[[], object], device: str) -> float:
    cuda = torch.device(device).type == "cuda"
    if cuda:
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    if cuda:
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def table(found: dict[int, list[float]]) -> str:
    """Each product's seconds over those of the first multiple, in Markdown."""
    first = next(iter(found.values()))
    head = ["multiple of", *PRODUCTS]
    rows = [[str(m), *(f"{s / f:.2f}" for s, f in zip(of, first, strict=True))] for m, of in found.items()]
    lines = [f"| {' | '.join(row)} |" for row in (head, ["--:"] * len(head), *rows)]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name, default in (("rows", 32), ("columns", 20000), ("outputs", 4096), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    options = parser.parse_args(arguments)
    if min(options.rows, options.columns, options.outputs, options.rounds) < 1:
        parser.error("--rows, --columns, --outputs and --rounds are at least 1")
    torch.set_num_threads(1)
    dtype = getattr(torch, options.dtype)
    print(
        table(seconds(options.rows, options.columns, options.outputs, options.device, dtype, options.rounds))
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
