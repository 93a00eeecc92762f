"""A cluster that was "measured" by formula, and commands run in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from synthetic import devices, fits, rates

from hetspmd.cli.main import main
from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.curves import MeasuredFigures
from hetspmd.profile.fit import fit_network
from hetspmd.profile.measure import Profile


class Outcome(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    def run(*arguments: object) -> Outcome:
        status = main([str(a) for a in arguments])
        return Outcome(status, *capsys.readouterr())

    return run


@pytest.fixture
def profile() -> Profile:
    """Four devices of two kinds; collectives between all and between the two fast ones."""
    found = (*fits(4), *fits(2))
    about = {"backend": "gloo", "torch": "torch " + torch.__version__, "budget": 5.0, "tolerance": 0.05}
    network = fit_network(fits(4))
    cluster = Cluster.load(Cluster(devices(), network, tuple(f.curve for f in found)).to_dict())
    in_order = {(f.curve.kind, f.curve.devices): f for f in found}
    ordered = tuple(in_order[c.kind, c.devices] for c in cluster.curves)
    return Profile(cluster, MeasuredFigures(ordered, rates(), about))
