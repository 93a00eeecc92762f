"""Random modules that count, cache, keep, draw, anneal and branch beside their graph: equal, or refused by name."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from beside import Trained, train
from torch import nn
from torch.nn import functional as F

from hetspmd.errors import HetspmdError

Part = Callable[[Any, torch.Tensor], torch.Tensor]


def counts(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.calls += 1
    return h


def turns(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.turn = (m.turn + 1) % 3
    return h * (1 + m.turn)


def caches(m: Any, h: torch.Tensor) -> torch.Tensor:
    if m.cache is None:
        m.cache = torch.linspace(0, 1, 24)
    return h + m.cache


def caches_by_size(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.sizes.setdefault(h.shape[1], torch.full((24,), 0.5))
    return h * m.sizes[h.shape[1]]


def keeps(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.kept, m.mean = h.detach(), h.detach().abs().mean()
    return h


def remembers(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.history.append(h.shape[1])
    return h * (1 + len(m.history) % 2)


def grows(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.grown.append(h)
    return h


def carries(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.state = 0.5 * m.state + h.detach().mean(0)
    return h + m.state


def tosses(m: Any, h: torch.Tensor) -> torch.Tensor:
    return h * 2 if random.random() < 0.5 else h


def anneals(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.weight *= 0.9
    return h * m.weight


def starts(m: Any, h: torch.Tensor) -> torch.Tensor:
    if m.started:
        return h
    m.started = True
    return h * 3


def updates(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.average = m.average * 0.9 + 0.1
    return h * m.average


def asks(m: Any, h: torch.Tensor) -> torch.Tensor:
    return torch.sin(h) if m.training and m.calls % 2 else F.leaky_relu(h, m.slope)


def makes(m: Any, h: torch.Tensor) -> torch.Tensor:
    if not hasattr(m, "made"):
        m.made = 2.0
    return h * m.made * m.scale


def swaps(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.first, m.second = m.second, m.first
    return h * m.first


def slides(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.window.append(float(len(m.window)))
    return h + sum(m.window) * 0.01


class Slotted:
    """Its numbers have slots, and one is computed from another."""

    __slots__ = ("k", "level")
    factor = 1.0

    def __init__(self) -> None:
        self.k, self.level = 1.0, 2.0

    @property
    def half(self) -> float:
        return self.level / 2


GAIN = 1.0


def slots(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.slotted.k += 0.25
    return h * m.slotted.k


def properties(m: Any, h: torch.Tensor) -> torch.Tensor:
    return h * m.slotted.half


def of_arrays(m: Any, h: torch.Tensor) -> torch.Tensor:
    return h * float(m.table[1]) + torch.as_tensor(m.table).sum()


def of_classes(m: Any, h: torch.Tensor) -> torch.Tensor:
    return h * type(m.slotted).factor


def of_globals(m: Any, h: torch.Tensor) -> torch.Tensor:
    return h * GAIN


PARTS: tuple[Part, ...] = (
    counts, turns, caches, caches_by_size, keeps, remembers, grows, carries, tosses, anneals, starts, updates, asks,
    makes, swaps, slides, slots, properties, of_arrays, of_classes, of_globals,
)  # fmt: skip


class Random(nn.Module):
    def __init__(self, parts: list[Part]) -> None:
        super().__init__()
        self.up, self.down, self.parts = nn.Linear(12, 24), nn.Linear(24, 12), parts
        self.calls, self.turn, self.weight, self.slope, self.scale = 0, 0, 1.0, 0.1, 1.0
        self.first, self.second, self.started, self.cache = 1.0, 2.0, False, None
        self.sizes: dict[int, torch.Tensor] = {}
        self.history: list[int] = []
        self.grown: list[torch.Tensor] = []
        self.window: collections.deque[float] = collections.deque(maxlen=3)
        self.state = torch.zeros(24)
        self.register_buffer("average", torch.ones(()))
        self.slotted, self.table = Slotted(), np.array([1.0, 2.0], dtype=np.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        for part in self.parts:
            hidden = part(self, hidden)
        return self.down(hidden).square().mean()


def seen(m: Any) -> Any:
    """What is left of the model, beside its parameters: numbers that are computed, and all else."""
    cache = None if m.cache is None else m.cache.tolist()
    numbers = [float(v) for v in (m.weight, m.average, m.first, m.second, getattr(m, "mean", 0.0))]
    own = m.calls, m.turn, m.started, m.history, list(m.window)
    return numbers, (*own, cache, sorted(m.sizes), hasattr(m, "made"), m.slotted.k)


def _share(gain: float, factor: float) -> None:
    """Set what the threads of the ranks have in common: the first of them does, before any of them traces."""
    if (GAIN, Slotted.factor) != (gain, factor):
        globals()["GAIN"], Slotted.factor = gain, factor


def check(seed: int) -> None:
    chosen = random.Random(seed)
    parts = [chosen.choice(PARTS) for _ in range(chosen.randint(1, 4))]
    outside = chosen.randrange(8)

    def each(model: Any, step: int) -> None:
        if outside == 1:
            model.scale = 1.0 + step
        elif outside == 2 and step == 2:
            model.slope = 0.5
        elif outside == 3 and step == 1:
            model.started = False
        elif outside == 4:
            model.table[step % 2] += 0.5
        elif outside == 5:
            model.slotted.level = 2.0 + step
        _share(1.0 + (outside == 6 and step > 1), 1.0 + (outside == 7 and step > 1))

    single, refusal = None, ""
    ranks: list[Trained] = []
    try:
        single, ranks = train(lambda: Random(parts), each, look=seen)
    except HetspmdError as error:
        refusal = str(error)
    if single is None:
        assert any(part in (grows, carries, tosses) for part in parts), refusal
        assert "test_beside_random.py:" in refusal
    for rank in ranks:
        assert single is not None
        torch.testing.assert_close(rank.losses, single.losses, rtol=1e-4, atol=1e-6)
        numbers, rest = rank.seen
        torch.testing.assert_close(numbers, single.seen[0], rtol=1e-4, atol=1e-6)
        assert rest == single.seen[1]


pytestmark = [
    pytest.mark.filterwarnings("ignore::hetspmd.errors.PlanPerValueWarning"),
    pytest.mark.filterwarnings("ignore::hetspmd.errors.KeptRowsWarning"),
]


@pytest.mark.parametrize("seed", range(24))
def test_random_modules_are_equal_or_refused(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(24, 500, 34))
def test_many_random_modules_are_equal_or_refused(start: int) -> None:
    """With those above five hundred, in parts of half a minute."""
    for seed in range(start, start + 34):
        check(seed)
