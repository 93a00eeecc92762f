"""Poplar's clusters, models and kernels (Zhang et al., AAAI 2025, Table 1) for :mod:`poplar`.

**GPUs.** Figures are those of NVIDIA's data sheets; each :class:`Gpu` names its own. Mixed precision is modelled as
a model of float16 parameters. What it holds besides, a float32 copy of the parameters, is taken off the devices'
memory (:func:`cluster_of`), as is :data:`RESERVED` for the context, the allocator's slack and NCCL.

**Rows per turn.** A product's output is computed in tiles, each by one multiprocessor, so that a number of tiles
that is no multiple of the multiprocessors leaves some of them idle in the last wave (NVIDIA, Matrix Multiplication
Background User's Guide: *wave quantization*). :func:`curve_of` makes of this what ``hetspmd profile --model`` would
measure: the seconds of a step of the single device at growing numbers of rows. They stand in the cluster as
measured steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import numpy as np
import torch

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.devices import Device, Network
from hetspmd.cluster.step_curves import ModelSteps, RowDim, StepCurve, StepPoint
from hetspmd.cost.measured_steps import identity
from hetspmd.cost.model import CostModel
from hetspmd.rules.theory import Theory, derive
from hetspmd.trace.trace import trace

TOKENS: Final = 2 * 2**20
"""Of a global batch: the paper's two million."""
RESERVED: Final = 0.1
"""The part of a GPU's memory that no tensor has: context, workspaces, NCCL's buffers, the allocator's slack. The
paper says nothing of it."""
MASTER: Final = 4
"""Bytes of a parameter's float32 copy, which mixed precision keeps with the optimizer's state."""
TILE: Final = 128
"""Rows and columns of a tile of a product in half precision."""
ROWS: Final = (1, 2, 4, 8, 16, 32, 64)
"""At which a curve has points; beyond the last, seconds are in proportion to the rows."""
PRODUCTS: Final = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.")
ATTENTION: Final = "aten._scaled_dot_product"
PCIE_3, PCIE_4 = 16e9, 32e9
"""Bytes/s of 16 lanes in each direction."""
LATENCY: Final = 20e-6


# GPUs and clusters ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpu:
    """A GPU: FLOP/s in half precision with tensor cores (``half``) and in single precision (``single``), GiB of
    memory, bytes/s of it, its streaming multiprocessors, and the data sheet."""

    name: str
    half: float
    single: float
    memory: float
    bandwidth: float
    multiprocessors: int
    sheet: str


_AMPERE, _VOLTA = "NVIDIA A100 Tensor Core GPU data sheet", "NVIDIA V100 Tensor Core GPU data sheet"
A100_80: Final = Gpu("A100-80", 312e12, 19.5e12, 80, 2039e9, 108, f"{_AMPERE}, 80GB SXM")
A100_40: Final = Gpu("A100-40", 312e12, 19.5e12, 40, 1555e9, 108, f"{_AMPERE}, 40GB PCIe")
A800: Final = Gpu("A800", 312e12, 19.5e12, 80, 1935e9, 108, "NVIDIA A800 40GB/80GB data sheet, 80GB PCIe")
V100: Final = Gpu("V100", 112e12, 14e12, 16, 900e9, 80, f"{_VOLTA}, PCIe")
V100S: Final = Gpu("V100S", 130e12, 16.4e12, 32, 1134e9, 80, f"{_VOLTA}, V100S PCIe")
T4: Final = Gpu("T4", 65e12, 8.1e12, 16, 320e9, 40, "NVIDIA T4 data sheet")


@dataclass(frozen=True)
class Testbed:
    """A cluster of Table 1: its GPUs with their numbers, and bytes/s of a GPU's link on a ring over all of them."""

    name: str
    gpus: tuple[tuple[Gpu, int], ...]
    link: float

    @property
    def each(self) -> tuple[Gpu, ...]:
        """The GPU of every rank."""
        return tuple(gpu for gpu, count in self.gpus for _ in range(count))


TESTBEDS: Final = (
    Testbed("A", ((A100_80, 4), (A100_40, 4)), PCIE_4),
    Testbed("B", ((V100, 2), (T4, 2)), PCIE_3),
    Testbed("C", ((A800, 4), (V100S, 4)), PCIE_3),
)
"""A ring runs at its slowest link, which is PCIe in all three ("all experiments ... were conducted on PCIe"), of
generation 3 where a GPU has no other. A link between machines is not named, and none is assumed."""
SLOWER: Final = replace(TESTBEDS[2], name="C, 10 Gbit/s", link=1.25e9)
"""Cluster C where its two kinds of GPUs are in machines that 10 Gbit/s join."""


# models ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """A model with the tokens of a row; ``build`` makes it and a batch of so many rows."""

    name: str
    build: Callable[[int], tuple[Any, dict[str, torch.Tensor]]]
    tokens: int

    @property
    def rows(self) -> int:
        """Of the global batch."""
        return TOKENS // self.tokens


def llama(
    width: int, layers: int, intermediate: int, heads: int, key_heads: int, tokens: int
) -> Callable[[int], Any]:
    """A Llama with Llama 2's vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000, hidden_size=width, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=key_heads, max_position_embeddings=tokens, use_cache=False,
    )  # fmt: skip
    return lambda rows: (LlamaForCausalLM(config), _texts(rows, tokens))


def bert(width: int, layers: int, tokens: int) -> Callable[[int], Any]:
    """A BERT for masked words, without dropout."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 64, intermediate_size=4 * width,
        max_position_embeddings=tokens, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return lambda rows: (BertForMaskedLM(config), _texts(rows, tokens))


