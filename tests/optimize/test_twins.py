"""Modules that follow others are stored in their shards, so that a loop can move them element by element."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import hetspmd
from hetspmd.cluster.cluster import Cluster
from hetspmd.dist.communicator import Communicator
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import FollowerWarning
from hetspmd.optimize.followers import followers
from hetspmd.optimize.following import follows, warn_of_strays
from hetspmd.placement import REPLICATE
from hetspmd.plan.plan import Plan
from hetspmd.program.program import Compute
from hetspmd.run.module import HAP
from hetspmd.search.constraints import named_tensors
from hetspmd.tune.alternatives import alternatives
from nets import Net

SLOW = Cluster.load(Path(__file__).parents[2] / "examples" / "clusters" / "four-slow.yaml")
KIND = {"memory_bandwidth": 4e6, "launch": 1e-9, "inside": {"bandwidth": 1e9, "latency": 1e-9}}
MACHINES = Cluster.load({
    "devices": [
        {"name": "large", "flops": 4e6, "accelerators": 2, **KIND},
        {"name": "small", "flops": 1e6, "accelerators": 2, **KIND},
    ],
    "network": {"bandwidth": 1e9, "latency": 1e-9},
})  # fmt: skip


def body() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 5))


def pair(frozen: bool = True) -> Net:
    """A network, a head, and a frozen copy whose outputs are the goal."""

    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            goal = m.target(x)
        return (m.head(m.online(x)) - goal).square().mean()

    online = body()
    return Net(
        forward, online=online, head=nn.Linear(5, 5), target=copy.deepcopy(online).requires_grad_(not frozen)
    )


def two() -> Net:
    """Two followers, one of them deeper down."""

    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            goal = m.old["slow"](x) + m.old["fast"](x)
        return (m.online(x) - goal).square().mean()

    return Net(forward, online=body(), old=nn.ModuleDict({"slow": body(), "fast": body()}))


def wrapped() -> Net:
    """A follower whose leader lies inside another module."""

    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            goal = m.target(x)
        return (m.student["net"](x) - goal).square().mean()

    return Net(forward, student=nn.ModuleDict({"net": body()}), target=body())


def actors() -> Net:
    """Two critics with their targets, side by side."""

    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            goal = torch.minimum(m.critic1_target(x), m.critic2_target(x))
        return (m.critic1(x) - goal).square().mean() + (m.critic2(x) - goal).square().mean()

    names = ("critic1_target", "critic2_target", "critic1", "critic2")
    return Net(forward, **{name: body() for name in names})


MODELS = [(pair, 1), (actors, 2), (lambda: pair(frozen=False), 1), (two, 2), (wrapped, 1)]


def check_follows(plan: Plan, parameters: int) -> None:
    """The parameters of the followers are stored as what they follow, and the plan divides some."""
    found, stored = followers(plan.graph), plan.parameter_layout()
    assert len(found) == parameters
    for follower, leader in found.items():
        assert stored[follower] == stored[leader], follower
    assert any(form != REPLICATE for form, _ in stored.values())


@pytest.mark.parametrize(("make", "count"), MODELS)
def test_a_follower_is_stored_as_its_leader(make: Callable[[], Net], count: int) -> None:
    torch.manual_seed(0)
    plan = hetspmd.compile(make(), (torch.randn(16, 12),), SLOW)
    check_follows(plan, count * 6)
    for follower, leader in followers(plan.graph).items():
        assert make is not actors or leader == follower.replace("_target", "")
    assert hetspmd.verify(make(), (torch.randn(16, 12),), SLOW, plan=plan).ok


@pytest.mark.parametrize(
    ("make", "count"), [MODELS[0], *(pytest.param(*m, marks=pytest.mark.slow) for m in MODELS[1:])]
)
def test_so_it_is_across_machines(make: Callable[[], Net], count: int) -> None:
    torch.manual_seed(0)
    plan = hetspmd.compile(make(), (torch.randn(16, 12),), MACHINES, machines="virtual")
    check_follows(plan, count * 6)
    assert plan.inside is not None
    assert (plan.search.stop_reason, plan.search.gap) == ("following", 0), "of programs with this storage"
    assert "stopped: following" in str(plan)
    assert Plan.from_json(plan.to_json()).search == plan.search
    assert hetspmd.verify(make(), (torch.randn(16, 12),), MACHINES, plan=plan).ok


def test_a_follower_is_moved_across_machines() -> None:
    """As on one device, by the line that moves it there."""
    x = torch.randn(16, 12, dtype=torch.float64)

    def made() -> Net:
        torch.manual_seed(3)
        return pair().double()

    def moved(model: nn.Module, net: nn.Module) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(x)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            with torch.no_grad():
                for name, p in net.named_parameters():
                    if name.startswith("target"):
                        p.lerp_(net.get_parameter(name.replace("target", "online")), 0.3)
        return losses

    alone = made()
    want = moved(alone, alone)
    models = [made() for _ in range(4)]

    def on_rank(ranks: Communicator) -> list[float]:
        hap = HAP(models[ranks.rank], MACHINES, example=(x,), process_group=ranks, machines="virtual")
        return moved(hap, hap.module)

    for found in run_ranks(4, on_rank):
        assert found == pytest.approx(want, rel=1e-9)


@pytest.mark.slow
def test_where_it_cannot_be_so_a_warning_says_it() -> None:
    """What is followed is whole, and there is no memory for two whole ones."""
    devices = tuple(replace(device, memory=18000) for device in SLOW.devices[:2])
    with pytest.warns(
        FollowerWarning, match=r"target\.0\.weight has no gradient .* online\.0\.weight"
    ) as found:
        plan = hetspmd.compile(
            pair(),
            (torch.randn(16, 12),),
            replace(SLOW, devices=devices),
            constraints={"online.*": "replicated"},
        )
    assert [w.category for w in found] == [FollowerWarning]
    assert "constraints={'target.*': 'replicated', 'online.*': 'replicated'}" in str(found[0].message)
    assert not follows(plan)
    assert max(plan.cost.memory_bytes) <= 18000


@pytest.mark.parametrize("machines", ["virtual", pytest.param("flat", marks=pytest.mark.slow)])
def test_what_else_the_user_has_said_stays(machines: str) -> None:
    asked = {"args[0]": "replicated"}
    plan = hetspmd.compile(two(), (torch.randn(16, 12),), MACHINES, machines=machines, constraints=asked)
    assert follows(plan)
    tensor = named_tensors(plan.theory)["args[0]"]
    (read,) = (
        step.row.post
        for step in plan.program.steps
        if isinstance(step, Compute) and tensor in plan.graph.instructions[step.instruction].outputs
    )
    assert read == (REPLICATE,)


def test_so_it_is_in_plans_to_measure() -> None:
    """Those of :func:`hetspmd.tune`, of which any may be chosen."""
    torch.manual_seed(0)
    plans = alternatives(two(), (torch.randn(16, 12),), {}, SLOW)
    assert len(plans) > 1
    assert all(follows(plan) for plan in plans.values()), list(plans)


def test_what_the_user_has_said_stays() -> None:
    torch.manual_seed(0)
    plan = hetspmd.compile(
        pair(), (torch.randn(16, 12),), SLOW, constraints={"target.*": "replicated", "online.0.*": "shard(0)"}
    )
    stored = plan.parameter_layout()
    assert all(form == REPLICATE for n, (form, _) in stored.items() if n.startswith("target"))
    assert stored["online.0.weight"][0] != REPLICATE
    with pytest.warns(FollowerWarning, match=r"constraints=\{'target\.\*': 'repl.*'online\.\*': 'repl"):
        warn_of_strays(replace(plan, constraints={}))


def test_frozen_layers_follow_nothing() -> None:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        return m.layers(x).square().mean()

    layers = nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(4)))
    layers[0].requires_grad_(False)
    graph = hetspmd.compile(Net(forward, layers=layers), (torch.randn(8, 12),), SLOW).graph
    assert followers(graph) == {}
    layers.requires_grad_(True)
    assert followers(hetspmd.compile(Net(forward, layers=layers), (torch.randn(8, 12),), SLOW).graph) == {}
