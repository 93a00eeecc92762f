"""HAP's testbed, models and baselines (EuroSys 2024, section 7.1) for :mod:`reproduction`.

The testbed is 8 machines, two of V100 and six of P100, of which k = 1, 2, 4, 8 GPUs each are used. Each GPU is a
device. A ring over all GPUs enters and leaves each machine once, so the formulas of :mod:`hetspmd.cost.model` hold
for ring collectives and for pipelined broadcasts with b the bandwidth of a machine's link. In an all-to-all the k
GPUs of a machine share that link: of what each of them sends, ``(n - k) / (n - 1)`` leaves the machine, hence

    seconds = L + k (n - k) / (n - 1) X E / b

which stands in the cluster as a measured curve would.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.curves import Curve
from hetspmd.cluster.devices import Device
from hetspmd.cost.model import CostModel
from hetspmd.cost.step import StepCost, StepModel
from hetspmd.errors import MemoryLimitError
from hetspmd.optimize.compile_options import Segments
from hetspmd.optimize.compiler import plan_for
from hetspmd.optimize.segmentation import in_segments
from hetspmd.optimize.synthesis import Clock, Synthesis
from hetspmd.optimize.synthesize import synthesize
from hetspmd.optimize.thresholds import THRESHOLDS
from hetspmd.placement import PARTIAL, REPLICATE, shard
from hetspmd.program.checker import check
from hetspmd.program.lengths import Lengths, lengths_for
from hetspmd.program.program import Compute, Program
from hetspmd.ratios.ratios import optimise_ratios
from hetspmd.ratios.starts import device_subsets, even, proportional
from hetspmd.rules.rule import Triple
from hetspmd.rules.theory import Theory, derive
from hetspmd.search import constraints as known
from hetspmd.search.constraints import Constraints, batch_axes
from hetspmd.search.search import Limits, Searcher
from hetspmd.search.space import Space, search_space
from hetspmd.trace.trace import trace

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "examples"))

V100, P100 = ("v100", 2), ("p100", 6)
A100 = Device("a100", {"default": 19.5e12}, 40 * 2.0**30, 1555e9)
GROUPED = ("grouped_broadcast", "grouped_reduce")
PRODUCTS = ("aten.mm.", "aten.bmm.", "aten.addmm.", "aten.baddbmm.", "aten.convolution_backward")
Entry = tuple[nn.Module, dict[str, Tensor]]


# testbed --------------------------------------------------------------------------------------------------


def cluster_of(kinds: Sequence[tuple[str, int]], gpus: int, efficiency: float = 1.0) -> Cluster:
    """Machines of ``(kind, count)`` with ``gpus`` each, fastest first; ``efficiency`` scales FLOP/s and memory
    bandwidth from the data sheet's (examples/clusters/hap-64.yaml)."""
    sheet = Cluster.load(ROOT / "examples/clusters/hap-64.yaml")
    find = {d.name: d for d in (*sheet.devices, A100)}
    devices: list[Device] = []
    counts: list[int] = []
    for kind, machines in kinds:
        d = find[kind]
        rates = {dtype: rate * efficiency for dtype, rate in d.flops.items()}
        slower = replace(d, flops=rates, memory_bandwidth=d.memory_bandwidth * efficiency)
        devices += [slower] * (machines * gpus)
        counts.append(len(devices))
    assert sheet.network is not None
    latency, bandwidth = sheet.network.latency, sheet.network.bandwidth
    curves = tuple(
        Curve(
            "all_to_all", n, latency=latency, per_exchange=max(gpus * (n - gpus) / (n - 1), 1.0) / bandwidth
        )
        for n in counts
        if n > 1
    )
    return Cluster(tuple(devices), sheet.network, curves)


# models ---------------------------------------------------------------------------------------------------


def vgg19(batch: int, _devices: int) -> Entry:
    """VGG19 for CIFAR-10's 32 x 32 images and 10 classes."""
    from torchvision.models import vgg19 as network

    images, labels = torch.zeros(batch, 3, 32, 32), torch.zeros(batch, dtype=torch.int64)
    model = importlib.import_module("vgg19").Classifier(network(num_classes=10))
    return model, {"images": images, "labels": labels}


def vit(batch: int, _devices: int, layers: int = 8) -> Entry:
    """ViT: 8 layers of width 768, 64 patches of CIFAR-10's images."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        num_hidden_layers=layers, image_size=32, patch_size=4, num_labels=10,
        problem_type="single_label_classification",
    )  # fmt: skip
    images, labels = torch.zeros(batch, 3, 32, 32), torch.zeros(batch, dtype=torch.int64)
    return ViTForImageClassification(config), {"pixel_values": images, "labels": labels}


def bert(batch: int, _devices: int) -> Entry:
    """BERT: 8 layers of width 768, 128 tokens, WikiText-2's 33,278 words, the output layer not tied."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(vocab_size=33278, num_hidden_layers=8, tie_word_embeddings=False)
    ids = torch.zeros(batch, 128, dtype=torch.int64)
    return BertForMaskedLM(config), {"input_ids": ids, "labels": ids}


