"""The rates of a device that something else slows down for a while."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hetspmd.profile import device
from hetspmd.profile import timing as sampling

CALL = 0.02
"""Seconds of every call here."""


class Clock:
    """A clock on which calls take time: ``slow`` times as much within ``spell`` (seconds from, to)."""

    def __init__(self, spell: tuple[float, float], slow: float) -> None:
        self.now, self.spell, self.slow = 0.0, spell, slow

    def __call__(self) -> float:
        return self.now

    def work(self) -> None:
        start, end = self.spell
        self.now += CALL * (self.slow if start <= self.now < end else 1.0)

    def maker(self, amount: float) -> Callable[..., tuple[float, Callable[[], None]]]:
        return lambda *_: (amount, self.work)


@pytest.mark.parametrize("start", [0.0, 3.0, 11.0, 16.0, 25.0])
def test_a_slow_spell_falls_on_no_measurement_alone(start: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven seconds of thirty, three times as slow, whenever they come: every rate is what it is without them."""
    clock = Clock((start, start + 7.0), 3.0)
    monkeypatch.setattr(device, "perf_counter", clock)
    monkeypatch.setattr(sampling, "perf_counter", clock)
    kinds = {"_matmul": 1e9, "_convolution": 2e9, "_memory": 3e9, "_launch": 300.0}
    for name, amount in kinds.items():
        monkeypatch.setattr(device, name, clock.maker(amount))
    monkeypatch.setattr(device, "_optimizer", lambda *_: (4e9, clock.work))
    # Nothing is that tight: every sample of the budget is taken.
    found = device.measure_device(0, torch.device("cpu"), 30.0, -1.0, ("float32",))
    assert len(found) == 5
    for rate in found:
        assert rate.seconds == pytest.approx(CALL), rate
        assert rate.low <= rate.seconds <= rate.high


def test_what_a_device_refuses_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = device._matmul

    def refusing(at: torch.device, dtype: str, long: float) -> device.Case:
        if dtype == "float16":
            raise RuntimeError("not implemented for 'Half'")
        return real(at, dtype, long)

    monkeypatch.setattr(device, "_matmul", refusing)
    found = device.measure_device(3, torch.device("cpu"), 0.5, 0.5, ("float32", "float16"))
    kinds = {(rate.what, rate.dtype) for rate in found}
    assert ("matmul", "float16") not in kinds
    assert {("matmul", "float32"), ("memory", "float16"), ("launch", "float32")} <= kinds
    assert all(rate.rank == 3 and rate.samples >= 9 and rate.seconds > 0 for rate in found)
    monkeypatch.setattr(device, "_memory", lambda *_: (_ for _ in ()).throw(RuntimeError("broken")))
    with pytest.raises(RuntimeError, match="broken"):
        device.measure_device(0, torch.device("cpu"), 0.5, 0.5, ("float32",))
