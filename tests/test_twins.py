"""Modules that follow others are stored in their shards, so that a loop can move them element by element."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import hetspmd
from hetspmd.twins import followers
from nets import Net

SLOW = {
    "devices": [
        {"name": "large", "flops": 4e6, "memory_bandwidth": 4e6, "launch": 1e-9},
        {"name": "small", "count": 3, "flops": 1e6, "memory_bandwidth": 1e6, "launch": 1e-9},
    ],
    "network": {"bandwidth": 1e9, "latency": 1e-9},
}


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


@pytest.mark.parametrize(
    ("make", "count"), [(pair, 1), (actors, 2), (lambda: pair(frozen=False), 1), (two, 2), (wrapped, 1)]
)
def test_a_follower_is_stored_as_its_leader(make: Callable[[], Net], count: int) -> None:
    torch.manual_seed(0)
    plan = hetspmd.compile(make(), (torch.randn(16, 12),), SLOW)
    found, stored = followers(plan.graph), plan.parameter_layout()
    assert len(found) == count * 6
    for follower, leader in found.items():
        assert stored[follower] == stored[leader], follower
        assert make is not actors or leader == follower.replace("_target", "")
    assert any(form != hetspmd.forms.IDENTITY for form, _ in stored.values())
    assert hetspmd.verify(make(), (torch.randn(16, 12),), SLOW, plan=plan).ok


def test_what_the_user_has_said_stays() -> None:
    torch.manual_seed(0)
    plan = hetspmd.compile(
        pair(), (torch.randn(16, 12),), SLOW, constraints={"target.*": "replicated", "online.0.*": "shard(0)"}
    )
    stored = plan.parameter_layout()
    assert all(form == hetspmd.forms.IDENTITY for n, (form, _) in stored.items() if n.startswith("target"))
    assert stored["online.0.weight"][0] != hetspmd.forms.IDENTITY


def test_frozen_layers_follow_nothing() -> None:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        return m.layers(x).square().mean()

    layers = nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(4)))
    layers[0].requires_grad_(False)
    graph = hetspmd.compile(Net(forward, layers=layers), (torch.randn(8, 12),), SLOW).graph
    assert followers(graph) == {}
    layers.requires_grad_(True)
    assert followers(hetspmd.compile(Net(forward, layers=layers), (torch.randn(8, 12),), SLOW).graph) == {}
