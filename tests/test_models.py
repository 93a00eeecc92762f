"""Every model on every cluster: what the compiler decides equals the single device (HAP 2.2).

In float64 the loss, every gradient and every parameter after two SGD and two AdamW steps agree to 1e-9; the
parameters of a model that amplifies rounding (MNASNet, EfficientNet) to what one rounding changes on one device.
The quick run covers each required model on at least three clusters and each cluster with at least three models;
the full product is marked slow.
"""

from __future__ import annotations

import pytest
import torch

import zoo
from hetspmd.cost.cluster import Cluster
from hetspmd.run.verify import verify
from workbench import cluster, example_module, traced

TOLERANCE = 1e-9

CLUSTERS: dict[str, Cluster] = {
    "one": cluster(1),
    "two-equal": cluster(1, 1),
    "two-8-1": cluster(8, 1),
    "three": cluster(4, 2, 1),
    "four-equal": cluster(1, 1, 1, 1),
    "four-4-2-1-1": cluster(4, 2, 1, 1),
    "four-one-idle": cluster(4, 2, 1e-5, 1),
    "five-8-1": cluster(8, 1, 8, 1, 1),
    "eight-equal": cluster(*[1.0] * 8),
    "eight-unlike": cluster(4, 4, 2, 2, 1, 1, 1, 1),
    "four-slow-network": cluster(4, 2, 1, 1, fast=False),
}
MODELS = [*zoo.REQUIRED, "bert-moe"]
# A search that takes longer than the limit gives its best program so far, which must be as right.

HEAVY = {
    "mobilenet-v2",
    "bart",
    "t5",
    "densenet121",
    "googlenet",
    "efficientnet-b0",
    "shufflenet",
    "regnet",
    "mnasnet",
    "lstm",
    "gru",
    "swin",
    "segformer",
    "squeezenet",
    "gemma",
    "gemma2",
    "mistral",
    "qwen3",
    "albert",
}
"""Further models with many instructions, or much like others: only in the full run."""


DEEPEST = "resnet50"


def quick_pairs() -> set[tuple[str, str]]:
    """Each model on three clusters (the deepest on one), each cluster with some models, chosen by counting on."""
    clusters = list(CLUSTERS)
    pairs = [(m, clusters[(3 * i + k * 4) % len(clusters)]) for i, m in enumerate(MODELS) for k in range(3)]
    return {pair for k, pair in enumerate(pairs) if pair[0] != DEEPEST or k % 3 == 0}


def matrix() -> list[object]:
    quick = quick_pairs()
    return [
        pytest.param(m, c, id=f"{m}-{c}", marks=() if (m, c) in quick else pytest.mark.slow)
        for m in MODELS
        for c in CLUSTERS
    ]


def test_the_quick_run_covers_models_and_clusters() -> None:
    pairs = quick_pairs()
    assert all(sum(m == model for m, _ in pairs) >= (1 if model == DEEPEST else 3) for model in MODELS)
    assert all(sum(c == name for _, c in pairs) >= 2 for name in CLUSTERS)


@pytest.mark.parametrize(("model", "cluster_name"), matrix())
def test_required(model: str, cluster_name: str) -> None:
    entry = traced(model)
    report = verify(
        entry.model,
        entry.example,
        CLUSTERS[cluster_name],
        loss=entry.loss,
        tolerance=TOLERANCE,
        time_limit=3.0,
    )
    report.require()
    assert not report.random


@pytest.mark.filterwarnings("ignore::hetspmd.errors.MissingRuleWarning")
@pytest.mark.parametrize(
    "model", [pytest.param(m, marks=pytest.mark.slow if m in HEAVY else ()) for m in zoo.FURTHER]
)
def test_further(model: str) -> None:
    entry = traced(model)
    report = verify(
        entry.model, entry.example, CLUSTERS["four-4-2-1-1"], loss=entry.loss, optimizers=("adamw",),
        tolerance=TOLERANCE, time_limit=3.0,
    )  # fmt: skip
    report.require()


@pytest.mark.parametrize("build", [pytest.param(zoo.bert, marks=pytest.mark.slow), zoo.gpt2])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_dropout(build: object, attention: str) -> None:
    """A sharded mask is drawn independently, a replicated one alike; in verification both are the single
    device's, so the step is comparable."""
    torch.manual_seed(0)
    model, example, loss = build(attention, 0.1)  # type: ignore[operator]
    report = verify(model.double().train(), example, CLUSTERS["four-4-2-1-1"], loss=loss, tolerance=TOLERANCE)
    report.require()
    assert report.random


def test_experts_that_the_device_count_does_not_divide() -> None:
    model, example = example_module("bert_moe").small(experts=5)
    verify(model.double(), example, CLUSTERS["four-one-idle"], tolerance=TOLERANCE).require()