def _texts(rows: int, tokens: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(rows, tokens, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids}


WORKLOADS: Final = (
    Workload("Llama 0.5B", llama(1280, 22, 3456, 20, 20, 2048), 2048),
    Workload("Llama 1.1B", llama(2048, 22, 5632, 32, 4, 2048), 2048),
    Workload("BERT 1.1B", bert(2048, 20, 512), 512),
)
"""The paper names sizes alone. Llama 1.1B has TinyLlama's shape, Llama 0.5B is one of its depth, BERT 1.1B a wider
BERT-large of 20 layers; 2,048 tokens are Llama's context, 512 BERT's."""
SMALL: Final = Workload("Llama, 2 layers", llama(256, 2, 640, 4, 4, 2048), 2048)
"""For tests."""


@cache
def theory_of(workload: Workload, rows: int) -> Theory:
    """The theory of a training step of so many rows in float16, of which the loss alone is wanted."""
    with torch.device("meta"):
        model, example = workload.build(rows)
        model = model.to(torch.float16)
    return derive(trace(model, (), example).without_outputs(), quiet=True)


@cache
def parameters(workload: Workload) -> int:
    """How many elements the parameters have."""
    with torch.device("meta"):
        model, _ = workload.build(1)
    return sum(p.numel() for p in model.parameters())


@cache
def model_flops(workload: Workload) -> float:
    """FLOPs of a step's products and attention, which TFLOP/s count."""
    theory = theory_of(workload, 1)
    counted = (*PRODUCTS, ATTENTION)
    instructions = theory.graph.instructions
    each = sum(rule.flops for id_, rule in theory.rules.items() if instructions[id_].op.startswith(counted))
    return each * workload.rows


# seconds by rows ------------------------------------------------------------------------------------------


def idle_in_waves(tiles: int, multiprocessors: int) -> float:
    """Idle over busy time of the multiprocessors that compute so many tiles in waves."""
    return math.ceil(tiles / multiprocessors) * multiprocessors / tiles - 1


def waves_lost(workload: Workload, rows: int, gpu: Gpu) -> float:
    """Seconds of a step of so many rows that multiprocessors are idle in last waves. Products that sum over the
    tokens are not counted: their sums are divided among multiprocessors, too (split-K)."""
    graph, tokens, lost = theory_of(workload, rows).graph, rows * workload.tokens, 0.0
    for i in graph.instructions:
        if not i.op.startswith(("aten.mm.", "aten.addmm.")):
            continue
        (m, k), n = graph.tensors[i.inputs[-2]].shape, graph.tensors[i.inputs[-1]].shape[1]
        if k == tokens:
            continue
        tiles = math.ceil(m / TILE) * math.ceil(n / TILE)
        lost += 2 * m * n * k / gpu.half * idle_in_waves(tiles, gpu.multiprocessors)
    return lost


def rows_in(workload: Workload) -> tuple[RowDim, ...]:
    """Where the inputs have rows."""
    return tuple(sorted((i.path, 0, 1) for i in theory_of(workload, 1).graph.inputs))


@cache
def steps_alone(workload: Workload, gpu: Gpu) -> tuple[tuple[float, float], ...]:
    """Seconds of a step of a GPU alone at each of :data:`ROWS`, by its ops, and with the idle parts of waves."""
    device = device_of(gpu, 2.0**60)
    found = []
    for rows in ROWS:
        seconds = float(CostModel(theory_of(workload, rows), Cluster((device,))).alone()[0])
        found.append((seconds, seconds + waves_lost(workload, rows, gpu)))
    return tuple(found)


def curve_of(workload: Workload, gpu: Gpu, at: int | None = None) -> tuple[StepPoint, ...]:
    """The steps that a profile would have measured on a GPU alone; bytes are as counted. ``at``: as slow beside
    their ops as so many rows are, whatever their own rows."""
    steps = steps_alone(workload, gpu)
    factors = [full / ops for ops, full in steps]
    if at is not None:
        factors = [float(np.interp(at, ROWS, factors))] * len(ROWS)
    return tuple(
        StepPoint(rows, ops * f, ops * f, ops * f, 1, rows * 2**20, rows * 2**20)
        for rows, (ops, _), f in zip(ROWS, steps, factors, strict=True)
    )


def device_of(gpu: Gpu, memory: float) -> Device:
    """A GPU with so many bytes for tensors."""
    return Device(gpu.name, {"float16": gpu.half, "default": gpu.single}, memory, gpu.bandwidth)


def cluster_of(
    testbed: Testbed, workload: Workload, level: int | None, rows_at_once: Sequence[int] | None = None
) -> Cluster:
    """A testbed with the memory that tensors may have at a level of ZeRO, and the model's curves. The float32 copy
    of the parameters is whole at level 0, and where the level is free; else in even shards.

    ``rows_at_once``: those of each rank in a turn, where they are known. The cost model else takes the curves at
    the rows with which all turns take equally long.
    """
    at = dict(zip(testbed.each, rows_at_once or (None,) * len(testbed.each), strict=True))
    copy = MASTER * parameters(workload) / (len(testbed.each) if level else 1)
    memory = {g: (1 - RESERVED) * g.memory * 2.0**30 - copy for g in testbed.each}
    rows = rows_in(workload)
    same = identity(theory_of(workload, workload.rows).graph, rows)
    assert same is not None
    curves = tuple(
        StepCurve(
            tuple(rank for rank, g in enumerate(testbed.each) if g == gpu),
            int(memory[gpu]) + 1,
            curve_of(workload, gpu, at[gpu]),
        )
        for gpu, _ in testbed.gpus
    )
    return Cluster(
        tuple(device_of(g, float(int(memory[g]))) for g in testbed.each),
        Network(testbed.link, LATENCY),
        steps=(ModelSteps(same, workload.name, rows, "adamw", curves),),
    )
