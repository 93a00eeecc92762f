"""What would take shards for whole parameters is refused, with the line to write."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from divided import CLUSTER, X, net, net_plan, on_four, train
from small_plans import cluster
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from hetspmd.errors import ShardError
from hetspmd.optimize.compiler import plan_for
from hetspmd.rules.theory import derive
from hetspmd.run.module import HAP
from hetspmd.search.constraints import Constraints
from hetspmd.trace.trace import trace


def draw(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight.data, 0.0, 0.02)


STATES: dict[str, Callable[[HAP], Any]] = {
    "hap.state_dict": lambda hap: hap.state_dict(),
    "module.state_dict": lambda hap: hap.module.state_dict(),
    "of a part": lambda hap: hap.module.a.state_dict(),
    "of a container": lambda hap: hap.module.b.state_dict(keep_vars=True),
    "saved": lambda hap: torch.save(hap.module.state_dict(), io.BytesIO()),
    "torch.distributed.checkpoint": lambda hap: get_model_state_dict(hap.module),
    "the module saved": lambda hap: torch.save(hap.module, io.BytesIO()),
    "a part pickled": lambda hap: pickle.dumps(hap.module.a),
    "parameters pickled": lambda hap: pickle.dumps(list(hap.parameters())),
    "hap saved": lambda hap: torch.save(hap, io.BytesIO()),
}
COPIES: dict[str, Callable[[HAP], Any]] = {
    "module": lambda hap: copy.deepcopy(hap.module),
    "a part": lambda hap: copy.deepcopy(hap.module.a),
    "a container": lambda hap: copy.deepcopy(hap.module.b),
    "parameters": lambda hap: copy.deepcopy(list(hap.parameters())),
    "average": lambda hap: torch.optim.swa_utils.AveragedModel(hap.module),
    "optimizer": lambda hap: copy.deepcopy(torch.optim.SGD(hap.parameters(), lr=0.1)),
}
CALLS: dict[str, Callable[[HAP], Any]] = {
    "module": lambda hap: hap.module(X),
    "forward": lambda hap: hap.module.forward(X),
    "a part": lambda hap: hap.module.a(X),
    "a container": lambda hap: hap.module.b(X),
    "a method": lambda hap: hap.module.encode(X),
    "without gradients": lambda hap: torch.no_grad()(hap.module)(X),
}
VALUES: dict[str, Callable[[HAP], Any]] = {
    "norm": lambda hap: hap.module.a.weight.norm(),
    "mean": lambda hap: hap.module.a.weight.mean(),
    "sum": lambda hap: sum(p.sum() for p in hap.parameters()),
    "maximum": lambda hap: hap.module.a.weight.max(),
}
DRAWS: dict[str, Callable[[HAP], Any]] = {
    "apply": lambda hap: hap.apply(draw),
    "apply to the module": lambda hap: hap.module.apply(draw),
    "apply to a part": lambda hap: hap.module.b.apply(draw),
    "reset_parameters": lambda hap: hap.module.a.reset_parameters(),
    "init": lambda hap: nn.init.xavier_uniform_(hap.module.a.weight),
    "normal_": lambda hap: torch.no_grad()(lambda: hap.module.a.weight.normal_())(),
}


def refusals(uses: dict[str, Callable[[HAP], Any]]) -> dict[str, list[str]]:
    """What every rank is told, by use."""

    def body(hap: HAP) -> dict[str, str]:
        texts = {}
        for name, use in uses.items():
            with pytest.raises(ShardError) as error:
                use(hap)
            texts[name] = str(error.value)
        return texts

    told = on_four(body)
    return {name: [texts[name] for texts in told] for name in uses}


@pytest.mark.parametrize(
    ("uses", "line"),
    [
        (STATES, "state = hap.full_state_dict() on every rank"),
        (COPIES, "copy.deepcopy(hap)"),
        (CALLS, "Write hap(...)"),
        (VALUES, "Write hap.full_tensors()["),
        (DRAWS, "nitialize the model before HAP"),
    ],
    ids=["states", "copies", "calls", "values", "draws"],
)
def test_every_rank_is_told_the_line_to_write(uses: dict[str, Callable[[HAP], Any]], line: str) -> None:
    for name, texts in refusals(uses).items():
        assert all(line in text for text in texts), name


def test_the_line_for_a_call_works() -> None:
    want = net()(X).item()

    def body(hap: HAP) -> tuple[float, float, torch.Size]:
        model: Any = hap.full_module()
        return model(X).item(), hap(X).item(), model.encode(X).shape

    for whole, loss, shape in on_four(body):
        assert whole == pytest.approx(want, rel=1e-12)
        assert loss == pytest.approx(want, rel=1e-12)
        assert shape == (16, 24)


def test_whole_parameters_given_for_a_call_are_used() -> None:
    want = net()(X).item()

    def body(hap: HAP) -> float:
        return torch.func.functional_call(hap.module, hap.full_tensors(), (X,)).item()

    assert on_four(body) == pytest.approx([want] * 4, rel=1e-12)


def test_what_is_elementwise_is_left_alone() -> None:
    """Weight decay by hand, clamping, constant initialization, freezing: as on one device."""

    def changed(model: nn.Module) -> list[float]:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9).clamp_(-0.2, 0.2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(X)
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.grad.add_(p.data.sign() + 2 * p, alpha=1e-2)
            optimizer.step()
            losses.append(loss.item())
        model.apply(lambda m: nn.init.zeros_(m.bias) if isinstance(m, nn.Linear) else None)
        losses.append(model(X).item())
        return losses

    want = changed(net())
    for found in on_four(changed):
        assert found == pytest.approx(want, rel=1e-10)


def test_an_idle_rank_makes_all_ranks_refuse() -> None:
    """Where one device is active it holds everything, and the others nothing: the same line works for both."""
    theory = derive(trace(net(), (X,), {}))
    plan = plan_for(theory, CLUSTER, Constraints(), (1.0,), active=(0,))

    def body(hap: HAP) -> tuple[list[float], list[str]]:
        for use in (*(u for name, u in STATES.items() if name != "parameters pickled"), COPIES["module"]):
            with pytest.raises(ShardError, match="on every rank"):
                use(hap)
        return train(hap), list(hap.full_state_dict())

    want = train(net())
    for losses, keys in on_four(body, plan=plan):
        assert losses == pytest.approx(want, rel=1e-10)
        assert keys == list(net().state_dict())


def test_a_lone_device_is_a_module_like_any_other() -> None:
    """With everything whole on every rank nothing is refused."""
    hap = HAP(net(), cluster(1), example=(X,))
    assert [key.removeprefix("module.") for key in hap.state_dict()] == list(net().state_dict())
    assert hap.module(X).item() == pytest.approx(net()(X).item())
    assert torch.equal(copy.deepcopy(hap.module).a.weight, hap.module.a.weight)
    assert pickle.loads(pickle.dumps(hap.module.a)).weight.shape == (24, 12)
    assert hap.module.a.weight.norm() > 0


def test_the_model_shows_no_trace_of_it() -> None:
    """Neither while a later plan is traced, nor in what hetspmd copies."""
    seen: list[bool] = []

    def watched(model: Any) -> None:
        model.a.register_forward_pre_hook(lambda m, _: seen.append("forward" in vars(m)))

    def body(hap: HAP, _: None) -> nn.Module:
        hap.eval()
        with torch.no_grad():
            hap(X)
        return hap.full_module()

    for model in on_four(body, before=watched):
        for module in model.modules():
            assert not {"forward", "apply"} & set(vars(module))
            assert not module._state_dict_pre_hooks
            assert not module._load_state_dict_pre_hooks
    assert seen == [False] * len(seen)
    assert seen, "the first rank traces"


def test_attributes_of_the_model_are_named() -> None:
    hap = HAP(net(), cluster(1), example=(X,))
    with pytest.raises(AttributeError, match=r"write hap\.module\.temperature"):
        _ = hap.temperature
    with pytest.raises(AttributeError, match=r"write hap\.module\.encode.*hap\.full_module\(\)"):
        hap.encode(X)
    with pytest.raises(AttributeError, match=r"write hap\.module\.temperature = "):
        hap.temperature = 2.0
    with pytest.raises(AttributeError, match=r"'HAP' object has no attribute 'nothing'"):
        _ = hap.nothing
    hap.note = "of the caller"
    assert hap.note == "of the caller"
    assert not hasattr(hap, "generate")
    with pytest.raises(ShardError, match="wrap another one"):
        hap.module = net()


@pytest.mark.parametrize(
    ("caller", "said"),
    [
        (
            "transformers.trainer",
            r"transformers\.trainer reads it there, .*gradient_checkpointing_enable\(\)",
        ),
        ("lightning.pytorch.core", r"lightning\.pytorch\.core reads it there, .*HAP\(\.\.\., loss="),
        ("torch.distributed.checkpoint.state_dict", r"full_state_dict\(\).*full_optimizer_state_dict"),
        ("__main__", r"write hap\.module\.temperature"),
        ("transformerlike", r"write hap\.module\.temperature"),
    ],
)
def test_what_a_library_asks_of_the_model_is_named_otherwise(caller: str, said: str) -> None:
    hap = HAP(net(), cluster(1), example=(X,))
    scope = {"__name__": caller, "hap": hap}
    with pytest.raises(AttributeError, match=said):
        eval("hap.temperature", scope)


def test_a_model_is_wrapped_once() -> None:
    def body(hap: HAP) -> None:
        with pytest.raises(ShardError, match="a shard of another HAP module"):
            HAP(hap.module, CLUSTER, plan=net_plan(), process_group=hap.everyone)
        with pytest.raises(ShardError, match="a shard of another HAP module"):
            HAP(nn.Sequential(hap.module.b), CLUSTER, example=(X,), process_group=hap.everyone)

    on_four(body)
    hap = HAP(net(), cluster(1), example=(X,))
    with pytest.raises(ShardError, match="belongs to a HAP module already"):
        HAP(hap.module, cluster(1), example=(X,))
    model = hap.module
    del hap
    assert HAP(model, cluster(1), example=(X,))(X).item() == pytest.approx(net()(X).item())
