"""torch's transforms around a HAP module are refused by name, and what ranks read otherwise is named."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from beside import Beside, base
from divided import X, net, on_four
from small_plans import cluster
from torch.autograd import forward_ad

from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import BatchMismatchError, GradientError, HetspmdError, TraceError
from hetspmd.run.module import HAP


def dual(hap: Any) -> Any:
    with forward_ad.dual_level():
        return hap(forward_ad.make_dual(X, torch.ones_like(X)))


def of_parameters(hap: Any) -> Any:
    return torch.func.grad(lambda p: torch.func.functional_call(hap, p, (X,)))(dict(hap.named_parameters()))


def traced(hap: Any) -> Any:
    return torch.jit.trace(hap, (X,))


USES: dict[str, tuple[Callable[[Any], Any], type[HetspmdError], str]] = {
    "torch.jit.trace": (traced, TraceError, r"^torch\.jit\.trace would record one rank's program"),
    "torch.export": (lambda hap: torch.export.export(hap, (X,)), TraceError, r"^torch\.export would record"),
    "vmap": (lambda hap: torch.vmap(hap)(torch.stack([X, X])), GradientError, r"torch\.func"),
    "grad": (lambda hap: torch.func.grad(hap)(X), GradientError, r"torch\.func"),
    "grad of parameters": (of_parameters, HetspmdError, r"torch\.func"),
    "jvp": (lambda hap: torch.func.jvp(hap, (X,), (X,)), GradientError, r"torch\.func"),
    "forward mode": (dual, GradientError, r"forward-mode"),
}


@pytest.mark.parametrize("name", USES)
def test_a_transform_is_refused_by_name(name: str) -> None:
    use, kind, text = USES[name]
    hap = HAP(net(), cluster(1), example=(X,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of torch is deprecated
        with pytest.raises(kind, match=text) as error:
            use(hap)
    assert "model = hap.full_module()" in str(error.value)
    assert hap(X).item() == pytest.approx(net()(X).item())


def test_every_rank_is_told() -> None:
    def body(hap: HAP) -> None:
        for name in ("grad", "vmap", "grad of parameters"):
            use, kind, text = USES[name]
            with pytest.raises(kind, match=text):
                use(hap)
        hap(X)

    on_four(body)


def scaled(model: Any, x: torch.Tensor) -> torch.Tensor:
    return base(model, x) * model.k * model.settings["weight"] * (2 if model.flag else 1)


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a number": (lambda m: setattr(m, "k", 2.0), r"k is 2\.0"),
    "a flag": (lambda m: setattr(m, "flag", True), "flag is True"),
    "an item": (lambda m: m.settings.__setitem__("weight", 3.0), r"settings is \{'weight': 3\.0\}"),
    "a function": (lambda m: setattr(m, "function", base), "function is function beside.base"),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
def test_an_attribute_that_differs_is_named(name: str, known: bool) -> None:
    """Whether there is a plan for the other value or not."""
    change, text = CHANGES[name]
    torch.manual_seed(1)
    models = [Beside(scaled, k=1.0, flag=False, settings={"weight": 1.0}) for _ in range(4)]
    x = torch.randn(16, 12)

    def rank(communicator: Any) -> str:
        model = models[communicator.rank]
        hap = HAP(model, cluster(4, 2, 1, 1), example=(x,), process_group=communicator)
        hap(x)
        if known:
            before = dict(vars(model)), dict(model.settings)
            change(model)
            hap(x)
            model.__dict__.update(before[0])
            model.settings.update(before[1])
            hap(x)
        if communicator.rank == 2:
            change(model)
        with pytest.raises(BatchMismatchError, match=text) as error:
            hap(x)
        return str(error.value)

    for told in run_ranks(4, rank):
        assert "rank 2 called the model in another mode" in told
