"""Choosing among plans by measured steps, and the plans that there are to choose from."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import lone, loss_of
from small_models import MLP, case
from small_plans import cluster
from torch import nn
from tune_worker import worker

import hetspmd
from hetspmd.dist.communicator import Communicator
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import InfeasibleError, OptionError, TraceError
from hetspmd.optimize.compile_options import CompileOptions
from hetspmd.placement import is_sharded
from hetspmd.plan.plan import Plan
from hetspmd.tune import tune as module
from hetspmd.tune.alternatives import COMPILED, alternatives
from hetspmd.tune.tune import Tuned, step_seconds, timed, tune
from hetspmd.tune.tune_thresholds import THRESHOLDS
from processes import spawn

WORLD = 3


def close(*speeds: float) -> hetspmd.Cluster:
    """Devices over a network on which it is nearly the same how many of them work."""
    devices = [
        {"name": f"d{i}", "flops": s * 1e7, "memory": "1GiB", "memory_bandwidth": "10GB/s", "launch": 1e-9}
        for i, s in enumerate(speeds)
    ]
    return hetspmd.Cluster.load({"devices": devices, "network": {"bandwidth": "1GB/s", "latency": "1us"}})


def plans(name: str = "mlp", devices: hetspmd.Cluster | None = None, **options: Any) -> dict[str, Plan]:
    c = case(name, torch.float32)
    return alternatives(c.model, (), c.batch, devices or close(4, 2, 2), CompileOptions(**options))


def test_alternatives() -> None:
    found = plans()
    first, *others = found.values()
    assert next(iter(found)) == COMPILED
    c = case("mlp", torch.float32)
    assert first.digest == hetspmd.compile(c.model, c.batch, close(4, 2, 2)).digest
    assert len(found) >= 2
    programs = [(p.program, p.lengths, p.active) for p in found.values()]
    assert all(p not in programs[:i] for i, p in enumerate(programs))
    seconds = [p.cost.step_seconds for p in others]
    assert seconds == sorted(seconds)
    assert all(s <= THRESHOLDS.slowest_alternative * first.cost.step_seconds for s in seconds)
    assert min(seconds) >= first.cost.step_seconds * (1 - 1e-9), "the search found the best"
    for name, plan in found.items():
        if name.startswith("rank"):
            assert plan.active == tuple(int(r) for r in name.split(" ", 1)[1].split(", "))


def test_alternatives_keep_to_constraints() -> None:
    found = plans(constraints={"a.weight": "shard(0)"})
    assert "data parallel" not in found
    for plan in found.values():
        form, extents = plan.parameter_layout()["a.weight"]
        assert len(plan.active) == 1 or (is_sharded(form) and sum(extents) == 10)
    with pytest.raises(InfeasibleError):
        plans(constraints={"a.weight": "shard(7)"})


def test_alternatives_fit() -> None:
    whole = plans("conv", close(2, 2, 2))
    room = 1.05 * max(whole[COMPILED].cost.memory_bytes)
    assert max(whole["data parallel"].cost.memory_bytes) > room
    devices = tuple(replace(d, memory=room) for d in close(2, 2, 2).devices)
    found = plans("conv", replace(close(2, 2, 2), devices=devices))
    assert "data parallel" not in found
    for plan in found.values():
        assert max(plan.cost.memory_bytes) <= room


def test_both_ways_across_machines() -> None:
    machines = {
        "devices": [
            {"name": "m0", "flops": 4e7, "memory": "1GiB", "accelerators": 2,
             "inside": {"bandwidth": "10GB/s", "latency": "1us"}},
            {"name": "m1", "flops": 1e7, "memory": "1GiB"},
        ],
        "network": {"bandwidth": "1GB/s", "latency": "1us"},
    }  # fmt: skip
    found = plans(devices=hetspmd.Cluster.load(machines))
    assert 1 <= len(found) <= 2
    assert set(found) <= {COMPILED, "virtual", "flat"}


def on_ranks(body: Any) -> list[Any]:
    return run_ranks(WORLD, body)


def test_the_fastest_as_measured_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    c = case("mlp", torch.float32)
    names = list(plans())
    slow = dict.fromkeys(names, 2.0) | {names[-1]: 1.0}
    at = {p.digest: n for n, p in plans().items()}
    monkeypatch.setattr(module, "step_seconds", lambda hap, **rest: [slow[at[hap.plan.digest]]] * 5)

    def body(communicator: Communicator) -> Tuned:
        return tune(c.model, c.batch, close(4, 2, 2), process_group=communicator)

    for tuned in on_ranks(body):
        assert tuned.name == names[-1]
        assert at[tuned.plan.digest] == names[-1]
        assert tuned.seconds == slow
        assert str(tuned).count("chosen") == 1
        assert f"{tuned.predicted[names[0]]:9.4f}" in str(tuned)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "speeds", "meta"),
    [
        ("mlp", (2, 2, 1), True),
        *(pytest.param("conv", (3, 2, 1), m, marks=SLOW) for m in (False, True)),
    ],
)
def test_ranks_agree_and_the_model_stays(kind: str, speeds: tuple[int, ...], meta: bool) -> None:
    c = case(kind, torch.float32)
    model = copy.deepcopy(c.model).to("meta") if meta else c.model
    before = {k: v.clone() for k, v in c.model.state_dict().items()}
    models = [model if not meta else copy.deepcopy(model) for _ in range(WORLD)]

    def body(communicator: Communicator) -> Tuned:
        return tune(models[communicator.rank], c.batch, cluster(*speeds), process_group=communicator, steps=1)

    first, *others = on_ranks(body)
    assert all(o.name == first.name and o.seconds == first.seconds for o in others)
    assert all(o.plan == first.plan for o in others)
    assert 0 < first.seconds[first.name] <= THRESHOLDS.rival_part * min(first.seconds.values()), (
        "or one of fewer devices"
    )
    assert len(first.seconds) > 1
    assert all(torch.equal(before[k], v) for k, v in c.model.state_dict().items())
    assert all(p.is_meta == meta for p in models[0].parameters())


def test_plans_of_ones_own() -> None:
    c = case("mlp", torch.float32)
    given = {"a": lone(c).plan}
    tuned = tune(c.model, c.batch, cluster(1), plans=given, steps=1)
    assert list(tuned.seconds) == ["a"]
    assert tuned.plan is given["a"]


def test_random_numbers_stay() -> None:
    c = case("attention", torch.float32)
    state = torch.random.get_rng_state()
    tuned = tune(c.model, c.batch, cluster(1), steps=1)
    assert tuned.name == COMPILED
    assert torch.equal(torch.random.get_rng_state(), state)


class Counting(torch.optim.SGD):
    count = 0

    def step(self, closure: Any = None) -> Any:
        type(self).count += 1
        return super().step(closure)


@pytest.mark.parametrize(("best", "counted"), [(None, 3), (1e-12, 1), (1e12, 3)])
def test_the_hopeless_are_not_measured_further(best: float | None, counted: int) -> None:
    c = case("mlp")
    Counting.count = 0
    seconds = step_seconds(lone(c), (), c.batch, lambda p: Counting(p, lr=0.1), 3, best)
    assert THRESHOLDS.warm_steps <= Counting.count - counted < THRESHOLDS.latest_first_step
    assert len(seconds) == counted
    assert all(0 < s < 60 for s in seconds)


@pytest.mark.parametrize(
    ("steps", "best", "counted"),
    [
        ([9.0, 3.0, 3.0, 2.9, 3.1], None, [3.0, 2.9, 3.1]),
        ([9.0, 8.0, 5.0, 3.0, 3.0, 2.9, 3.1], 3.0, [3.0, 2.9, 3.1]),  # not 8 beside 3
        ([9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0], 3.0, [4.0, 3.0, 2.0]),
        ([9.0, 8.0, 8.0], 5.0, [8.0]),
        ([9.0, 8.0, 7.0, 7.5], 4.0, [7.5]),
        ([9.0, 3.0, 3.5, 3.0, 3.0], 2.5, [3.5, 3.0, 3.0]),
    ],
)
def test_steps_count_from_where_they_get_no_shorter(
    steps: list[float], best: float | None, counted: list[float]
) -> None:
    left = iter(steps)
    assert timed(lambda: next(left), 3, best) == counted
    assert not list(left), "no step more"


@pytest.mark.filterwarnings("ignore::hetspmd.errors.RetraceWarning")
def test_a_model_that_draws_as_it_was_allowed() -> None:
    class Coin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).square().mean() * (1.0 if random.random() < 0.5 else 2.0)

    batch = (torch.randn(4, 6),)
    for way in ("freeze", "trace_each_step"):
        tuned = tune(Coin(), batch, cluster(1), steps=1, host_randomness=way)
        assert tuned.plan.graph.host.draws
        with pytest.raises(OptionError, match=r"test_tune\.py:.*nothing to compare with"):
            hetspmd.verify(Coin(), batch, cluster(1), host_randomness=way)
    with pytest.raises(TraceError, match="random"):
        tune(Coin(), batch, cluster(1), steps=1)


def test_bad_arguments() -> None:
    c = case("mlp", torch.float32)
    with pytest.raises(OptionError, match="'step'; did you mean 'steps'"):
        tune(c.model, c.batch, cluster(1), step=3)
    with pytest.raises(OptionError, match="steps is 0; take a whole number from 1"):
        tune(c.model, c.batch, cluster(1), steps=0)

    with pytest.raises(OptionError, match="plans is empty"):
        tune(c.model, c.batch, cluster(1), plans={})

    class NoLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = MLP()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner.a(x)

    with pytest.raises(TraceError, match="returns no scalar loss"):
        tune(NoLoss(), {"x": c.batch["x"]}, cluster(1))


@pytest.mark.parametrize("speeds", [(4.0,), (4.0, 2.0, 2.0)])
def test_a_loss_function_is_applied_once(speeds: tuple[float, ...]) -> None:
    """Also where the device runs the model itself; a loss applied to a loss would fail or be another number."""
    torch.manual_seed(0)
    models = [nn.Linear(6, 5) for _ in speeds]
    seen: list[torch.Size] = []

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        output = model(x)
        seen.append(output.shape)
        return nn.functional.mse_loss(output, y)

    batch = torch.randn(8, 6), torch.randn(8, 5)

    def body(communicator: Communicator) -> Tuned:
        return tune(
            models[communicator.rank], batch, close(*speeds), loss=loss, process_group=communicator, steps=1,
            optimizer=torch.optim.SGD,
        )  # fmt: skip

    found = run_ranks(len(speeds), body)
    assert all(min(tuned.seconds.values()) > 0 for tuned in found)
    assert set(seen) == {torch.Size((8, 5))}


@pytest.mark.slow
def test_processes(tmp_path: Path) -> None:
    """Over gloo: every rank chooses the same plan by the same seconds, and trains with it as a lone device does."""
    spawn(worker, (2, str(tmp_path)), nprocs=2)
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    for result in found:
        assert result["digest"] == found[0]["digest"]
        assert result["seconds"] == found[0]["seconds"]
        assert len(result["seconds"]) >= 2
        assert min(result["seconds"].values()) == result["seconds"][result["name"]] > 0
        assert result["kept"], "the model is left as it was"
        assert result["undrawn"], "and so are torch's random numbers"
        assert result["losses"][:2] == result["losses"][2:]
    c = case("mlp", torch.float32)
    hap = lone(c)
    optimizer = torch.optim.SGD(hap.parameters(), lr=0.1)
    for want in found[0]["losses"][:2]:
        optimizer.zero_grad()
        loss = loss_of(hap(**c.batch))
        loss.backward()
        optimizer.step()
        assert loss.item() == pytest.approx(want, rel=1e-5)
