"""Hooks on the HAP module itself, and the older way to call ``state_dict``, as of any module."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from divided import net, on_four
from torch import nn

from hetspmd.errors import ShardError


def test_hooks_are_called_as_on_one_device() -> None:
    def told(model: Any) -> list[Any]:
        seen: list[Any] = []
        model.register_state_dict_pre_hook(lambda m, prefix, keep: seen.append(("before", prefix, keep)))

        def after(_module: nn.Module, state: Any, prefix: str, local: Any) -> None:
            state[f"{prefix}mine"] = local["version"]
            seen.append(("after", len(state)))

        def missing(_module: nn.Module, keys: Any) -> None:
            seen.append(sorted(keys.missing_keys))
            keys.missing_keys.clear()

        model.register_state_dict_post_hook(after)
        model._register_state_dict_hook(lambda m, state, prefix, local: OrderedDict(state, other=1))
        state = model.state_dict()
        held = nn.ModuleDict({"net": model})
        inside = held.state_dict()
        seen += [state["mine"], state["other"], inside["net.mine"]]

        def own(state: Any, prefix: str, *_: Any) -> None:
            seen.append(("load", sorted(state)[:2]))
            for key in ("mine", "other"):
                state.pop(prefix + key, None)

        model._register_load_state_dict_pre_hook(own)
        model.register_load_state_dict_post_hook(missing)
        model.load_state_dict(state)
        held.load_state_dict({key: value for key, value in inside.items() if key != "other"})
        state.pop("a.weight")
        model.load_state_dict(state)
        with pytest.raises(RuntimeError, match=r'Unexpected key.*"stranger"'):
            model.load_state_dict({**state, "stranger": torch.ones(1)})
        with pytest.raises(RuntimeError, match=r'Unexpected key.*stranger"'):
            held.load_state_dict({**inside, "net.stranger": torch.ones(1)})
        return seen

    want = told(net())
    assert want[0] == ("before", "", False)
    assert ["a.weight"] in want
    assert on_four(told, gather_state=True) == [want] * 4


CALLS: list[Callable[[nn.Module], Any]] = [
    lambda m: m.state_dict(OrderedDict(), "x.", False),
    lambda m: m.state_dict(OrderedDict(), "x."),
    lambda m: m.state_dict(OrderedDict(), prefix="x."),
    lambda m: m.state_dict(destination=OrderedDict(), prefix="x."),
]


@pytest.mark.filterwarnings("ignore:Positional args are being deprecated:FutureWarning")
def test_the_older_order_of_arguments_and_keep_vars() -> None:
    single = net()
    want = [list(call(single)) for call in CALLS]

    def body(hap: nn.Module) -> list[list[str]]:
        for ask in (
            lambda: hap.state_dict(keep_vars=True),
            lambda: hap.state_dict({}, "", True),
            lambda: nn.Sequential(hap).state_dict(keep_vars=True),
        ):
            with pytest.raises(ShardError, match=r"keep_vars=True.*named_parameters"):
                ask()
        return [list(call(hap)) for call in CALLS]

    assert on_four(body, gather_state=True) == [want] * 4
