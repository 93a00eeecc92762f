"""Attributes of every kind and submodule are part of a plan; hooks count once; coins of torch are refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from beside import Beside, X, base, equal, train
from small_plans import cluster
from torch import nn

from hetspmd.errors import TraceError
from hetspmd.run.module import HAP


class Divided(nn.Module):
    """A submodule with a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / self.temperature


def _through(part: str) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    return lambda m, x: m.down(getattr(m, part)(torch.tanh(m.up(x)))).square().mean()


Case = tuple[Any, Callable[[], dict[str, Any]], Callable[[Any, int], object], int]
ATTRIBUTES: dict[str, Case] = {
    "a string": (
        lambda m, x: base(m, x) if m.reduction == "mean" else m.down(m.up(x)).square().sum() * 1e-3,
        lambda: {"reduction": "mean"}, lambda m, late: setattr(m, "reduction", "sum" if late else "mean"), 2,
    ),
    "an entry of a dict": (
        lambda m, x: base(m, x) * m.weights["main"], lambda: {"weights": {"main": 1.0}},
        lambda m, late: m.weights.update(main=3.0 if late else 1.0), 2,
    ),
    "a tuple": (
        lambda m, x: sum((base(m, x) * k for k in m.betas), torch.zeros(())), lambda: {"betas": (0.9, 0.1)},
        lambda m, late: setattr(m, "betas", (0.5, 0.2, 0.1) if late else (0.9, 0.1)), 2,
    ),
    "an entry of a tuple in a dict": (
        lambda m, x: base(m, x) * m.table["k"][1], lambda: {"table": {"k": (1.0, 2.0)}},
        lambda m, late: m.table.update(k=(1.0, 3.0) if late else (1.0, 2.0)), 2,
    ),
    "a submodule's number": (
        _through("scaled"), lambda: {"scaled": nn.Sequential(nn.Identity(), Divided())},
        lambda m, late: setattr(m.scaled[1], "temperature", 3.0 if late else 1.0), 2,
    ),
    "p of a dropout": (
        _through("drop"), lambda: {"drop": nn.Dropout(0.0)},
        lambda m, late: setattr(m.drop, "p", 1.0 if late else 0.0), 2,
    ),
    "p of a dropout in two layers": (
        lambda m, x: _through("drop")(m, m.drop(x)), lambda: {"drop": nn.Dropout1d(1.0)},
        lambda m, late: setattr(m.drop, "p", 0.0 if late else 1.0), 2,
    ),
    "the slope of an activation": (
        _through("act"), lambda: {"act": nn.LeakyReLU(0.1)},
        lambda m, late: setattr(m.act, "negative_slope", 5.0 if late else 0.1), 2,
    ),
    "a mode of one submodule": (
        _through("norm"), lambda: {"norm": nn.BatchNorm1d(24)}, lambda m, late: m.norm.train(not late), 2,
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::hetspmd.errors.PlanPerValueWarning")
@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_that_changes_is_as_on_one_device(name: str) -> None:
    """In the third of four steps: two before, two after it."""
    forward, members, change, plans = ATTRIBUTES[name]
    single = equal(lambda: Beside(forward, **members()), lambda m, i: change(m, i >= 2), plans=plans)
    before, after = single.losses[1] - single.losses[0], single.losses[2] - single.losses[1]
    assert abs(after) > 3 * abs(before), "the change shows"


def test_another_p_of_a_dropout_drops_another_part() -> None:
    """Which elements are dropped is a plan's own; how many is the module's."""

    def make() -> nn.Module:
        def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
            return m.drop(torch.ones(64, 64) + 0.0 * m.up(x).sum()).count_nonzero() / 4096 + 0.0 * base(m, x)

        return Beside(forward, drop=nn.Dropout(0.5))

    _, ranks = train(make, lambda m, i: setattr(m.drop, "p", 0.5 if i < 2 else 0.125))
    for rank in ranks:
        assert rank.losses == pytest.approx([0.5, 0.5, 0.875, 0.875], abs=0.04)


# hooks -----------------------------------------------------------------------------------------------------------


class Counts:
    """A hook that counts in its module."""

    def __call__(self, module: Any, *_: Any) -> None:
        module.calls += 1


class Hooked(Beside):
    """Hooks that are there before ``HAP(...)``; in each copy they count on their own."""

    def __init__(self, *kinds: str) -> None:
        super().__init__(lambda m, x: m.down(m.up(x)).square().mean())
        for part in (self.up, self.down):
            part.calls = 0
            for kind in kinds:
                getattr(part, f"register_forward_{kind}")(Counts())


@pytest.mark.parametrize("kinds", [("hook",), ("pre_hook",), ("hook", "hook", "pre_hook")])
def test_hooks_from_before_count_once_a_step(kinds: tuple[str, ...]) -> None:
    """However often a trace runs the model."""
    found = equal(lambda: Hooked(*kinds), look=lambda m: (m.up.calls, m.down.calls), plans=1)
    assert found.seen == (4 * len(kinds), 4 * len(kinds))


def test_hooks_have_not_counted_before_the_first_step() -> None:
    model: Any = Hooked("hook", "pre_hook")
    HAP(model, cluster(1), example=(X,))
    assert model.up.calls == model.down.calls == 0


# coins of torch --------------------------------------------------------------------------------------------------

COINS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "a branch": lambda m, x: base(m, x) * (1.0 if torch.rand(()) < 0.5 else 2.0),
    "item": lambda m, x: base(m, x) * torch.rand(1).item(),
    "a count": lambda m, x: base(m, x) * int(torch.randint(1, 3, ())),
    "a list": lambda m, x: base(m, x[torch.randperm(16).tolist()]),
    "an array": lambda m, x: base(m, x) * float(torch.randn(3).numpy()[0]),
    "a layer that is left out": lambda m, x: base(m, x if bool(torch.rand(1) < 0.3) else torch.sin(x)),
}


@pytest.mark.parametrize("randomness", ["refuse", "trace_each_step", "freeze"])
@pytest.mark.parametrize("name", COINS)
def test_a_coin_of_torch_is_refused_with_its_line(name: str, randomness: str) -> None:
    """A trace has no value of it: whatever is said of Python's draws, no outcome stays for ever."""
    model, options = Beside(COINS[name]), {"host_randomness": randomness}
    before = torch.get_rng_state()
    with pytest.raises(TraceError, match=r"cannot be traced .*test_beside_attributes\.py:\d+: .*Here: "):
        HAP(model, cluster(1), example=(X,), **options)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_draw_is_named_with_the_module_that_draws() -> None:
    class Drawing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * random.random()

    model = Beside(_through("part"), part=nn.Sequential(nn.Identity(), nn.Sequential(Drawing())))
    with pytest.raises(TraceError, match=r"random at .*x \* random\.random\(\), in module part\.1\.0: "):
        HAP(model, cluster(1), example=(X,))
