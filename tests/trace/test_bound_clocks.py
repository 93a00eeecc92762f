"""Clocks and random bytes that a model's own names hold since before the trace."""

from __future__ import annotations

import datetime
import functools
import os
import random
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import date
from datetime import datetime as Moment
from os import urandom
from random import Random
from time import gmtime, localtime, perf_counter, strftime
from time import time as now
from timeit import default_timer
from typing import Any, ClassVar
from uuid import uuid1

import pytest
import torch
from torch import nn

from hetspmd.errors import ClockWarning, TraceError
from hetspmd.trace.graph import Graph
from hetspmd.trace.host.bound import Bound
from hetspmd.trace.host.places import Roots
from hetspmd.trace.host.snapshot import Snapshot
from hetspmd.trace.host.stand_ins import StandIn
from hetspmd.trace.trace import trace

X = torch.randn(4, 3)
TICK = time.monotonic


class Settings:
    clock = time.time
    kept = staticmethod(time.perf_counter)


class Timed(nn.Module):
    """Its loss times a number; it holds clocks in many ways."""

    klass: ClassVar[Any] = time.time

    def __init__(self, number: Callable[[Any], float] = lambda _: 1.0) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.number = number
        self.own = time.time
        self.table = {"clock": time.perf_counter}
        self.clocks = [time.monotonic]
        self.part = functools.partial(time.time)
        self.moment = Moment.now

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.lin(x) * self.number(self)).sum()


def by_default(_: Any, clock: Callable[[], float] = time.time) -> float:
    return clock() % 2.0


def by_keyword(_: Any, *, clock: Callable[[], float] = time.time) -> float:
    return clock() % 2.0


def around() -> Callable[[Any], float]:
    clock = time.time
    return lambda _: clock() % 2.0


CLOCKS: dict[str, tuple[str, Callable[[Any], float]]] = {
    "a name": ("time.time", lambda _: now() % 2.0),
    "a counter's name": ("time.perf_counter", lambda _: perf_counter() % 2.0),
    "a name of another module": ("time.perf_counter", lambda _: default_timer() % 2.0),
    "a variable": ("time.monotonic", lambda _: TICK() % 2.0),
    "an attribute": ("time.time", lambda m: m.own() % 2.0),
    "an attribute of the class": ("time.time", lambda m: m.klass() % 2.0),
    "an attribute of another class": ("time.time", lambda _: Settings.clock() % 2.0),
    "a static method": ("time.perf_counter", lambda _: Settings.kept() % 2.0),
    "an item of a dict": ("time.perf_counter", lambda m: m.table["clock"]() % 2.0),
    "an item of a list": ("time.monotonic", lambda m: m.clocks[0]() % 2.0),
    "a partial": ("time.time", lambda m: m.part() % 2.0),
    "a default": ("time.time", by_default),
    "a keyword's default": ("time.time", by_keyword),
    "a variable around": ("time.time", around()),
    "a date's name": ("datetime.datetime.now", lambda _: Moment.now().microsecond / 1e6),
    "a date with a zone": ("datetime.datetime.now", lambda _: Moment.now(tz=datetime.UTC).microsecond / 1e6),
    "a date's module": ("datetime.datetime.now", lambda _: datetime.datetime.now().microsecond / 1e6),
    "today": ("datetime.date.today", lambda _: float(date.today().day)),
    "a method of dates": ("datetime.datetime.now", lambda m: m.moment().microsecond / 1e6),
    "fields": ("time.gmtime", lambda _: float(gmtime().tm_sec)),
    "a text": ("time.strftime", lambda _: float(strftime("%S"))),
    "the system's": ("time.clock_gettime", lambda _: time.clock_gettime(time.CLOCK_REALTIME) % 2.0),
    "of processes": ("os.times", lambda _: os.times().elapsed % 2.0),
}
BYTES: dict[str, tuple[str, Callable[[Any], float]]] = {
    "a name": ("os.urandom", lambda _: urandom(1)[0] / 256.0),
    "a generator without a seed": ("random.Random without a seed", lambda _: Random().random()),
    "a generator of the module": ("random.Random without a seed", lambda _: random.Random().random()),
    "uuid1": ("uuid.uuid1", lambda _: float(uuid.uuid1().int % 7)),
    "a name of uuid1": ("uuid.uuid1", lambda _: float(uuid1().int % 7)),
}
NEITHER: dict[str, Callable[[Any], float]] = {
    "fields of a given time": lambda _: float(localtime(86400.0).tm_sec + gmtime(7.0).tm_sec),
    "a text of a given time": lambda _: float(strftime("%S", (2020, 1, 2, 3, 4, 5, 6, 7, 0))),
    "a given date": lambda _: float(Moment(2020, 1, 2).day + isinstance(Moment(2020, 1, 2), Moment)),
    "a generator with a seed": lambda _: Random(3).random() + random.Random(4).random(),
    "a clock that is held": lambda m: 1.0 if m.own is not None and callable(now) else 0.0,
}


