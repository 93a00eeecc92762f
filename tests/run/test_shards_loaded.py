"""Whole tensors are loaded wherever torch loads them; a state dict comes back as one device makes it."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from divided import X, net, on_four, train
from torch import nn
from torch.distributed.checkpoint.state_dict import set_model_state_dict

from hetspmd.errors import ShardError
from hetspmd.run.module import HAP

State = dict[str, Any]


def changed() -> State:
    return {k: v * 2.0 if v.is_floating_point() else v for k, v in net().state_dict().items()}


def reloaded(state: State) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def by_parts(hap: HAP, state: State) -> None:
    for part in ("a", "norm", "b"):
        inside = {k.removeprefix(f"{part}."): v for k, v in state.items() if k.startswith(f"{part}.")}
        hap.module.get_submodule(part).load_state_dict(inside)


@torch.no_grad()
def one_by_one(hap: HAP, state: State) -> None:
    for name, parameter in hap.module.named_parameters():
        parameter.copy_(state[name])
    for name, buffer in hap.module.named_buffers():
        buffer.copy_(state[name])


LOADERS: dict[str, Callable[[HAP, State], Any]] = {
    "hap": lambda hap, state: hap.load_state_dict(state),
    "keys of DDP": lambda hap, state: hap.load_state_dict({f"module.{k}": v for k, v in state.items()}),
    "a file": lambda hap, state: hap.load_state_dict(reloaded(state)),
    "module": lambda hap, state: hap.module.load_state_dict(state),
    "not strict": lambda hap, state: hap.load_state_dict({**state, "more": torch.zeros(1)}, strict=False),
    "parts": by_parts,
    "one by one": one_by_one,
    "torch.distributed.checkpoint": lambda hap, state: set_model_state_dict(hap.module, state),
    "full": lambda hap, state: hap.load_full_state_dict(state),
}


def test_every_way_to_load_takes_whole_tensors() -> None:
    want, first = changed(), net().state_dict()

    def body(hap: HAP) -> dict[str, State]:
        found = {}
        for name, load in LOADERS.items():
            hap.load_state_dict(first)
            load(hap, copy.copy(want))
            found[name] = hap.full_state_dict()
        return found

    for found in on_four(body):
        for name, state in found.items():
            assert all(torch.equal(state[key], value) for key, value in want.items()), name


def test_training_goes_on_from_what_was_loaded() -> None:
    other, state = net(), changed()
    other.load_state_dict(state)
    want = train(other)

    def body(hap: HAP) -> list[float]:
        train(hap, 1)
        hap.load_state_dict(state)
        return train(hap)

    for losses in on_four(body):
        assert losses == pytest.approx(want, rel=1e-10)


def test_what_cannot_be_loaded_is_named() -> None:
    good = net().state_dict()

    def body(hap: HAP) -> None:
        with pytest.raises(ShardError, match="is a shard, whose rank"):
            hap.module.load_state_dict({**good, "a.weight": hap.module.a.weight.detach()})
        with pytest.raises(ShardError, match="write assign=False"):
            hap.load_state_dict(good, assign=True)
        with pytest.raises(RuntimeError, match=r"a\.weight has shape \[3, 3\], the model's is \[24, 12\]"):
            hap.module.load_state_dict({**good, "a.weight": torch.zeros(3, 3)})
        with pytest.raises(ShardError, match="copy_ takes the whole parameter"), torch.no_grad():
            hap.module.a.weight.copy_(torch.zeros(5, 12))
        with pytest.raises(RuntimeError, match=r"Missing key\(s\)"):
            hap.load_state_dict({k: v for k, v in good.items() if k != "a.bias"})
        report = hap.load_state_dict(
            {"module.a.bias": good["a.bias"], "module.more": good["a.bias"]}, strict=False
        )
        assert report.unexpected_keys == ["more"]
        assert "a.bias" not in report.missing_keys

    on_four(body)


class Own(nn.Module):
    """What a state dict can hold besides parameters: tied names, buffers of both kinds, extra state, other strides,
    hooks that rename and that compute, and attributes of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(12, 24)
        self.b = nn.Linear(24, 12)
        self.twin = nn.Linear(12, 24, bias=False)
        self.twin.weight = self.a.weight
        self.turned = nn.Parameter(torch.randn(24, 12).t())
        self.register_buffer("scale", torch.ones(12))
        self.register_buffer("kept", torch.ones(3), persistent=False)
        self.norm = nn.BatchNorm1d(12)
        self.count = 3
        self.b.weight.no_weight_decay = True
        self._register_state_dict_hook(self.renamed)
        self.b.register_state_dict_post_hook(self.doubled)

    @staticmethod
    def renamed(_module: nn.Module, state: State, prefix: str, _metadata: Any) -> None:
        state[f"{prefix}old"] = state.pop(f"{prefix}turned")

    @staticmethod
    def doubled(_module: nn.Module, state: State, prefix: str, _metadata: Any) -> None:
        state[f"{prefix}gram"] = state[f"{prefix}weight"] @ state[f"{prefix}weight"].t()

    def _load_from_state_dict(self, state: State, prefix: str, *rest: Any) -> None:
        state[f"{prefix}turned"] = state.pop(f"{prefix}old")
        state.pop(f"{prefix}b.gram", None)
        super()._load_from_state_dict(state, prefix, *rest)

    def get_extra_state(self) -> State:
        return {"count": self.count, "sum": self.a.weight.sum().item()}

    def set_extra_state(self, state: State) -> None:
        self.count = state["count"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.a(x) + self.twin(x))
        return (self.norm(self.b(hidden) + hidden @ self.turned.t()) * self.scale).pow(2).mean()


def own() -> Own:
    torch.manual_seed(2)
    return Own().double()


def test_the_full_state_dict_is_that_of_one_device() -> None:
    single = own()
    train(single)
    want = single.state_dict()

    def body(hap: HAP) -> Any:
        train(hap)
        return hap.full_state_dict(), hap.module.b.weight.no_weight_decay

    for state, kept in on_four(body, own):
        assert kept
        assert type(state) is type(want)
        assert list(state) == list(want)
        assert state._metadata == want._metadata
        for key, value in want.items():
            if not isinstance(value, torch.Tensor):
                assert state[key]["count"] == 3
                assert state[key]["sum"] == pytest.approx(value["sum"], rel=1e-9)
                continue
            assert (state[key].dtype, state[key].stride()) == (value.dtype, value.stride()), key
            torch.testing.assert_close(state[key], value, rtol=1e-9, atol=1e-11)
        assert state["a.weight"].data_ptr() == state["twin.weight"].data_ptr()
        assert not any(value.requires_grad for value in state.values() if isinstance(value, torch.Tensor))


def test_hooks_of_the_model_see_whole_tensors_when_it_is_loaded() -> None:
    single = own()
    train(single)
    want = single.state_dict()

    def body(hap: HAP) -> Any:
        hap.load_state_dict(copy.copy(want))
        return hap.full_state_dict()

    for state in on_four(body, own):
        for key, value in want.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(state[key], value), key


def test_one_rank_alone_keeps_the_state() -> None:
    states = on_four(lambda hap: hap.full_state_dict(rank0_only=True))
    assert list(states[0]) == list(net().state_dict())
    assert states[1:] == [{}, {}, {}]
    assert X.shape == (16, 12)
