"""Devices are left idle where that is faster; no plan loses to the fastest device alone."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import hetspmd
from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.devices import Device, Network
from hetspmd.cost.model import CostModel
from hetspmd.optimize.compile_options import CompileOptions
from hetspmd.optimize.compiler import compile_plan
from hetspmd.placement import shard
from hetspmd.ratios.ratio_thresholds import THRESHOLDS
from hetspmd.ratios.starts import device_subsets
from hetspmd.trace.trace import split_example
from workbench import cluster, traced

MODELS = ("gpt2", "vit", "bert-moe")
NETWORKS = [(1e12, 1e-9), (1e6, 1e-3), (1e3, 0.1)]
SPEEDS = [(4, 2, 1, 1), (1, 8)]


def on(network: tuple[float, float], *speeds: float) -> Cluster:
    return Cluster(cluster(*speeds).devices, Network(*network))


def compiled(name: str, devices: Cluster) -> hetspmd.Plan:
    entry = traced(name)
    return hetspmd.compile(entry.model, entry.example, devices, loss=entry.loss)


@pytest.mark.parametrize(
    "name", ["vit", *(pytest.param(m, marks=pytest.mark.slow) for m in MODELS if m != "vit")]
)
def test_never_slower_than_the_fastest_device_alone(name: str) -> None:
    seen = set()
    for network, speeds in itertools.product(NETWORKS, SPEEDS):
        plan = compiled(name, on(network, *speeds))
        graph = plan.graph
        assert graph.loss is not None
        sent = {graph.loss, *(r.tensor for r in plan.program.outputs if r.form != shard(0))}
        broadcast = sum(network[1] + graph.tensors[t].nbytes / network[0] for t in sent)
        alone = plan.baselines["fastest_device_alone"]
        assert plan.cost.step_seconds <= (alone + broadcast) * (1 + 1e-12)
        if plan.idle:
            assert plan.cost.step_seconds < plan.baselines["all_devices"]
            assert sum(plan.shares) == pytest.approx(1.0)
            assert all(plan.shares[rank] == 0.0 for rank in plan.idle)
        seen.add(len(plan.active) == 1)
    assert seen == {True, False}, "dear networks leave one device, cheap ones several"


@pytest.mark.parametrize("seed", [pytest.param(s, marks=pytest.mark.slow if s > 1 else ()) for s in range(8)])
def test_never_slower_than_a_known_program(seed: int) -> None:
    """On random clusters: no slower than data parallelism (proportional, even), tensor parallelism and ZeRO."""
    dice = np.random.default_rng(seed)
    devices = [
        {"name": f"d{j}", "flops": float(10 ** dice.uniform(8, 11)), "launch": float(10 ** dice.uniform(-8, -5)),
         "memory_bandwidth": float(10 ** dice.uniform(8, 11)), "memory": "16GiB"}
        for j in range(dice.integers(2, 6))
    ]  # fmt: skip
    network = {"bandwidth": float(10 ** dice.uniform(5, 11)), "latency": float(10 ** dice.uniform(-7, -3))}
    plan = compiled(
        ("gpt2", "vit", "bert-moe", "dlrm")[seed % 4], Cluster.load({"devices": devices, "network": network})
    )
    known = {k: s for k, s in plan.baselines.items() if k not in ("fastest_device_alone", "all_devices")}
    assert {"data_parallel_proportional", "data_parallel_even"} <= set(known)
    assert plan.cost.step_seconds <= min(known.values()) * (1 + 1e-12)


def test_a_subset_of_several_devices_is_found() -> None:
    """Two fast devices share the work; two that are a thousand times slower would only hold them up."""
    plan = compiled("gpt2", on((1e9, 1e-4), 1000, 0.5, 1000, 0.5))
    assert plan.active in {(0, 2), (0,)}
    wide = compiled("gpt2", on((1e12, 1e-5), 4, 0.001, 4, 0.001))
    assert wide.active == (0, 2)
    assert wide.shares[0] == pytest.approx(0.5, abs=0.2)
    assert len(wide.parameter_layout()) == len(wide.graph.parameters)


def test_plans_like_another_keep_its_active_devices() -> None:
    entry = traced("gpt2")
    args, kwargs = split_example(entry.example)
    devices, options = on(NETWORKS[-1], 4, 2, 1), CompileOptions(loss=entry.loss)
    plan = compile_plan(entry.model, args, kwargs, devices, options)
    assert plan.active == (0,)
    again = compile_plan(entry.model, args, kwargs, devices, options, training=False, like=plan)
    assert again.active == (0,)
    assert again.cost.memory_bytes[1:] == (0, 0)


def test_a_device_that_lacks_memory_is_not_left_alone() -> None:
    free = compiled("gpt2", on((1e9, 0.5), 4, 2, 1))
    assert free.active == (0,)
    needed = free.cost.memory_bytes[0]
    fast, *others = cluster(4, 2, 1).devices
    small = Device(fast.name, fast.flops, needed - 1, fast.memory_bandwidth, fast.launch)
    plan = compiled("gpt2", Cluster((small, *others), Network(1e9, 0.5)))
    everyone = all(n <= d.memory for n, d in zip(plan.cost.memory_bytes, plan.cluster.devices, strict=True))
    assert everyone
    assert plan.active == (0, 1, 2)


def test_plans_are_stored_and_the_same_every_time() -> None:
    devices = on(NETWORKS[-1], 4, 2, 1)
    plan = compiled("gpt2", devices)
    assert plan.idle == (1, 2)
    text = plan.to_json()
    assert compiled("gpt2", devices).to_json() == text
    again = hetspmd.Plan.from_json(text)
    assert again.to_json() == text
    assert again.digest == plan.digest
    assert plan.with_step(active=(2,)).digest != plan.digest


def test_teams_are_prefixes_by_speed() -> None:
    theory = traced("gpt2").theory
    assert device_subsets(CostModel(theory, cluster(1, 4, 2, 4))) == ((1,), (1, 3), (1, 2, 3))
    assert device_subsets(CostModel(theory, cluster(2, 2, 2))) == ((0,),)
    assert device_subsets(CostModel(theory, cluster(2))) == ()
    many = device_subsets(CostModel(theory, cluster(*range(1, 41))))
    assert len(many) == THRESHOLDS.device_subsets
    assert many[0] == (39,)
    assert many[-1] == tuple(range(1, 40))


def test_the_lower_bound_is_below_every_plan() -> None:
    for name, speeds in itertools.product(MODELS[:2], SPEEDS):
        plan = compiled(name, on(NETWORKS[0], *speeds))
        bound = plan.costs.lower_bound()
        assert 0 < bound <= plan.cost.step_seconds
        alone = CostModel(plan.theory, plan.cluster.part([0]))
        assert alone.lower_bound() == pytest.approx(float(alone.alone()[0]))