def bert_moe(batch: int, devices: int, experts: int | None = None, padded: int | None = None) -> Entry:
    """The same shape, every other layer with two experts per device (or ``experts`` in all).

    ``padded``: that many experts stand in the model, each with the slots that it has among ``experts``.
    """
    module = importlib.import_module("bert_moe")
    experts = 2 * devices if experts is None else experts
    count = experts if padded is None else padded
    model = module.BertMoE(
        33278, 128, width=768, layers=8, heads=12, experts=count, capacity_factor=1.25 * count / experts
    )
    ids = torch.zeros(batch, 128, dtype=torch.int64)
    return model, {"input_ids": ids, "labels": ids}


@dataclass(frozen=True)
class Benchmark:
    """A model of HAP's Table 1 with its batch per device; ``parameters``: in the table, in 2^20, (a, b) for
    a + b m on m devices."""

    name: str
    build: Callable[[int, int], Entry]
    rows: int
    parameters: tuple[int, int]


BENCHMARKS = (
    Benchmark("VGG19", vgg19, 64, (133, 0)),
    Benchmark("ViT", vit, 64, (54, 0)),
    Benchmark("BERT-Base", bert, 64, (102, 0)),
    Benchmark("BERT-MoE", bert_moe, 32, (84, 36)),
)


def theory_of(build: Callable[[], Entry]) -> Theory:
    """The theory of a training step; outputs other than the loss are not wanted."""
    with torch.device("meta"):
        model, example = build()
    return derive(trace(model, (), example).without_outputs())


@lru_cache(maxsize=1)
def at_scale(benchmark: Benchmark, devices: int) -> Theory:
    """The benchmark's theory in weak scaling."""
    return theory_of(lambda: benchmark.build(benchmark.rows * devices, devices))


# programs -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judged:
    """A program's prediction; ``active`` counts the devices that take part. ``lengths``: the
    shares of each axis of ``theory``, which has the cuts of several segments."""

    cost: StepCost
    program: Program
    active: int
    fits: bool
    lengths: Lengths
    theory: Theory

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.cost.step_seconds


def fits(cluster: Cluster, cost: StepCost) -> bool:
    """Whether every device has the memory."""
    return all(n <= d.memory for n, d in zip(cost.memory_bytes, cluster.devices, strict=True))


@dataclass(frozen=True)
class _Without(Synthesis):
    """A synthesis without some kinds of collectives."""

    kinds: tuple[str, ...] = ()

    @cached_property
    def searcher(self) -> Searcher:
        """The search core with the programs that are left."""
        return Searcher(_without(search_space(self.theory, self.constraints), self.kinds))


def synthesized(
    theory: Theory, cluster: Cluster, *, without: Sequence[str] = (), sfb: bool = True, clock: Clock | None = None,
    segments: Segments = "auto",
) -> Judged:  # fmt: skip
    """What ``hetspmd.compile`` finds, without some kinds of collectives and without SFB if so asked.

    Without SFB one device alone, which computes every gradient whole, is no candidate.
    """

    def limited(of: Theory) -> Constraints:
        return Constraints(row_filter=None if sfb else no_sfb(of))

    ctx: Synthesis = _Without(
        theory, cluster, limited(theory), Limits(), clock or Clock(), kinds=tuple(without)
    )
    several = [ranks for ranks in device_subsets(CostModel(theory, cluster)) if len(ranks) > 1]
    one = synthesize(ctx, None if sfb else several)
    ctx, outcome = in_segments(ctx, one, segments, limited)
    best = outcome.best
    check(ctx.theory, best.program)
    return Judged(best.cost, best.program, len(best.active), best.fits, best.lengths, ctx.theory)


def synthesized_at(
    theory: Theory, cluster: Cluster, ratios: tuple[float, ...], *, without: Sequence[str] = (), sfb: bool = True
) -> Judged:  # fmt: skip
    """The best program at fixed ratios on all devices, of the same candidates as :func:`synthesized` takes.

    Raises MemoryLimitError if none of them fits.
    """
    costs, lengths = CostModel(theory, cluster), lengths_for(theory.axes, ratios)
    space = _without(search_space(theory, Constraints(row_filter=None if sfb else no_sfb(theory))), without)
    searcher = Searcher(space)
    found = [
        searcher.search(costs, lengths, Limits(), overlap=weight)
        for weight in (1.0, *THRESHOLDS.overlap_weights)
    ]
    programs = [f.program for f in found]
    programs += [
        plan_for(theory, cluster, c, ratios).program
        for c in (known.data_parallel(theory), known.zero_like(theory))
    ]
    judged = [(StepModel(costs, program).cost(lengths), program) for program in programs]
    fitting = [Judged(c, p, cluster.world, True, lengths, theory) for c, p in judged if fits(cluster, c)]
    if not fitting:
        peaks = judged[0][0].memory_bytes
        raise MemoryLimitError(
            {j: (n, int(d.memory)) for j, (n, d) in enumerate(zip(peaks, cluster.devices, strict=True))},
            [d.name for d in cluster.devices],
        )
    best = min(fitting, key=lambda j: j.seconds)
    check(theory, best.program)
    return best