@contextmanager
def all_as_before(model: Timed) -> Iterator[None]:
    def held() -> list[Any]:
        return [
            now, perf_counter, TICK, Moment, datetime, date, urandom, Random, dict(vars(Settings)),
            dict(vars(Timed)), vars(model).copy(), dict(model.table), list(model.clocks), by_default.__defaults__,
            dict(by_keyword.__kwdefaults__ or {}), random.Random.seed, time.gmtime,
        ]  # fmt: skip

    before = held()
    yield
    assert all(a is b or a == b for a, b in zip(held(), before, strict=True))
    assert not [v for v in (*before, *vars(model).values()) if type(v).__module__.startswith("hetspmd")]


def traced(number: Callable[[Any], float], **options: Any) -> Graph:
    model = Timed(number)
    with all_as_before(model):
        return trace(model, (X,), {}, **options)


@pytest.mark.parametrize("name", CLOCKS)
def test_a_clock_by_any_name_is_warned_of_with_its_line(name: str) -> None:
    called, number = CLOCKS[name]
    with pytest.warns(ClockWarning, match=rf"\({called}\) at .*test_bound_clocks\.py:\d+: .*\(") as found:
        graph = traced(number)
    assert len([w for w in found if w.category is ClockWarning]) == 1
    assert not graph.host.writes


def test_an_evaluation_is_warned_of_too() -> None:
    with pytest.warns(ClockWarning, match=r"\(time\.time\)"):
        traced(lambda m: m.own() % 2.0, training=False)


@pytest.mark.parametrize("name", BYTES)
def test_random_bytes_by_any_name_are_refused(name: str) -> None:
    called, number = BYTES[name]
    # Without libuuid, uuid1 draws from Python's generator.
    what = rf"random bytes \({called}\)" + ("|draws from Python's random" if called == "uuid.uuid1" else "")
    with pytest.raises(TraceError, match=rf"({what}) at .*test_bound_clocks\.py:\d+: "):
        traced(number)
    assert traced(number, host_randomness="freeze").instructions


@pytest.mark.parametrize("name", NEITHER)
def test_what_asks_nothing_is_not_spoken_of(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        traced(NEITHER[name])


def test_names_are_put_back_where_a_trace_fails() -> None:
    def fails(model: Any) -> float:
        assert type(now).__module__.startswith("hetspmd")
        raise ValueError(f"no number at {now() + model.own()}")

    with pytest.raises(Exception, match="no number"):
        traced(fails)


def test_two_models_find_the_same_names() -> None:
    """As two threads do that trace: the first to come is the first to go, and neither sees a stand-in."""
    module, place = sys.modules[__name__], (f"globals {__name__}", (".now",))
    before, snapshot = now, Snapshot()
    with ExitStack() as first, ExitStack() as second:
        for stack in (first, second):
            bound = Bound(Roots(Timed()))
            bound.look(*place, now)
            stack.enter_context(bound.placed())
            assert type(now) is StandIn
            snapshot.variable(*place, module)
        first.close()
        assert type(now) is StandIn
    assert now is before
    assert not list(snapshot.changes())
