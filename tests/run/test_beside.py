"""What Python does beside the graph: ranks train as one device, or the refusal names module, attribute and line."""

from __future__ import annotations

import os
import random
import secrets
import threading
import uuid
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from beside import Beside, X, base, equal, train
from small_plans import cluster
from torch import nn
from torch.nn import functional as F

import hetspmd
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import HetspmdError, OptionError, PlanMismatchError, RetraceWarning, TraceError
from hetspmd.run.module import HAP
from hetspmd.trace.host.watch import HostWatch

# what forward reads ----------------------------------------------------------------------------------------------


class Config:
    """An object that a model keeps, as configurations are."""

    def __init__(self) -> None:
        self.scale, self.heads, self.unread = 1.0, [1, 2], 0


READS: dict[str, tuple[Any, Any, dict[str, Any], int]] = {
    "a scale": (lambda m, x: base(m, x) * m.k, lambda m, i: setattr(m, "k", 1 / (i + 1)), {"k": 1.0}, 2),
    "two weights": (
        lambda m, x: (1 - m.k) * base(m, x) + m.k * m.up(x).abs().mean(),
        lambda m, i: setattr(m, "k", 0.9 / (i + 1)), {"k": 1.0}, 2,
    ),
    "a temperature": (
        lambda m, x: (m.down(m.up(x)) / m.k).softmax(-1).square().mean(),
        lambda m, i: setattr(m, "k", 1.0 + i), {"k": 1.0}, 2,
    ),
    "an integer": (lambda m, x: base(m, x) / m.n, lambda m, i: setattr(m, "n", 3 + i), {"n": 3}, 2),
    "a flag": (
        lambda m, x: base(m, x) * (2 if m.flag else 1),
        lambda m, i: setattr(m, "flag", i % 2 == 0), {"flag": True}, 2,
    ),
    "a list": (
        lambda m, x: sum(base(m, x) * k for k in m.active), lambda m, i: m.active.append(2) if i == 2 else None,
        {"active": [1, 3]}, 2,
    ),
    "an activation": (
        lambda m, x: m.down(m.act(m.up(x))).square().mean(),
        lambda m, i: setattr(m, "act", F.gelu if i % 2 else F.relu), {"act": F.relu}, 2,
    ),
    "a tensor": (
        lambda m, x: (m.down(m.up(x)) * m.w).square().mean(),
        lambda m, i: m.w.mul_(2) if i == 2 else None, {"w": torch.ones(12)}, 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
def test_what_forward_reads_may_change(name: str) -> None:
    forward, each, members, plans = READS[name]
    equal(lambda: Beside(forward, **members), each, plans=plans)


def test_what_nothing_reads_changes_no_plan() -> None:
    def each(model: Any, step: int) -> None:
        model.config.unread = model.other = step

    equal(lambda: Beside(lambda m, x: base(m, x) * m.config.scale, config=Config()), each, plans=1)


@pytest.mark.filterwarnings("ignore::hetspmd.errors.PlanPerValueWarning")
def test_an_object_is_followed() -> None:
    def each(model: Any, step: int) -> None:
        model.config.scale = 1.0 + step
        if step == 2:
            model.config.heads.append(3)

    def make() -> nn.Module:
        return Beside(lambda m, x: base(m, x) * m.config.scale * len(m.config.heads), config=Config())

    equal(make, each, plans=4)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Linear(24, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x))).square().mean()


