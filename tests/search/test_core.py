"""The Python surface of the search core (``hetspmd._core``)."""

from __future__ import annotations

import gc
import json
import signal
import threading
import time
from typing import Any

import pytest
from core_problems import hard_problem, small_problem

from hetspmd import _core


def solve(problem: dict[str, Any], **options: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {"time_limit": 10.0, "max_expansions": 10**9, "memory_limit": 2**30}
    result: dict[str, Any] = json.loads(_core.solve(json.dumps(problem), **(defaults | options)))
    return result


def test_optimum_of_a_small_problem() -> None:
    solution = solve(small_problem())
    assert solution["rows"] == [0, 1]
    assert solution["moves"] == [-1, 0]
    assert solution["cost"] == solution["lower_bound"] == 1 + 1 + 4
    assert solution["gap"] == 0.0
    assert solution["stop_reason"] == "optimal"
    assert "conflict" not in solution


def test_infeasible_names_the_culprit() -> None:
    problem = small_problem()
    problem["requirements"][0]["any_of"] = [7]
    problem["tensors"][1]["moves"] = []
    problem["instructions"][1]["rows"].pop(0)
    solution = solve(problem)
    assert solution["stop_reason"] == "infeasible"
    assert solution["rows"] == solution["moves"] == []
    assert solution["cost"] is None
    assert "requirement on tensor 1 (y)" in solution["conflict"]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("instructions", 1, "inputs"), [9], "tensor id 9 does not exist"),
        (("instructions", 1, "inputs"), [1], "cycle"),
        (("instructions", 1, "outputs"), [0], "two producers"),
        (("tensors", 0, "moves", 0, 0), 44, "form 44 is out of range"),
        (("version",), 3, "version 3"),
        (("extra",), 3, "unknown field"),
    ],
)
def test_malformed_problems_are_refused(path: tuple[Any, ...], value: Any, message: str) -> None:
    problem: Any = small_problem()
    place = problem
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        solve(problem)


def test_text_that_is_not_json_is_refused() -> None:
    with pytest.raises(ValueError, match="problem: "):
        _core.solve("{", time_limit=1.0, max_expansions=1, memory_limit=1)


def test_incumbent_is_kept_or_refused() -> None:
    problem = small_problem()
    first = solve(problem)
    again = solve(problem, incumbent=json.dumps(first))
    assert (again["rows"], again["moves"], again["cost"]) == (first["rows"], first["moves"], first["cost"])
    with pytest.raises(ValueError, match="incumbent: f: needs x in form 0"):
        solve(problem, incumbent='{"rows": [0, 0], "moves": [-1, -1]}')


def test_limits_give_the_best_program_with_its_bound() -> None:
    seen: list[tuple[float, int, int | None]] = []
    solution = solve(hard_problem(), time_limit=0.3, progress=lambda *state: seen.append(state))
    assert solution["stop_reason"] == "time_limit"
    assert solution["lower_bound"] < solution["cost"]
    assert 0.0 < solution["gap"] < 1.0
    assert len(seen) > 2
    assert [bound for _, bound, _ in seen] == sorted(bound for _, bound, _ in seen)


def test_an_exception_in_progress_stops_the_search() -> None:
    def progress(seconds: float, lower_bound: int, cost: int | None) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        solve(hard_problem(), progress=progress)


def test_control_c_stops_the_search() -> None:
    text = json.dumps(hard_problem())
    timer = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
    begun: list[float] = []

    def progress(*_: object) -> None:
        if not begun:
            begun.append(time.perf_counter())
            timer.start()

    gc.collect()  # a finalizer that runs when the signal comes would swallow it
    # A shell lets what it starts in the background ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            _core.solve(text, time_limit=30.0, max_expansions=10**9, memory_limit=2**30, progress=progress)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.perf_counter() - begun[0] < 10.0
    timer.join()


def test_other_threads_run_during_the_search() -> None:
    ticks = 0
    done = threading.Event()

    def count() -> None:
        nonlocal ticks
        while not done.wait(0.01):
            ticks += 1

    thread = threading.Thread(target=count)
    thread.start()
    solve(hard_problem(), time_limit=0.5)
    done.set()
    thread.join()
    assert ticks > 10


def test_version() -> None:
    assert _core.version().count(".") == 2
