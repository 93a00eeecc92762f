"""What one rank measures of its own device: rates of products, convolutions and memory, and the launch time.

- matmul: a square product n x n x n, 2 n^3 FLOPs, n grown until a call takes ``device_call_seconds`` (or a
  300th of the budget, if that is less);
- convolution: 3 x 3 over 128 channels, 2 FLOPs per weight and position, grown in the same way;
- memory: ``a + b`` of tensors larger than most caches (16 MiB, on a GPU 256 MiB): two are read and a new one is
  written, as programs do; several times in a call, until it is as long;
- launch: a chain of ops on 16 x 16 elements, divided by their number; as long a call, too;
- optimizer: a step on parameters of 8 x 4 MiB (on a GPU 8 x 32 MiB) in float32.

Products, convolutions and sums are measured in each dtype that the device computes in; one that it refuses is
left out. Each is repeated as :mod:`hetspmd.profile.timing` says, in several rounds over all of them, so that what
slows the device down for some seconds falls on a part of everyone's samples and not on all of one's. The interval
of a rate holds the medians of all rounds: samples of one round are not independent where a device drifts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Final

import torch
from torch.nn.functional import conv2d

from hetspmd.cluster.curves import Rate
from hetspmd.profile.profile_thresholds import THRESHOLDS
from hetspmd.profile.timing import interval, repeat

DTYPES: Final = ("float32", "bfloat16", "float16")


def _adamw(parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def _sgd(parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def _momentum(parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


OPTIMIZERS: Final[Mapping[str, Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]]] = {
    "adamw": _adamw,
    "momentum": _momentum,
    "sgd": _sgd,
}
"""As torch.optim runs them by default, which a training most likely does."""

Call = Callable[[], object]
Case = tuple[float, Call]
"""FLOPs, bytes or ops of a call, and the call."""
Maker = Callable[[torch.device, str, float], Case]


def measure_device(
    rank: int,
    device: torch.device,
    budget: float,
    tolerance: float,
    dtypes: Sequence[str] = DTYPES,
    tick: Callable[[str], None] = lambda what: None,
    optimizer: str = "adamw",
) -> tuple[Rate, ...]:
    """The rates of ``device``, in about ``budget`` seconds. ``tick`` hears what is being measured.

    Raises RuntimeError if float32 products do not work.
    """
    makers: dict[str, Maker] = {
        "matmul": _matmul,
        "convolution": _convolution,
        "memory": _memory,
    }
    cases: list[tuple[str, str, Maker]] = [
        ("launch", "float32", _launch),
        ("optimizer", "float32", partial(_optimizer, optimizer)),
    ]
    cases += [(what, dtype, make) for dtype in dtypes for what, make in makers.items()]
    long = min(THRESHOLDS.device_call_seconds, budget / THRESHOLDS.device_calls)
    start = perf_counter()
    calls: list[tuple[str, str, float, Call]] = []
    for what, dtype, make in cases:
        tick(f"{what} {dtype}")
        try:
            calls.append((what, dtype, *make(device, dtype, long)))
        except RuntimeError as error:  # torch's own for an op without a kernel in this dtype
            if dtype == "float32" or isinstance(error, torch.OutOfMemoryError):
                raise
    samples: list[list[list[float]]] = [[] for _ in calls]
    turns = [(which, *one) for _ in range(THRESHOLDS.device_rounds) for which, one in enumerate(calls)]
    for index, (which, what, dtype, _, call) in enumerate(turns):
        tick(f"{what} {dtype}")
        now = perf_counter()
        deadline = now + max(start + budget - now, 0.0) / (len(turns) - index)
        samples[which].append(repeat(partial(_timed, device, call), deadline, tolerance))
    return tuple(
        Rate(rank, what, dtype, amount, *_interval(of), sum(map(len, of)))
        for (what, dtype, amount, _), of in zip(calls, samples, strict=True)
    )


def _interval(rounds: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """The median of all samples and an interval that holds every round's."""
    middle, low, high = interval([seconds for samples in rounds for seconds in samples])
    medians = [median(samples) for samples in rounds]
    return middle, min(low, *medians), max(high, *medians)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _timed(device: torch.device, call: Call) -> float:
    synchronize(device)
    start = perf_counter()
    call()
    synchronize(device)
    return perf_counter() - start


def _warm(device: torch.device, call: Call) -> float:
    """Seconds of a call: the least of three, after a first that may compile or choose kernels.

    A short call may fall into a pause of a device whose time is shared out in slices, and seem to be long.
    """
    _timed(device, call)
    return min(_timed(device, call) for _ in range(THRESHOLDS.warm_calls))


def _matmul(device: torch.device, dtype: str, long: float) -> Case:
    n, largest = THRESHOLDS.product_sides
    while True:
        a = torch.randn(n, n, device=device).to(getattr(torch, dtype))
        call = partial(torch.mm, a, a.t().contiguous())
        seconds = _warm(device, call)
        if seconds >= long or n >= largest:
            return 2.0 * n**3, call
        grown = 1.1 * n * (long / seconds) ** (1 / 3)
        n = min(2 * n, -(-int(grown) // 64) * 64)


def _convolution(device: torch.device, dtype: str, long: float) -> Case:
    channels = THRESHOLDS.convolution_channels
    weight = torch.randn(channels, channels, 3, 3, device=device).to(getattr(torch, dtype))
    for batch, side in THRESHOLDS.convolution_images:
        x = torch.randn(batch, channels, side, side, device=device).to(weight.dtype)
        call = partial(conv2d, x, weight, padding=1)
        if _warm(device, call) >= long:
            break
    return 2.0 * weight.numel() * batch * side * side, call


def _memory(device: torch.device, dtype: str, long: float) -> Case:
    kind: torch.dtype = getattr(torch, dtype)
    cuda = device.type == "cuda"
    nbytes = THRESHOLDS.gpu_memory_bytes if cuda else THRESHOLDS.cpu_memory_bytes
    count = nbytes // kind.itemsize
    once = partial(torch.add, *(torch.ones(count, device=device, dtype=kind) for _ in range(2)))
    times = _times(device, once, long)
    return 3.0 * count * kind.itemsize * times, partial(_repeated, once, times)


def _launch(device: torch.device, dtype: str, long: float) -> Case:
    x = torch.eye(16, device=device, dtype=getattr(torch, dtype))

    def chain() -> torch.Tensor:
        y = x
        for _ in range(THRESHOLDS.launch_chain // 3):
            y = torch.mul(torch.mm(torch.add(y, x), x), 0.5)
        return y

    times = _times(device, chain, long)
    return float(THRESHOLDS.launch_chain * times), partial(_repeated, chain, times)


def _times(device: torch.device, call: Call, long: float) -> int:
    """How often ``call`` must be repeated to take ``long`` seconds, pauses and all."""
    return max(1, math.ceil(long / max(_warm(device, call), 1e-9)))


def _repeated(call: Call, times: int) -> None:
    for _ in range(times):
        call()


def _optimizer(name: str, device: torch.device, dtype: str, long: float) -> Case:
    cuda = device.type == "cuda"
    count = (THRESHOLDS.gpu_parameter_bytes if cuda else THRESHOLDS.cpu_parameter_bytes) // 4  # of float32
    kind, number = getattr(torch, dtype), THRESHOLDS.optimizer_parameters
    parameters = [torch.ones(count, device=device, dtype=kind) for _ in range(number)]
    for p in parameters:
        p.grad = torch.full_like(p, 0.5)
    step = OPTIMIZERS[name](parameters).step
    _warm(device, step)
    return float(sum(p.nbytes for p in parameters)), step
