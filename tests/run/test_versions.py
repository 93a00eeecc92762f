"""The versions in a state dict reach what HAP wraps: a class that changes old state dicts leaves new ones alone."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from divided import X, divided_plan, on_four
from torch import nn
from torch.optim.swa_utils import AveragedModel

from hetspmd.plan.plan import Plan
from hetspmd.run.module import HAP


class Scaled(nn.Linear):
    """Files of the first version hold the weight in another unit."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Mapping[str, Any], *rest: Any) -> None:
        if (metadata.get("version") or 1) < 2 and prefix + "weight" in state:
            state[prefix + "weight"] = state[prefix + "weight"] * 10
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class Net(nn.Module):
    """``module`` is the name that HAP, too, gives to a part; the class itself has a version."""

    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.a, self.module, self.last = Scaled(12, 24), nn.Sequential(Scaled(24, 16)), Scaled(16, 12)
        self.loaded: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.last(torch.tanh(self.module(torch.tanh(self.a(x))))) - x).square().mean()

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Mapping[str, Any], *rest: Any) -> None:
        self.loaded.append(metadata.get("version"))
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class Plain(nn.Module):
    """The same without a part of that name."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Scaled(12, 24), nn.Sequential(nn.Tanh(), Scaled(24, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.b(self.a(x)) - x).square().mean()


class Holder(nn.Module):
    """As a LightningModule holds its network."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net


class Deeper(nn.Module):
    """Holds it with another part of that class, which HAP does not wrap."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"net": Holder(net), "other": Scaled(2, 2)})


class Renaming(Holder):
    """Changes keys of its own before its parts are loaded."""

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        for key in [key for key in state if key.startswith("old.")]:
            state[key.replace("old.", "net.")] = state.pop(key)
        super()._load_from_state_dict(state, prefix, *rest)


def renamed(state: Any) -> Any:
    """As a file of an older Renaming has it."""
    made = OrderedDict((key.replace("net.", "old."), value) for key, value in state.items())
    made._metadata = state._metadata  # type: ignore[attr-defined]
    return made


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(2)
    return kind().double()


@cache
def plan(kind: type[nn.Module]) -> Plan:
    return divided_plan(made(kind))


HOLDERS: list[tuple[Callable[[nn.Module], nn.Module], Callable[[Any], Any]]] = [
    (Holder, lambda state: state),
    (Deeper, lambda state: state),
    (nn.Sequential, lambda state: state),
    (AveragedModel, lambda state: state),
    (Renaming, renamed),
]


@pytest.mark.parametrize(("hold", "change"), HOLDERS)
@pytest.mark.parametrize("kind", [Net, Plain])
def test_a_holder_loads_its_own_state(kind: type[nn.Module], hold: Any, change: Any) -> None:
    """And that of one device, in which no HAP was."""
    one = hold(made(kind))
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.mul_(0.5)
    of_one = copy.deepcopy(one.state_dict())

    def body(given: HAP) -> None:
        held = hold(given)
        (hap,) = (part for part in held.modules() if isinstance(part, HAP))
        before = hap.full_state_dict()
        held.load_state_dict(change(held.state_dict()))
        assert all(torch.equal(v, before[k]) for k, v in hap.full_state_dict().items())
        held.load_state_dict(change(of_one))
        assert all(torch.equal(v, before[k] * 0.5) for k, v in hap.full_state_dict().items())
        if kind is Net:
            assert hap.module.loaded[-2:] == [3, 3]

    on_four(body, lambda: made(kind), plan(kind), gather_state=True)


def test_an_old_state_is_changed_once() -> None:
    """Of the first version, or with no versions at all; the copy that is given stays as it is."""

    def body(hap: HAP) -> None:
        held, before = Holder(hap), hap.full_state_dict()
        state = held.state_dict()
        for path in list(state._metadata):
            state._metadata[path] = {"version": 1}
        paths = list(state._metadata)
        for old in (state, dict(state)):
            held.load_state_dict(old)
            for key, value in hap.full_state_dict().items():
                assert torch.equal(value, before[key] * (10 if "weight" in key else 1))
        assert list(state._metadata) == paths

    on_four(body, lambda: made(Plain), plan(Plain), gather_state=True)


def test_keys_with_module_keep_their_versions() -> None:
    """As DistributedDataParallel writes them."""
    one = made(Plain)
    state, loss = Holder(nn.ModuleDict({"module": one})).state_dict(), one(X).item()

    def body(hap: HAP) -> None:
        Holder(hap).load_state_dict(state)
        assert all(torch.equal(v, state[f"net.module.{k}"]) for k, v in hap.full_state_dict().items())
        assert hap(X).item() == pytest.approx(loss)

    on_four(body, lambda: made(Plain), plan(Plain), gather_state=True)
