"""All arms of a small model on two emulated ranks: their losses agree, and memory is what can be counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from emulated.calibrate import calibrate
from emulated.cluster import EmulatedCluster, unavailable
from emulated.compare import compare, table
from emulated.launch import Workers
from emulated.spec import ClusterSpec
from emulated.workloads import mlp
from hetspmd.cluster.cluster import Cluster

REASON = unavailable()


@pytest.mark.slow
@pytest.mark.skipif(REASON is not None, reason=REASON or "")
def test_all_arms(tmp_path: Path) -> None:
    spec = ClusterSpec.of((2, 1), cores=0.9, rate="200Mbit/s")
    with EmulatedCluster(spec) as cluster, Workers(cluster, timeout=300) as workers:
        calibration = calibrate(workers, seconds=0.2, sizes=(4096, 1 << 18), repeats=3)
        calibration.write(tmp_path / "cluster.yaml")
        devices = Cluster.load(tmp_path / "cluster.yaml")
        assert devices == calibration.cluster
        assert devices.network is not None
        assert 1e6 < devices.network.bandwidth < 2e8
        fast, slow = devices.devices
        assert fast.rate("float32") > slow.rate("float32") > 1e8
        rows = compare(workers, devices, "emulated.workloads:mlp", {}, steps=2, folder=tmp_path)
    by_name = {row.arm: row.measured for row in rows}
    assert len(by_name) == 8
    work = mlp()
    size = sum(4 * p.numel() for p in work.model.parameters())
    alone = by_name["fastest device alone"]
    assert 3 * size < alone.peak_bytes[0] < 4 * size  # parameters, gradients, momentum, a small batch
    assert all(peak > alone.peak_bytes[0] / 2 for peak in by_name["DDP even"].peak_bytes)
    fsdp = by_name["FSDP2 even"].peak_bytes
    assert all(peak < by_name["DDP even"].peak_bytes[0] for peak in fsdp)
    assert len(table(rows).splitlines()) == 9
    assert all(len(m.seconds) == 2 and min(m.seconds) > 0 for m in by_name.values())
