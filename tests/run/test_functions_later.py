"""Hooks and functions that a model is given after HAP(...), and what they count, keep and read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from beside import Beside, base, train

from hetspmd.run.host_guard import Guard


class Later(Beside):
    """What ``each`` keeps on a model is its own."""

    def __init__(self) -> None:
        super().__init__(lambda m, x: m.last(base(m, x)), last=lambda h: h)

    def __deepcopy__(self, _memo: Any) -> Later:
        made = Later()
        made.load_state_dict(self.state_dict())
        return made


def _kept(m: Any) -> None:
    got: dict[str, torch.Tensor] = {}
    m.up.register_forward_hook(lambda _m, _i, output: got.__setitem__("mean", output.detach().mean()))
    m.look = lambda: round(float(got["mean"]), 5)


def _counted(m: Any) -> None:
    n = 0

    def hook(_m: Any, _i: Any, _o: Any) -> None:
        nonlocal n
        n += 1

    m.up.register_forward_hook(hook)
    m.look = lambda: n


def _counted_before(m: Any) -> None:
    seen = [0]

    def hook(_m: Any, _i: Any) -> None:
        seen[0] += 1

    m.down.register_forward_pre_hook(hook)
    m.look = lambda: seen


def _assigned(m: Any) -> None:
    n = 0

    def last(h: torch.Tensor) -> torch.Tensor:
        nonlocal n
        n += 1
        return h * 2

    m.last = last
    m.look = lambda: n


def _assigned_that_scales(m: Any) -> None:
    n = 1

    def last(h: torch.Tensor) -> torch.Tensor:
        nonlocal n
        n += 1
        return h * n

    m.last = last
    m.look = lambda: n


class Count:
    def __init__(self) -> None:
        self.n = 0

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        self.n += 1
        return h


def _an_object(m: Any) -> None:
    m.last = Count()
    m.look = lambda: m.last.n


def _of_an_object(m: Any) -> None:
    count = Count()
    m.up.register_forward_hook(lambda _m, _i, output: count(output))
    m.look = lambda: count.n


LATER = [_kept, _counted, _counted_before, _assigned, _assigned_that_scales, _an_object, _of_an_object]


@pytest.mark.filterwarnings("ignore::hetspmd.errors.PlanPerValueWarning")
@pytest.mark.parametrize("add", LATER)
def test_what_is_added_later_counts_and_keeps(add: Callable[[Any], None]) -> None:
    def each(model: Any, step: int) -> None:
        if step == 1:
            add(model)

    single, ranks = train(Later, each, steps=4, look=lambda m: m.look())
    for rank in ranks:
        torch.testing.assert_close(rank.losses, single.losses, rtol=1e-5, atol=1e-7)
        assert rank.seen == single.seen


def test_a_function_that_takes_the_place_of_another_has_variables_of_its_own() -> None:
    def add(m: Any, step: int) -> None:
        if step in (1, 3):
            m.counts = [*getattr(m, "counts", []), _counting(m)]

    single, ranks = train(Later, add, steps=5, look=lambda m: [count() for count in m.counts])
    assert single.seen == [2, 2]
    assert all(rank.seen == single.seen for rank in ranks)


def _counting(m: Any) -> Callable[[], int]:
    n = 0

    def last(h: torch.Tensor) -> torch.Tensor:
        nonlocal n
        n += 1
        return h

    m.last = last
    return lambda: n


def test_a_hook_that_is_taken_off_and_put_on_again() -> None:
    def each(m: Any, step: int) -> None:
        if step == 0:
            m.counts, m.hooks, m.handles = [], [], []
            for _ in range(2):
                hook, count = _hook()
                m.counts.append(count)
                m.hooks.append(hook)
        for handle in m.handles:
            handle.remove()
        m.handles = [m.up.register_forward_hook(m.hooks[step % 2])]

    single, ranks = train(Later, each, steps=6, look=lambda m: [count() for count in m.counts])
    assert single.seen == [3, 3]
    assert all(rank.seen == single.seen for rank in ranks)


def _hook() -> tuple[Callable[..., None], Callable[[], int]]:
    n = 0

    def hook(_m: Any, _i: Any, _o: Any) -> None:
        nonlocal n
        n += 1

    return hook, lambda: n


def test_what_a_hook_reads_is_compared_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[int] = []
    whole = Guard.__init__

    def counted(self: Guard, *args: Any, **kwargs: Any) -> None:
        traced.append(1)
        whole(self, *args, **kwargs)

    monkeypatch.setattr(Guard, "__init__", counted)

    def each(model: Any, step: int) -> None:
        if step == 0:
            model.k = k = [2.0]
            model.up.register_forward_hook(lambda _m, _i, output: output * k[0])
        if step == 4:
            model.k[0] = 3.0

    single, ranks = train(Later, each, steps=6)
    for rank in ranks:
        torch.testing.assert_close(rank.losses, single.losses, rtol=1e-5, atol=1e-7)
    assert len(traced) <= 4 * 4  # the plan that was given, with the hook, and with another value of it
