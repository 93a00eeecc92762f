"""Shares of the batch, the check of losses, and the fit of the network: no root needed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from emulated.arms import Measured, check_losses, proportional_rows
from emulated.calibrate import KINDS, Calibration, Sample, coefficients, fitted
from emulated.spec import EmulationError
from emulated.workloads import bert, mlp, vgg
from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.devices import Device


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=8), st.integers(8, 200))
def test_rows_are_all_there_and_near_their_share(shares: list[float], rows: int) -> None:
    found = proportional_rows(rows, shares)
    assert sum(found) == rows
    assert min(found) >= 1
    for count, share in zip(found, shares, strict=True):
        assert count <= max(1, rows * share / sum(shares) + 1)


def test_rows_of_known_shares() -> None:
    assert proportional_rows(32, [4, 2, 1, 1]) == [16, 8, 4, 4]
    assert proportional_rows(4, [97, 1, 1, 1]) == [1, 1, 1, 1]
    with pytest.raises(EmulationError, match="3 rows for 4 ranks"):
        proportional_rows(3, [1, 1, 1, 1])


def measured(*losses: float) -> Measured:
    return Measured((1.0, 5.0, 2.0), losses, (0,), (0,))


def test_losses_must_agree() -> None:
    assert measured(1.0).median == 2.0
    assert check_losses({"a": measured(2.0, 1.0), "b": measured(2.0, 1.0005)}) == pytest.approx(5e-4)
    with pytest.raises(EmulationError, match=r"step 1: the loss is 1.0 with a and 1.1 with b"):
        check_losses({"a": measured(2.0, 1.0), "b": measured(2.0, 1.1)})
    with pytest.raises(EmulationError, match="nan with b"):
        check_losses({"a": measured(2.0), "b": measured(float("nan"))})
    with pytest.raises(EmulationError, match="1 steps, b 2"):
        check_losses({"a": measured(2.0), "b": measured(2.0, 1.0)})


@pytest.mark.parametrize("world", [2, 4])
def test_the_fit_finds_the_network_that_made_the_samples(world: int) -> None:
    latency, bandwidth = 3e-3, 25e6
    samples = []
    for kind in KINDS:
        for size in (4096, 1 << 20):
            a, c = coefficients(kind, world)
            samples.append(Sample(kind, size, a * latency + c * size / bandwidth))
    network = fitted(samples, world)
    assert network.latency == pytest.approx(latency)
    assert network.bandwidth == pytest.approx(bandwidth)


def test_a_fit_below_zero_is_none() -> None:
    network = fitted([Sample("all_gather", 1000, 1e-6), Sample("all_gather", 1_000_000, 1e-2)], 2)
    assert network.latency > 0
    assert network.bandwidth > 0


def test_the_cluster_file_reads_back() -> None:
    devices = tuple(Device(f"rank{i}", {"default": 1e9 * (i + 1)}) for i in range(2))
    samples = (Sample("all_reduce", 4096, 0.01), Sample("all_reduce", 1 << 20, 0.1))
    cluster = Cluster(devices, fitted(samples, 2))
    text = Calibration(cluster, samples).text()
    assert Cluster.from_text(text) == cluster
    assert "# all_reduce, 4096: 0.010000" in text


@pytest.mark.parametrize("work", [mlp(batch=6), vgg(4, 4, 16, 16), bert(3, 16, 1, 32, 50)])
def test_weighted_parts_have_the_gradient_of_the_whole(work) -> None:
    whole = work.model(**work.batch)
    gradients = torch.autograd.grad(whole, list(work.model.parameters()))
    total = [torch.zeros_like(g) for g in gradients]
    loss = 0.0
    for rows in (slice(0, 1), slice(1, None)):
        part = {name: value[rows] for name, value in work.batch.items()}
        share = float(work.weights[rows].sum() / work.weights.sum())
        value = work.model(**part) * share
        loss += value.item()
        for sum_, g in zip(total, torch.autograd.grad(value, list(work.model.parameters())), strict=True):
            sum_ += g
    assert loss == pytest.approx(whole.item(), rel=1e-5)
    for got, want in zip(total, gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)
    for name in work.blocks:
        assert sum(p.numel() for p in work.model.get_submodule(name).parameters()) > 0
