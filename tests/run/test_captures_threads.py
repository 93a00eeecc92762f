"""HAP(..., cuda_graphs=...) called by several threads, and copies of it that come and go."""

from __future__ import annotations

import copy
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from captures import both, steps_of
from ranks import loss_of
from small_models import Case, case

from hetspmd.errors import CudaGraphsWarning
from hetspmd.run import captured_regions as captured
from hetspmd.run.capture_memory import Held
from hetspmd.run.module import HAP

WAIT = 30.0


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns all the time."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def in_threads(*bodies: Any) -> list[Any]:
    """What each returns. Raises what the first one raised."""
    results: list[Any] = [None] * len(bodies)

    def run(index: int) -> None:
        try:
            results[index] = bodies[index]()
        except BaseException as error:  # of a thread nobody else would hear
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def batches(c: Case) -> list[dict[str, torch.Tensor]]:
    """The case's, and another one."""
    other = {name: t.flip(0) * 2 if t.is_floating_point() else t.flip(0) for name, t in c.batch.items()}
    return [{name: t.clone() for name, t in c.batch.items()}, other]


def evaluated(hap: HAP, batch: dict[str, torch.Tensor]) -> float:
    with torch.no_grad():
        return float(loss_of(hap(**batch)))


@pytest.mark.filterwarnings("ignore::hetspmd.errors.CudaGraphsWarning")
def test_threads_that_evaluate(switching: None) -> None:
    """Each has its own numbers, captured or not."""

    def body(hap: HAP, c: Case) -> Any:
        first = [evaluated(hap, batch) for batch in batches(c) for _ in range(3)]

        def evaluate(batch: dict[str, torch.Tensor]) -> list[float]:
            return [evaluated(hap, batch) for _ in range(60)]

        found = in_threads(*(lambda b=batch: evaluate(b) for batch in batches(c)))
        return [torch.tensor(first), *map(torch.tensor, found)]

    counted = steps_of(both(case("mlp"), body))
    assert sum(counted.values()) == 126
    assert set(counted) <= {"", captured.THREADS}


@pytest.mark.filterwarnings("ignore::hetspmd.errors.CudaGraphsWarning")
def test_a_copy_is_evaluated_while_the_module_trains(switching: None) -> None:
    def body(hap: HAP, c: Case) -> Any:
        averaged = copy.deepcopy(hap)
        optimizer = torch.optim.SGD(hap.parameters(), lr=0.1)

        def train() -> list[float]:
            losses = []
            for _ in range(40):
                optimizer.zero_grad()
                loss = loss_of(hap(**c.batch))
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
            return losses

        def evaluate() -> list[float]:
            return [evaluated(averaged, c.batch) for _ in range(40)]

        return [torch.tensor(losses) for losses in in_threads(train, evaluate)]

    both(case("mlp"), body)


def test_no_thread_is_given_the_others_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order that would do it if both ran captured: one begins, the other one begins and computes, the first
    repeats the captures, and then the other one copies its loss."""
    begun, computed, ended = threading.Event(), threading.Event(), threading.Event()
    begin, copies = captured.Captures._variant, Held.copies

    def slow_to_begin(self: Any, *given: Any) -> Any:
        found = begin(self, *given)
        if threading.current_thread().name == "slow":
            begun.set()
            assert computed.wait(WAIT)
        return found

    def slow_to_copy(self: Held, tensors: Any) -> Any:
        if threading.current_thread().name == "fast":
            computed.set()
            assert ended.wait(WAIT)
        return copies(self, tensors)

    def body(hap: HAP, c: Case) -> Any:
        one, other = batches(c)
        for batch in (one, other):
            for _ in range(2):
                evaluated(hap, batch)
        if not hap.cuda_graphs_report().plans:
            return [torch.tensor([evaluated(hap, one), evaluated(hap, other)])]
        found: dict[str, float] = {}

        def slow() -> None:
            found["slow"] = evaluated(hap, one)
            ended.set()

        def fast() -> None:
            found["fast"] = evaluated(hap, other)
            computed.set()

        with monkeypatch.context() as patched, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            patched.setattr(captured.Captures, "_variant", slow_to_begin)
            patched.setattr(Held, "copies", slow_to_copy)
            threads = [threading.Thread(target=run, name=run.__name__) for run in (slow, fast)]
            threads[0].start()
            assert begun.wait(WAIT)
            threads[1].start()
            for thread in threads:
                thread.join(WAIT)
        assert [w.category for w in caught] == [CudaGraphsWarning], "of the thread that ran without"
        return [torch.tensor([found["slow"], found["fast"]])]

    assert steps_of(both(case("mlp"), body))[captured.THREADS] == 1


def test_copies_that_come_and_go_leave_the_module_its_captures() -> None:
    """Of too many sets of places no more are captured, but what has stayed is."""

    def body(hap: HAP, c: Case) -> Any:
        found = [evaluated(hap, c.batch) for _ in range(captured.STEPS_IN_PLACE + 1)]
        for _ in range(captured.MOST_VARIANTS + 2):
            found += [evaluated(copy.deepcopy(hap), c.batch), evaluated(hap, c.batch)]
        return [torch.tensor(found)]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CudaGraphsWarning)
        counted = steps_of(both(case("mlp"), body))
    assert [w.category for w in caught] == [CudaGraphsWarning]
    assert "make a copy of the module once" in str(caught[0].message)
    assert counted[captured.MOVING] == 3, "the last copies"
    assert counted[""] == captured.STEPS_IN_PLACE + 1 + 2 * (captured.MOST_VARIANTS + 2) - 3
