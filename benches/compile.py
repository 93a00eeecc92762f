"""What compiling costs beside tracing: CPU seconds of real models, with and without a limit of memory.

    python benches/compile.py [--quick] [--models NAME ...] [--clusters NAME ...] [--part P] [--micro-batches N]

Each model is traced once. For each cluster it is planned without a limit of memory, and with so much memory on each
device as a part of what data parallelism in even shares needs there. ``synth`` is the search, with the bound on
memory and the prices; ``balance`` the ratios, the simulation and the count of memory; ``ratio`` both of them by
tracing. All is CPU time of this process on one thread, so that other load matters less, and of a single run. The
last column is the predicted step, or why there is no plan.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final
from unittest import mock

import torch

from hetspmd.cluster.cluster import Cluster
from hetspmd.errors import MemoryBoundError, MemoryLimitError
from hetspmd.optimize.baselines import baselines
from hetspmd.optimize.compile_options import CompileOptions
from hetspmd.optimize.compiler import compile_plan
from hetspmd.optimize.synthesis import Synthesis
from hetspmd.rules.theory import derive
from hetspmd.search.constraints import Constraints
from hetspmd.search.search import Limits
from hetspmd.trace.compat.joint import exporter
from hetspmd.trace.graph import Graph
from hetspmd.trace.trace import split_example, trace
from real_models import REAL, cluster, llama

SPEEDS: Final = {
    "4 devices": (4.0, 2.0, 1.0, 1.0),
    "8 devices": (1.6,) * 2 + (1.0,) * 6,
    "64 devices": (4.0,) * 16 + (2.0,) * 16 + (1.0,) * 32,
}
"""Relative speeds of the clusters' devices."""

DEPTHS: Final = {
    f"Llama-3-8B, {layers} layers, 16 x 512": (lambda layers=layers: llama(layers, 16, 512))
    for layers in (24, 96)
}
MODELS: Final = {**REAL, **DEPTHS}

QUICK: Final = ("VGG19", "BERT base")
PART: Final = 0.6
"""Of the memory that data parallelism needs."""


@dataclass(frozen=True)
class Compiled:
    """CPU seconds of the stages of one compilation, and what came of it."""

    trace: float
    synth: float
    balance: float
    outcome: str

    @property
    def ratio(self) -> float:
        """What is done after tracing, in times of tracing."""
        return (self.synth + self.balance) / self.trace


def traced(name: str) -> tuple[Graph, float]:
    """The graph of a model's training step, and the CPU seconds that it took."""
    model, example = MODELS[name]()
    args, kwargs = split_example(example)
    exporter()  # torch's compiler is imported once in a process
    start = time.process_time()
    graph = trace(model, args, kwargs, loss=None)
    return graph, time.process_time() - start


def limited(graph: Graph, devices: Cluster, part: float) -> Cluster:
    """The cluster with a part of the memory that data parallelism in even shares needs on each device."""
    ctx = Synthesis(derive(graph), devices, Constraints({}), Limits())
    held = baselines(ctx, ctx.costs(ctx.everyone))["data_parallel_even"].cost.memory_bytes
    made = [
        replace(device, memory=float(int(part * n))) for device, n in zip(devices.devices, held, strict=True)
    ]
    return replace(devices, devices=tuple(made))


def compiled(graph: Graph, seconds: float, devices: Cluster, **options: Any) -> Compiled:
    """Plan a traced step."""
    stages: dict[str, float] = {}
    # The clock of a compilation tells wall seconds.
    with mock.patch.object(time, "perf_counter", time.process_time), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            plan = compile_plan(
                None, (), {}, devices, CompileOptions(timings=stages, **options), traced=graph
            )  # type: ignore[arg-type]  # the model is only read for its graph
            outcome = f"{plan.cost.step_seconds:.4g} s"
            outcome += f" in {plan.micro_batches} micro-batches" if plan.micro_batches > 1 else ""
        except MemoryBoundError as error:
            outcome = f"none can fit: {error.total / 2**30:.3g} of {error.room / 2**30:.3g} GiB"
        except MemoryLimitError:
            outcome = "none found that fits"
    return Compiled(seconds, stages.get("synth", 0.0), stages.get("balance", 0.0), outcome)


def rows(
    models: Sequence[str], clusters: Sequence[str], parts: Sequence[float | None], **options: Any
) -> Iterator[str]:
    """The lines of the table."""
    yield "| model | cluster | memory | trace | synth | balance | ratio | step |"
    yield "| --- | --- | --- | --: | --: | --: | --: | --- |"
    for name in models:
        graph, seconds = traced(name)
        for where in clusters:
            free = cluster(SPEEDS[where])
            for part in parts:
                devices = free if part is None else limited(graph, free, part)
                one = compiled(graph, seconds, devices, **options)
                memory = "any" if part is None else f"{part:.0%}"
                yield (
                    f"| {name} | {where} | {memory} | {one.trace:.2f} | {one.synth:.2f} | {one.balance:.2f} "
                    f"| {one.ratio:.2f} | {one.outcome} |"
                )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two models on 4 devices")
    parser.add_argument("--models", nargs="+", choices=MODELS)
    parser.add_argument("--clusters", nargs="+", choices=SPEEDS)
    parser.add_argument("--part", type=float, default=PART, help="of what data parallelism needs")
    parser.add_argument("--micro-batches", default="1", help="a number, or auto")
    options = parser.parse_args()
    torch.set_num_threads(1)
    count = options.micro_batches if options.micro_batches == "auto" else int(options.micro_batches)
    models = options.models or (QUICK if options.quick else tuple(MODELS))
    clusters = options.clusters or (("4 devices",) if options.quick else tuple(SPEEDS))
    for line in rows(models, clusters, (None, options.part), micro_batches=count):
        print(line, flush=True)


if __name__ == "__main__":
    main()
