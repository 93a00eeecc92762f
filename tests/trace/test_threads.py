"""Threads: a forward that hands work to others is refused by name, and several threads may trace at a time."""

from __future__ import annotations

import _thread
import multiprocessing.pool
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from test_clocks import Scaled
from torch import nn

from hetspmd.errors import HetspmdError, TraceError
from hetspmd.trace.trace import trace

X = torch.randn(4, 3)
STATE = {"k": 2.0}
POOL = ThreadPoolExecutor(1)
OTHERS = multiprocessing.pool.ThreadPool(1)
submit = POOL.submit


@pytest.fixture(scope="module", autouse=True)
def pools() -> Iterator[None]:
    POOL.submit(STATE.get, "k").result()
    yield
    POOL.shutdown()
    OTHERS.terminate()


def number() -> float:
    return STATE["k"]


def _by_a_thread(make: Callable[[Callable[[], None]], Any] | None = None) -> float:
    found: list[float] = []

    def put() -> None:
        found.append(number())

    started = (make or (lambda target: threading.Thread(target=target)))(put)
    started.start()
    started.join()
    return found[0]


def _by_number() -> float:
    done = threading.Event()
    _thread.start_new_thread(done.set, ())
    done.wait()
    return number()


def _by_a_pool() -> float:
    with ThreadPoolExecutor(1) as pool:
        return next(pool.map(lambda _: number(), [0]))


WAYS: dict[str, Callable[[], float]] = {
    "thread": _by_a_thread,
    "timer": lambda: _by_a_thread(lambda target: threading.Timer(0.0, target)),
    "number": _by_number,
    "pool": _by_a_pool,
    "pool that was made before": lambda: POOL.submit(number).result(),
    "by another name": lambda: submit(number).result(),
    "other pool": lambda: OTHERS.apply(number),
    "map of the other pool": lambda: OTHERS.map(lambda _: number(), [0])[0],
}


@pytest.mark.parametrize("name", WAYS)
def test_work_for_other_threads_is_refused_with_its_line(name: str) -> None:
    with pytest.raises(
        TraceError, match=r"hands work to another thread or process \(.*test_threads\.py:\d+: "
    ):
        trace(Scaled(WAYS[name]), (X,), {}, host_randomness="freeze")
    assert WAYS[name]() == 2.0, "outside of a trace nothing is refused"


def test_it_is_refused_where_the_error_is_caught() -> None:
    def caught() -> float:
        try:
            return _by_a_thread()
        except Exception:
            return 1.0

    with pytest.raises(TraceError, match="hands work to another thread"):
        trace(Scaled(caught), (X,), {})


@pytest.fixture
def package(request: pytest.FixtureRequest) -> Iterator[types.ModuleType]:
    """A module of this name of an installed package, whose function starts a thread."""
    made = types.ModuleType(request.param)
    made.__file__ = f"/packages/site-packages/{request.param.replace('.', '/')}.py"
    exec(
        "import threading\ndef beat():\n    threading.Thread(target=int).start()\n    return 1.0",
        made.__dict__,
    )
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]


@pytest.mark.parametrize("package", ["threading_package"], indirect=True)
def test_threads_that_packages_start_are_their_own(package: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace(Scaled(package.beat), (X,), {})


@pytest.mark.parametrize("package", ["torch.nn.parallel.threading_package"], indirect=True)
def test_modules_in_parallel_are_refused(package: Any) -> None:
    """``parallel_apply`` itself wants GPUs."""

    class Parallel(Scaled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.lin(x) * package.beat()).sum()

    with pytest.raises(TraceError, match=r"hands work to another thread .*package\.beat\(\)\)\.sum"):
        trace(Parallel(number), (X,), {})


def test_threads_that_work_meanwhile_are_no_part_of_a_trace() -> None:
    over = threading.Event()

    def work() -> None:
        while not over.wait(0.001):
            _by_a_thread()

    beside = threading.Thread(target=work)
    beside.start()
    try:
        for _ in range(4):
            trace(Scaled(number), (X,), {})
    finally:
        over.set()
        beside.join()


def test_many_threads_may_trace() -> None:
    interval, count = sys.getswitchinterval(), 8
    together = threading.Barrier(count)

    def traced(width: int) -> list[int]:
        model = nn.Sequential(nn.Linear(3, 3 + width), nn.ReLU(), nn.Linear(3 + width, 2))
        together.wait()
        graphs = [trace(model, (X,), {}, loss=lambda m, x: m(x).sum()) for _ in range(3)]
        return [len(graph.instructions) for graph in graphs]

    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(count) as pool:
            found = list(pool.map(traced, range(count)))
    except HetspmdError as error:
        raise AssertionError("a trace met another one") from error
    finally:
        sys.setswitchinterval(interval)
    assert len({tuple(counts) for counts in found}) == 1
