"""What the tests of memory share: a stack of layers, clusters with memory, what programs gather again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import nn

import hetspmd.rules.ops  # noqa: F401  # registers the rules
from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.devices import Device, Network
from hetspmd.placement import available
from hetspmd.program.program import Communicate, Compute, Program
from hetspmd.rules.theory import Theory, derive
from hetspmd.trace.graph import PARAMETER
from hetspmd.trace.trace import trace


class Stack(nn.Module):
    """Equal layers whose parameters are small beside the batch: data parallelism pays, parameters fill memory."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def stack(
    layers: int = 4, width: int = 64, batch: int = 256, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A stack with its batch."""
    torch.manual_seed(0)
    return Stack(layers, width).to(dtype), {"x": torch.randn(batch, width, dtype=dtype)}


@cache
def stack_theory(layers: int = 4, width: int = 64, batch: int = 256) -> Theory:
    """The theory of a stack's step."""
    model, example = stack(layers, width, batch)
    return derive(trace(model, (), example))


def devices(*shares: float, flops: float = 1e10, bandwidth: float = 1e9, latency: float = 1e-6) -> Cluster:
    """Devices of ``4 * share * flops`` FLOP/s without a limit of memory. The optimizer's step costs a launch, so
    that only memory asks for parameters in shards."""
    return Cluster(
        tuple(
            Device(
                f"d{j}",
                {"default": 4 * flops * share},
                memory_bandwidth=1e11,
                launch=1e-7,
                optimizer=math.inf,
            )
            for j, share in enumerate(shares)
        ),
        Network(bandwidth, latency) if len(shares) > 1 else None,
    )


def with_memory(cluster: Cluster, memory: Sequence[float]) -> Cluster:
    """The cluster with so many bytes on each device."""
    limited = tuple(replace(d, memory=float(m)) for d, m in zip(cluster.devices, memory, strict=True))
    return replace(cluster, devices=limited)


def second_readings(theory: Theory) -> dict[int, int]:
    """Tensor of a second reading to the parameter that it reads."""
    graph = theory.graph
    return {graph.instructions[i].outputs[0]: t for i, t in graph.second_reads.items()}


def gathered_again(theory: Theory, program: Program) -> set[int]:
    """Parameters that are communicated in the backward again: their second readings are."""
    again = second_readings(theory)
    return {again[s.tensor] for s in program.steps if isinstance(s, Communicate) and s.tensor in again}


def kept_for_backward(theory: Theory, program: Program) -> dict[int, int]:
    """Second readings, as instruction to row, that take what was communicated before the forward had last read
    the parameter."""
    graph = theory.graph
    again = graph.second_reads
    forms: dict[int, list[int]] = {}
    late: set[tuple[int, int]] = set()  # forms made after the forward's last reader
    found: dict[int, int] = {}
    running = -1
    last = {t: max(r for r in graph.consumers[t] if r != i) for i, t in again.items()}
    for step in program.steps:
        if isinstance(step, Communicate):
            forms[step.tensor].append(step.target)
            if running >= last.get(step.tensor, len(graph.instructions)):
                late.add((step.tensor, step.target))
            continue
        running = step.instruction
        if running in again:
            t, pre = again[running], step.row.pre[0]
            if not available(forms[t][0], pre):
                source = pre if pre in forms[t] else 0
                if (t, source) not in late:
                    found[running] = theory.rows[running].index(step.row)
        for t, form in zip(graph.instructions[running].outputs, step.row.post, strict=True):
            if t >= 0:
                forms[t] = [form]
    return found


def forms_held(theory: Theory, program: Program) -> dict[int, set[int]]:
    """The forms that a program makes of each tensor, by its producer and by communication."""
    found: dict[int, set[int]] = {}
    for step in program.steps:
        if isinstance(step, Communicate):
            found[step.tensor].add(step.target)
        else:
            outputs = theory.graph.instructions[step.instruction].outputs
            for t, form in zip(outputs, step.row.post, strict=True):
                if t >= 0:
                    found[t] = {form}
    return found


def stored(theory: Theory, program: Program) -> dict[int, int]:
    """Parameter tensor to the form in which it is stored."""
    graph = theory.graph
    return {
        graph.instructions[s.instruction].outputs[0]: s.row.post[0]
        for s in program.steps
        if isinstance(s, Compute) and graph.instructions[s.instruction].op == PARAMETER
    }
