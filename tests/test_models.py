"""Every model on every cluster: what the compiler decides equals the single device (HAP 2.2).

In float64 the loss, every gradient and every parameter after two SGD and two AdamW steps agree to 1e-9; the
parameters of a model that amplifies rounding (MNASNet, EfficientNet) to what one rounding changes on one device.
The quick run has each required model on one cluster, the slow one on another, so that each cluster has one or two
models; and the further models are on one cluster.
"""

from __future__ import annotations

import pytest
import torch

import zoo
from hetspmd.cluster.cluster import Cluster
from hetspmd.verify.comparison import verify
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

LIGHT = {"dlrm", "unet", "nn-transformer", "clip", "opt"}
"""Further models that are in the quick run, too."""


def pairs(each: int) -> set[tuple[str, str]]:
    """Each model on so many clusters, chosen by counting on, so that each cluster has some models."""
    clusters = list(CLUSTERS)
    return {(m, clusters[(3 * i + k * 4) % len(clusters)]) for i, m in enumerate(MODELS) for k in range(each)}


QUICK, ALL = 1, 2


def matrix() -> list[object]:
    quick, chosen = pairs(QUICK), pairs(ALL)
    return [
        pytest.param(m, c, id=f"{m}-{c}", marks=() if (m, c) in quick else pytest.mark.slow)
        for m in MODELS
        for c in CLUSTERS
        if (m, c) in chosen
    ]


def test_the_runs_cover_models_and_clusters() -> None:
    for each in (QUICK, ALL):
        assert all(sum(m == model for m, _ in pairs(each)) == each for model in MODELS)
    assert {c for _, c in pairs(ALL)} == set(CLUSTERS)
    assert pairs(QUICK) < pairs(ALL)


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
    "model", [pytest.param(m, marks=() if m in LIGHT else pytest.mark.slow) for m in zoo.FURTHER]
)
def test_further(model: str) -> None:
    entry = traced(model)
    report = verify(
        entry.model, entry.example, CLUSTERS["four-4-2-1-1"], loss=entry.loss, optimizers=("adamw",),
        tolerance=TOLERANCE, time_limit=3.0,
    )  # fmt: skip
    report.require()


@pytest.mark.parametrize("build", [pytest.param(zoo.bert, marks=pytest.mark.slow), zoo.gpt2])
@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
def test_dropout(build: object, attention: str) -> None:
    """A sharded mask is drawn independently, a replicated one alike; in verification both are the single
    device's, so the step is comparable."""
    torch.manual_seed(0)
    model, example, loss = build(attention, 0.1)
    report = verify(model.double().train(), example, CLUSTERS["four-4-2-1-1"], loss=loss, tolerance=TOLERANCE)
    report.require()
    assert report.random


def test_experts_that_the_device_count_does_not_divide() -> None:
    model, example = example_module("bert_moe").small(experts=5)
    verify(model.double(), example, CLUSTERS["four-one-idle"], tolerance=TOLERANCE).require()
