"""Measuring what computing and collectives take from each other, on a clock that the test moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hetspmd.cluster.curves import COLLECTIVES
from hetspmd.cluster.devices import Device
from hetspmd.dist.communicator import LoneCommunicator
from hetspmd.profile import slowdowns
from hetspmd.profile.collective_trials import Trial
from hetspmd.profile.grouping import slowed
from hetspmd.profile.session import Session
from hetspmd.profile.slowdowns import Slowdowns, measure_slowdowns

PIECE = 1e-3


class Two(LoneCommunicator):
    """Two ranks that measure the same."""

    world = 2

    def exchange(self, value: Any) -> list[Any]:
        return [value, value]


@dataclass
class Machine:
    """A clock, the collective that is on its way, and what it and computing take from each other."""

    computing: dict[str, float]
    collective: dict[str, float]
    now: float = 0.0
    kind: str = ""
    left: float = 0.0

    def start(self, trial: Trial) -> Machine:
        self.kind, self.left = trial.kind, 1e-4 + trial.nbytes / 1e8
        return self

    def wait(self) -> None:
        self.now += self.left
        self.kind, self.left = "", 0.0

    def settle(self) -> bool:
        return self.left <= 0.0

    def piece(self, *operands: object, out: object) -> None:
        if not self.kind or self.left <= 0:
            self.now += PIECE
            return
        seconds = PIECE * self.computing.get(self.kind, 1.0)
        self.now += seconds
        self.left -= seconds / self.collective.get(self.kind, 1.0)


def measured(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> list[Slowdowns]:
    monkeypatch.setattr(slowdowns, "perf_counter", lambda: machine.now)
    monkeypatch.setattr(slowdowns._Bench, "_start", machine.start)
    monkeypatch.setattr(torch, "mm", machine.piece)
    return measure_slowdowns(Session(Two(), torch.device("cpu")))


def test_what_the_machine_has_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    computing = {kind: 1.1 + 0.2 * i for i, kind in enumerate(COLLECTIVES)}
    collective = {kind: 2.0 - 0.1 * i for i, kind in enumerate(COLLECTIVES)}
    for own in measured(monkeypatch, Machine(computing, collective)):
        assert own.computing == pytest.approx(computing, rel=0.02)
        assert own.collective == pytest.approx(collective, rel=0.02)


def test_noise_is_no_slowdown(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine({"all_reduce": 1.02}, {"all_gather": 1.02})
    assert measured(monkeypatch, machine) == [Slowdowns(), Slowdowns()]


def test_devices_of_a_kind_have_the_median() -> None:
    a, b = Device("a", {"default": 1e9}), Device("b", {"default": 2e9})
    own = [
        Slowdowns({"all_reduce": 1.2}),
        Slowdowns({"all_reduce": 2.0}, {"all_gather": 1.5}),
        Slowdowns(),
        Slowdowns(),
    ]
    own[2] = Slowdowns({"all_reduce": 1.4})
    devices = slowed((a, b, a, a), own)
    assert devices[0] == devices[2] == devices[3]
    assert devices[0].slowdowns("all_reduce") == (1.2, 1.0)
    assert devices[1].slowdowns("all_reduce") == (2.0, 1.0)
    assert devices[1].slowdowns("all_gather") == (1.0, 1.5)
