"""Outputs and batches come in the classes that the model returns and takes."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from small_plans import cluster
from torch import nn

from hetspmd.dist.communicator import Communicator
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import DroppedOutputWarning, PlanError, TraceError
from hetspmd.plan.plan import Plan
from hetspmd.run.module import HAP
from hetspmd.trace import containers

WIDE = torch.float64


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    hidden: torch.Tensor | None = None
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    loss: torch.Tensor
    inner: Output


class Pair(NamedTuple):
    loss: torch.Tensor
    rest: dict[str, Any]


class Bag(collections.UserDict):  # type: ignore[type-arg]  # of anything
    pass


class Keyed(dict):  # type: ignore[type-arg]  # of anything
    def __getattr__(self, name: str) -> Any:
        return self[name]


class Own:
    def __init__(self, loss: torch.Tensor, deep: list[torch.Tensor]) -> None:
        self.loss, self.deep = loss, deep


class Rows(list):  # type: ignore[type-arg]  # of tensors
    pass


class Model(nn.Module):
    def __init__(self, pack: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a = nn.Linear(12, 24, dtype=WIDE)
        self.pack = pack

    def forward(self, x: Any) -> Any:
        tensor = x if isinstance(x, torch.Tensor) else x.x
        h = torch.tanh(self.a(tensor))
        return self.pack(h.pow(2).mean(), h)


X = torch.randn(16, 12, dtype=WIDE, generator=torch.Generator().manual_seed(0))


def outputs(pack: Callable[..., Any], x: Any = X, **options: Any) -> list[Any]:
    devices = cluster(4.0, 2.0, 1.0, 1.0)
    models = [Model(pack) for _ in range(4)]

    def body(communicator: Communicator) -> Any:
        given = {"example": (x,), **options}
        hap = HAP(
            models[communicator.rank], devices, gather_outputs=True, process_group=communicator, **given
        )
        return hap(x)

    return run_ranks(4, body)


def flat(value: Any) -> list[Any]:
    """Class names and values, all the way down."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [type(value), *(v for k in value for v in (k, *flat(value[k])))]
    if isinstance(value, (list, tuple)):
        return [type(value), *(v for item in value for v in flat(item))]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [type(value), *(v for f in dataclasses.fields(value) for v in flat(getattr(value, f.name)))]
    if hasattr(value, "__dict__"):
        return [type(value), *flat(vars(value))]
    return [value]


PACKS: dict[str, Callable[[Any, Any], Any]] = {
    "dataclass": lambda loss, h: Output(loss, h, "said"),
    "nested": lambda loss, h: Frozen(loss, Output(h.sum(), h)),
    "named tuple": lambda loss, h: Pair(loss, {"hidden": [h, (1, None)]}),
    "user dict": lambda loss, h: Bag(loss=loss, hidden=h),
    "derived dict": lambda loss, h: Keyed(loss=loss, hidden=Output(h.mean(), h)),
    "own class": lambda loss, h: Own(loss, [h, h.sum()]),
    "derived list": lambda loss, h: Rows([loss, h]),
    "in a tuple": lambda loss, h: (loss, Output(loss * 2, h), {"deep": Pair(loss, {})}),
}


@pytest.mark.parametrize("name", PACKS)
def test_an_output_comes_back_as_it_is(name: str) -> None:
    want = flat(Model(PACKS[name])(X))
    for got in map(flat, outputs(PACKS[name])):
        assert len(got) == len(want)
        for mine, theirs in zip(got, want, strict=True):
            if isinstance(theirs, torch.Tensor):
                torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
            else:
                assert mine == theirs


def test_a_class_local_to_a_function_is_met_by_a_rank_that_has_not_traced() -> None:
    @dataclasses.dataclass
    class Local:
        loss: torch.Tensor

    devices = cluster(4.0, 2.0)
    models = [Model(lambda loss, h: Local(loss)) for _ in range(2)]

    def body(communicator: Communicator) -> Any:
        hap = HAP(models[communicator.rank], devices, example=(X,), process_group=communicator)
        communicator.exchange(None)
        containers._KNOWN.clear()
        communicator.exchange(None)
        return hap(X)

    for output in run_ranks(2, body):
        assert type(output) is Local
        assert output.loss.shape == ()


@dataclasses.dataclass
class Batch:
    x: torch.Tensor


def test_a_batch_may_be_a_dataclass() -> None:
    want = Model(PACKS["dataclass"])(X)
    for got in outputs(PACKS["dataclass"], Batch(X)):
        torch.testing.assert_close(got.loss, want.loss)


def test_a_plan_file_says_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    from hetspmd.optimize.compiler import compile

    text = compile(Model(PACKS["dataclass"]), (X,), cluster(4.0, 2.0, 1.0, 1.0)).to_json()
    plan = Plan.from_json(text)
    assert type(outputs(PACKS["dataclass"], example=None, plan=plan)[3]) is Output
    monkeypatch.setattr(f"{__name__}.Output", dataclasses.make_dataclass("Output", ["loss"]))
    monkeypatch.setattr(containers, "_KNOWN", {})
    with pytest.raises(PlanError, match="Output has other fields than the plan's"):
        containers._together(
            containers.ApartContainer("dataclass", f"{__name__}:Output", ("loss", "gone"), 2, ()), [X, X]
        )


def test_what_cannot_come_back_is_refused() -> None:
    with pytest.raises(TraceError, match=r"output\['f'\] is a .*function.*return tensors and plain values"):
        outputs(lambda loss, h: {"loss": loss, "f": print})


def test_a_cache_comes_back_as_none_and_is_said() -> None:
    class KeyCache:
        def __init__(self, keys: torch.Tensor) -> None:
            self.keys = keys

    with pytest.warns(DroppedOutputWarning, match=r"output\['past'\] is a .*KeyCache and comes back as None"):
        found = outputs(lambda loss, h: {"loss": loss, "past": KeyCache(h)})
    assert [output["past"] for output in found] == [None] * 4