@pytest.mark.parametrize(("name", "values"), [("momentum", (0.1, 0.4)), ("eps", (1e-5, 0.5))])
def test_options_of_torchs_modules_may_change(name: str, values: tuple[float, float]) -> None:
    equal(Normed, lambda m, i: setattr(m.norm, name, values[i // 2]), plans=2)


def test_hooks_may_change_and_modules_not() -> None:
    def hook(model: Any, step: int) -> None:
        if step == 2:
            model.up.register_forward_hook(lambda _module, _inputs, output: output * 2)

    equal(Normed, hook, plans=2)
    acting = Beside(lambda m, x: m.down(m.act(m.up(x))).square().mean(), act=nn.ReLU())
    with pytest.raises(HetspmdError, match=r"act of the model was replaced after HAP\(\.\.\.\)"):
        train(lambda: acting, lambda m, i: setattr(m, "act", nn.Tanh()) if i == 1 else None)
    with pytest.raises(HetspmdError, match=r"when HAP\(\.\.\.\) was made: down\.0"):
        train(Normed, lambda m, i: setattr(m, "down", nn.Sequential(nn.Linear(24, 12))) if i == 1 else None)


def test_a_rank_with_another_attribute_is_named() -> None:
    models = [Beside(lambda m, x: base(m, x) * m.k, k=1.0 + (rank == 2)) for rank in range(4)]

    def rank(communicator: Any) -> None:
        HAP(models[communicator.rank], cluster(4, 2, 1, 1), example=(X,), process_group=communicator)

    with pytest.raises(PlanMismatchError, match=r"rank 2 has another model than rank 0: its k is 2\.0"):
        run_ranks(4, rank)


def test_another_thread_that_draws_is_not_the_forward() -> None:
    """The state of a generator is the process's, and changes while a trace runs."""
    others = iter([True])

    def meanwhile(model: Any) -> Any:
        if next(others, False):
            thread = threading.Thread(target=lambda: (torch.randn(1), random.random()))
            thread.start()
            thread.join()
        return model(X)

    still = Beside(base)
    watch = HostWatch(still)
    watch.run(lambda: meanwhile(still))
    assert watch.draws == ""
    assert next(others, None) is None, "it drew"
    drawing = Beside(lambda m, x: base(m, x) * random.random())
    with pytest.raises(TraceError, match=r"draws from Python's random at .*random\.random\(\)"):
        HostWatch(drawing).run(lambda: drawing(X))


# what forward leaves ---------------------------------------------------------------------------------------------


def _lazy(model: Any, x: torch.Tensor) -> torch.Tensor:
    if model.t is None:
        model.t = torch.arange(12.0)
    return model.down(model.up(x * model.t)).square().mean()


def _lazy_in_a_dict(model: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(model, "cache"):
        model.cache = {}
    if x.shape[1] not in model.cache:
        model.cache[x.shape[1]] = torch.linspace(0, 1, x.shape[1])
    return model.down(model.up(x * model.cache[x.shape[1]])).square().mean()


def _count(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.calls += 1
    return base(model, x)


def _count_and_scale(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.calls += 1
    return base(model, x) * model.calls


def _every_third(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.calls += 1
    return base(model, x) * (2 if model.calls % 3 == 0 else 1)


def _once(model: Any, x: torch.Tensor) -> torch.Tensor:
    if not model.ready:
        model.ready, model.scale = True, 2.0
    return base(model, x) * model.scale


def _auxiliary(model: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = model.up(x)
    model.auxiliary, model.rows = hidden.square().mean().detach(), len(x)
    return model.down(hidden).square().mean()


def _item(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.history["mean"] = model.up(x).mean().detach()
    return base(model, x)


LEFT: dict[str, tuple[Any, dict[str, Any], Any, int]] = {
    "a lazy cache": (_lazy, {"t": None}, lambda m: m.t.tolist(), 1),
    "a lazy cache in a dict": (_lazy_in_a_dict, {}, lambda m: m.cache[12].tolist(), 1),
    "a counter": (_count, {"calls": 0}, lambda m: m.calls, 1),
    "a counter that scales": (_count_and_scale, {"calls": 0}, lambda m: m.calls, 2),
    "a counter that is asked": (_every_third, {"calls": 0}, lambda m: m.calls, 2),
    "a first time": (_once, {"ready": False, "scale": 1.0}, lambda m: (m.ready, m.scale), 1),
    "a scalar": (_auxiliary, {}, lambda m: (round(float(m.auxiliary), 5), m.rows), 1),
    "an item": (_item, {"history": {}}, lambda m: round(float(m.history["mean"]), 5), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_forward_leaves_is_there(name: str) -> None:
    forward, members, look, plans = LEFT[name]
    equal(lambda: Beside(forward, **members), look=look, plans=plans)


def _recurrent(model: Any, x: torch.Tensor) -> torch.Tensor:
    if model.state is None:
        model.state = torch.zeros(16, 24)
    model.state = (model.up(x) + model.state).detach()
    return model.down(model.up(x) + model.state).square().mean()


def _average(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.mean = 0.9 * model.mean + 0.1 * model.up(x).detach().mean(0)
    return base(model, x)


def _collect(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.features.append(model.up(x))
    return base(model, x)


def _carry_in_a_dict(model: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = model.up(x) + model.items.get("hidden", 0.0)
    model.items["hidden"] = hidden.detach()
    return model.down(hidden).square().mean()


class Cell:
    """An object with a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _wrap(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.cell = Cell(model.up(x))
    return base(model, x)


@pytest.mark.filterwarnings("ignore::hetspmd.errors.KeptRowsWarning")
@pytest.mark.parametrize(
    ("forward", "members", "text"),
    [
        (_recurrent, {"state": None}, r"state of Beside at .*test_beside.py:\d+.*register_buffer\('state'"),
        (
            _average,
            {"mean": torch.zeros(24)},
            r"mean of Beside at .*test_beside.py:\d+.*register_buffer\('mean'",
        ),
        (_collect, {"features": []}, r"adds to the list features of Beside at .*test_beside.py:\d+"),
        (_carry_in_a_dict, {"items": {}}, r"items\[.hidden.\] of Beside at .*test_beside.py:\d+"),
        (_wrap, {}, r"leaves a test_beside.Cell in cell of Beside at .*test_beside.py:\d+"),
    ],
)
def test_what_cannot_be_kept_is_refused(forward: Any, members: Any, text: str) -> None:
    with pytest.raises(HetspmdError, match=text):
        train(lambda: Beside(forward, **members))


# what forward draws ----------------------------------------------------------------------------------------------


def _coin(model: Any, x: torch.Tensor) -> torch.Tensor:
    return base(model, x) * (1.0 if random.random() < 0.5 else 2.0)


def _numpy(model: Any, x: torch.Tensor) -> torch.Tensor:
    return base(model, x) * int(np.random.randint(1, 3))  # as models do


def _own(model: Any, x: torch.Tensor) -> torch.Tensor:
    return base(model, x) * (1 if model.generator.random() < 0.5 else 3)


def _drop_layer(model: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = model.up(x)
    if not (model.training and random.random() < 0.5):
        hidden = hidden + torch.sin(hidden)
    return model.down(hidden).square().mean()


DRAWS = {
    "random": (_coin, {}),
    "numpy": (_numpy, {}),
    "numpy's generator": (_own, {"generator": np.random.default_rng(0)}),
    "a generator": (_own, {"generator": random.Random(2)}),
    "a dropped layer": (_drop_layer, {}),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_refused_or_traced_each_step(name: str) -> None:
    forward, members = DRAWS[name]
    before = random.getstate()
    with pytest.raises(TraceError, match=r"draws from .* at .*test_beside\.py:\d+: .*, in module Beside"):
        train(lambda: Beside(forward, **members), steps=1)
    random.setstate(before)
    with pytest.warns(
        RetraceWarning, match=r"draws .* at .*test_beside\.py:\d+.* traces every step anew"
    ) as found:
        equal(lambda: Beside(forward, **members), steps=6, plans=2, host_randomness="trace_each_step")
    assert len(found) == 1


def test_an_outcome_may_stay() -> None:
    _, ranks = train(lambda: Beside(_coin), steps=3, host_randomness="freeze")
    assert all(rank.plans == 1 for rank in ranks)
    with pytest.raises(HetspmdError, match="host_randomness is 'maybe'; allowed are 'refuse'"):
        train(lambda: Beside(_coin), host_randomness="maybe")


BYTES: dict[str, Any] = {
    "the system": lambda m, x: base(m, x) * (1 + int.from_bytes(os.urandom(4), "big")),
    "secrets": lambda m, x: base(m, x) * (1 + secrets.randbelow(1 << 32)),
    "uuid": lambda m, x: base(m, x) * float(uuid.uuid4().int % (1 << 32)),
}


@pytest.mark.parametrize("name", BYTES)
def test_random_bytes_that_stay_are_known_as_such(name: str) -> None:
    """Each trace has other ones: there is nothing to compare a plan with."""
    model, devices = Beside(BYTES[name]), cluster(1, 2)
    plan = hetspmd.compile(model, (X,), devices, host_randomness="freeze")
    assert "test_beside.py" in plan.graph.host.draws
    with pytest.raises(
        OptionError, match=r"draws random numbers \(.*test_beside\.py:\d+: .*nothing to compare"
    ):
        hetspmd.verify(model, (X,), devices, host_randomness="freeze")
    with pytest.raises(OptionError, match=r"draws random numbers \(.*here, too"):
        run_ranks(2, lambda c: HAP(Beside(BYTES[name]), devices, plan=plan, process_group=c)(X))

    def given(communicator: Any, **options: Any) -> list[float]:
        made = HAP(
            Beside(BYTES[name]),
            devices,
            plan=plan,
            process_group=communicator,
            host_randomness="freeze",
            **options,
        )
        return [float(made(X).detach()) for _ in range(2)]

    with pytest.raises(PlanMismatchError, match=r"keeps the outcome of its own trace.*check_plan=False"):
        run_ranks(2, given)
    first, second = run_ranks(2, partial(given, check_plan=False))[0]
    assert first == second


# a parameter under another name ----------------------------------------------------------------------------------


class Listed(nn.Module):
    """Keeps a parameter in a list as well, for a penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)
        self.penalized = [self.up.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return base(self, x) + sum(p.square().mean() for p in self.penalized)


def test_a_parameter_under_another_name_is_refused() -> None:
    with pytest.raises(
        TraceError, match=r"penalized\[0\] of Listed at .*, which is up\.weight under another name"
    ):
        train(Listed)


class Recurrent(nn.Module):
    """torch's recurrent layers keep their parameters in a list, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.down = nn.GRU(3, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.layer(x.view(16, 4, 3))[0]).square().mean()


def test_recurrent_layers_train() -> None:
    equal(Recurrent, plans=1)