def as_hap(theory: Theory, cluster: Cluster) -> Judged:
    """HAP 3.1 as the paper has it: from ratios in proportion to speed, search and linear program in turns until
    they repeat, all devices active, judged by the stage model (HAP 3.2), in which nothing overlaps."""
    costs = CostModel(theory, cluster)
    searcher = Searcher(search_space(theory, Constraints()))
    ratios, seen, judged = proportional(costs), set[tuple[tuple[int, ...], ...]](), list[Judged]()
    while (lengths := lengths_for(theory.axes, ratios)).units not in seen and len(seen) < THRESHOLDS.rounds:
        seen.add(lengths.units)
        found = searcher.search(costs, lengths, Limits())
        check(theory, found.program)
        ratios = optimise_ratios(theory, costs, found.program, start=ratios)
        for at in (lengths, lengths_for(theory.axes, ratios)):
            cost = StepModel(costs, found.program).cost(at)
            cost = replace(cost, step_seconds=cost.stage_seconds)
            judged.append(Judged(cost, found.program, cluster.world, fits(cluster, cost), at, theory))
    return min(judged, key=lambda j: (not j.fits, j.seconds))


def forced(theory: Theory, cluster: Cluster, wanted: Constraints, *, equal: bool) -> Judged:
    """A known kind of program, with even or with proportional shares, whether it fits or not."""
    costs = CostModel(theory, cluster)
    plan = plan_for(theory, cluster, wanted, even(costs) if equal else proportional(costs))
    return Judged(plan.cost, plan.program, cluster.world, fits(cluster, plan.cost), plan.lengths, theory)


def deepspeed_like(theory: Theory) -> Constraints:
    """ZeRO-3; where the model has experts, they are divided among the devices instead and tokens travel to them."""
    zero = known.zero_like(theory)
    experts = {p.tensor for p in theory.graph.parameters if re.search(r"\.[wb][12]_E", p.name)}
    if not experts or zero.row_filter is None:
        return zero
    axes = {a.id for t in experts if (a := theory.axes.axis(t, 0)) is not None}
    by_batch = zero.row_filter
    forms = {t: shard(0) if t in experts else form for t, form in zero.forms.items()}
    return Constraints(forms, lambda i, row, axis: axis in axes or by_batch(i, row, axis))


def gradient_products(theory: Theory) -> frozenset[int]:
    """Products that sum over the batch: the gradients of weights, where sufficient factors may be sent instead."""
    batch = batch_axes(theory)
    return frozenset(
        i.id
        for i in theory.graph.instructions
        if i.op.startswith(PRODUCTS)
        and any(
            axis in batch and PARTIAL in row.post
            for row, axis in zip(theory.rows[i.id], theory.row_axes[i.id], strict=True)
        )
    )


def _whole(row: Triple) -> bool:
    return all(form == REPLICATE for form in (*row.pre, *row.post))


def no_sfb(theory: Theory) -> known.RowFilter:
    """No gradient of a weight is computed whole on every device (the row of HAP 4.4)."""
    products = gradient_products(theory)
    return lambda i, row, _axis: i not in products or not _whole(row)


def experts_placed(judged: Judged) -> tuple[int, ...]:
    """Experts of each active device."""
    theory = judged.theory
    weight = next(p.tensor for p in theory.graph.parameters if p.name.endswith(".w1_EDH"))
    axis = theory.axes.axis(weight, 0)
    assert axis is not None
    return judged.lengths.units[axis.id]


def uses_of_sfb(judged: Judged) -> int:
    """How many gradients of weights every device computes whole."""
    products, steps = gradient_products(judged.theory), judged.program.steps
    return sum(isinstance(s, Compute) and s.instruction in products and _whole(s.row) for s in steps)


def uses_of_grouped(program: Program) -> int:
    """How many collectives are one operation per shard."""
    return sum(not isinstance(s, Compute) and s.kind in GROUPED for s in program.steps)


def _without(space: Space, kinds: Sequence[str]) -> Space:
    return replace(space, moves=tuple(tuple(m for m in moves if m[2] not in kinds) for moves in space.moves))
