"""Clocks and the system's random bytes that forward asks for: named, with the line."""

from __future__ import annotations

import importlib
import logging
import os
import random
import secrets
import time
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hetspmd.errors import ClockWarning, TraceError
from hetspmd.trace.trace import trace

X = torch.randn(4, 3)


class Scaled(nn.Module):
    """Its loss times a number that Python makes."""

    def __init__(self, number: Callable[[], float]) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.number = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.lin(x) * self.number()).sum()


BYTES: dict[str, Callable[[], float]] = {
    "urandom": lambda: os.urandom(1)[0] / 256.0,
    "system random": lambda: random.SystemRandom().random(),
    "secrets": lambda: float(secrets.randbelow(7)),
    "token": lambda: float(len(secrets.token_hex(3))),
    "uuid": lambda: float(uuid.uuid4().int % 7),
}
CLOCKS: dict[str, Callable[[], float]] = {
    "time": lambda: time.time() % 2.0,
    "nanoseconds": lambda: float(time.time_ns() % 3),
    "monotonic": lambda: time.monotonic() % 2.0,
    "counter": lambda: time.perf_counter() % 2.0,
    "process time": lambda: time.process_time() % 2.0,
}


@pytest.mark.parametrize("name", BYTES)
def test_random_bytes_are_refused_with_their_line(name: str) -> None:
    with pytest.raises(TraceError, match=r"random bytes .*test_clocks\.py:\d+: .*lambda"):
        trace(Scaled(BYTES[name]), (X,), {})


@pytest.mark.parametrize("name", BYTES)
def test_frozen_bytes_are_kept(name: str) -> None:
    assert trace(Scaled(BYTES[name]), (X,), {}, host_randomness="freeze").instructions


@pytest.mark.parametrize("name", CLOCKS)
def test_clocks_are_warned_of_once(name: str) -> None:
    with pytest.warns(ClockWarning, match=r"\(time\.\w+\) at .*test_clocks\.py:\d+: .*lambda") as found:
        trace(Scaled(CLOCKS[name]), (X,), {})
    assert len([w for w in found if w.category is ClockWarning]) == 1


def _seeded_anew() -> float:
    return float(torch.Generator().seed() % 7)


def _of_numpy() -> float:
    return float(np.datetime64("now").astype(int) % 7)


def _today() -> float:
    return float(np.datetime64("today", "D").astype(int) % 7)


def test_a_generator_that_seeds_itself_is_refused() -> None:
    with pytest.raises(TraceError, match=r"random bytes \(torch\.Generator\.seed, in _seeded_anew\)"):
        trace(Scaled(_seeded_anew), (X,), {})
    assert trace(Scaled(_seeded_anew), (X,), {}, host_randomness="freeze").instructions


@pytest.mark.parametrize("number", [_of_numpy, _today])
def test_the_dates_of_numpy_are_warned_of(number: Callable[[], float]) -> None:
    with pytest.warns(ClockWarning, match=rf'\(numpy\.datetime64\("now"\), in {number.__name__}\)'):
        trace(Scaled(number), (X,), {})


def test_a_seed_of_the_models_own_and_a_given_date_are_none() -> None:
    class Seeded:
        def seed(self) -> float:
            return 1.0

    def number() -> float:
        kinds = (torch.Generator, np.datetime64("2020-01-01"))
        return Seeded().seed() * len(kinds)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace(Scaled(lambda: float(np.datetime64("2020-01-01").astype(int) % 7)), (X,), {})
    with pytest.raises(TraceError, match="Generator"):  # it cannot be told from a generator's
        trace(Scaled(number), (X,), {})


def test_what_logs_reads_no_clock() -> None:
    def number() -> float:
        logging.getLogger("of a model").warning("called")
        return 1.0

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace(Scaled(number), (X,), {})


def test_the_functions_are_put_back_also_where_a_trace_fails() -> None:
    before = time.time, time.perf_counter_ns, os.urandom, random._urandom  # type: ignore[attr-defined]  # private

    def fails() -> float:
        assert time.time is not before[0]
        raise ValueError("no number")

    with pytest.raises(Exception, match="no number"):
        trace(Scaled(fails), (X,), {})
    assert (time.time, time.perf_counter_ns, os.urandom, random._urandom) == before  # type: ignore[attr-defined]  # private


LAZY = """
import time
from time import perf_counter
from of_this_test import clock

class Settings:
    read = perf_counter
    kept = staticmethod(time.time)

def since(start, clock=time.monotonic):
    return clock() - start
"""


def test_a_module_that_forward_imports_first_keeps_no_stand_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_this_test.py").write_text("from time import time_ns as clock\n", encoding="utf-8")
    (tmp_path / "first_in_forward.py").write_text(LAZY, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))

    def number() -> float:
        lazy = importlib.import_module("first_in_forward")
        return 1.0 + 0.0 * float(lazy.perf_counter())

    with pytest.warns(ClockWarning, match=r"\(time\.perf_counter\) at .*test_clocks\.py:\d+: "):
        trace(Scaled(number), (X,), {})
    lazy: Any = importlib.import_module("first_in_forward")
    found = lazy.perf_counter, lazy.clock, lazy.Settings.read, lazy.Settings.kept, lazy.since.__defaults__[0]
    assert found == (time.perf_counter, time.time_ns, time.perf_counter, time.time, time.monotonic)
    assert lazy.since(0.0) > 0.0
