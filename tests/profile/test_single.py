"""Short calls timed one by one."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from hetspmd.profile import single
from hetspmd.profile.profile_thresholds import THRESHOLDS
from hetspmd.profile.single import SingleCalls


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_part_of_the_time_counts_as_over_a_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that has a quarter of the time takes four times its CPU time, whenever it stands still."""
    torch.set_num_threads(1)
    used, passed = [0.0], [0.0]
    monkeypatch.setattr(single, "thread_time", lambda: used[0])
    monkeypatch.setattr(single, "perf_counter", lambda: passed[0])

    def work(cpu: float, wall: float) -> None:
        used[0] += cpu
        passed[0] += wall

    monkeypatch.setattr(single, "_nothing", lambda: work(0.0, 4e-3))
    calls = SingleCalls()
    calls._passed = calls._used = 0.0
    assert calls.sample(lambda: work(1e-3, 1e-3 if passed[0] < 1 else 7e-3)).seconds > 0
    found = [calls.sample(lambda: work(1e-3, 4e-3)).seconds for _ in range(200)]
    assert found[-1] == pytest.approx(4e-3, rel=0.05)


def burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_only_the_calls_are_timed() -> None:
    torch.set_num_threads(1)
    calls = SingleCalls()
    assert min(calls.sample(lambda: None).seconds for _ in range(5)) < 1e-4
    found = min(calls.sample(lambda: burn(1e-3)).seconds for _ in range(5))
    pace = calls._passed / calls._used  # above 1 on a machine that others use too
    assert 0.9e-3 < found < 1.5e-3 * max(pace, 1.0)


def test_with_several_threads_the_clock_counts() -> None:
    torch.set_num_threads(2)
    calls = SingleCalls()
    assert calls.sample(lambda: time.sleep(2e-3)).seconds > 1.5e-3


def test_code_and_memory_are_cold() -> None:
    """Before every call other memory is touched, more than the near caches hold: what the last call left is gone.

    How much slower a call is then depends on the machine and on what else it does: that is not asserted.
    """
    torch.set_num_threads(1)
    calls, order = SingleCalls(), []
    cold = calls._cold

    class Touched:
        def add_(self, value: float) -> None:
            cold.add_(value)
            order.append("other memory")

    before = cold.clone()
    calls._cold = Touched()  # type: ignore[assignment]  # it has the one method that is called
    calls.sample(lambda: order.append("call"))
    assert order == ["other memory", "call"] * (len(order) // 2)
    assert order
    assert cold.nbytes == THRESHOLDS.cold_bytes >= 2**21
    assert not torch.equal(cold, before)
