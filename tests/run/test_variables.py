"""Variables of modules and classes, however they are reached, that forward changes: as on one device."""

from __future__ import annotations

import copy
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_plans import cluster
from torch import nn

from hetspmd.run.module import HAP
from hetspmd.trace.trace import trace

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x).square().mean()


def local_class() -> type:
    class Net(Base):
        count = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Net.count += 1
            return self.loss(x) * Net.count

    return Net


def local_class_by_its_object() -> type:
    class Net(Base):
        count = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            type(self).count += 1
            return self.loss(x) * self.count

    return Net


class ByItsObject(Base):
    count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).count += 1
        return self.loss(x) * self.count


class ByAMethod(Base):
    count = 0

    @classmethod
    def counted(cls) -> int:
        cls.count += 1
        return cls.count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(x) * self.counted()


class OfADerived(ByItsObject):
    count = 0


class OfAnother(ByAMethod):
    """Its first step makes an attribute of its own."""


SOURCE = """
STATE, COUNT = {"count": 0}, 0

class Net(Base):
    def forward(self, x):
        STATE["count"] += 1
        return self.loss(x) * STATE["count"]

class Global(Base):
    def forward(self, x):
        global COUNT
        COUNT += 1
        return self.loss(x) * COUNT
"""


def of_a_file(name: str, folder: Path) -> dict[str, Any]:
    """Variables of a file that was executed without being imported, as ``torch.hub`` does."""
    file = folder / "model.py"
    file.write_text(f"from {__name__} import Base\n{SOURCE}", encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)


CLASSES: dict[str, Callable[[], type]] = {
    "a class of a function": local_class,
    "a class of a function, by its object": local_class_by_its_object,
    "a class, by its object": lambda: ByItsObject,
    "a class, by its method": lambda: ByAMethod,
    "a derived class": lambda: OfADerived,
    "a class that inherits": lambda: OfAnother,
}


def trains_alike(model: nn.Module, reset: Callable[[], None], count: Callable[[], int]) -> None:
    one, made = copy.deepcopy(model), []
    reset()
    wanted = [one(X).item() for _ in range(3)]
    assert wanted[0] != wanted[1]
    reset()
    hap = HAP(model, cluster(1), example=(X,))
    hap.run_lowered()
    assert count() == 0, "a trace leaves nothing behind"
    for _ in range(3):
        made.append(hap(X).item())
    torch.testing.assert_close(made, wanted)
    assert count() == 3


@pytest.mark.filterwarnings("ignore::hetspmd.errors.PlanPerValueWarning")
@pytest.mark.parametrize("name", CLASSES)
def test_attributes_of_classes(name: str) -> None:
    kind: Any = CLASSES[name]()

    declared = [k for k in kind.__mro__ if "count" in vars(k)]

    def reset() -> None:
        for home in [k for k in kind.__mro__ if "count" in vars(k)]:
            if home in declared:
                home.count = 0
            else:
                del home.count

    trains_alike(kind(), reset, lambda: kind.count)


@pytest.mark.filterwarnings("ignore::hetspmd.errors.PlanPerValueWarning")
@pytest.mark.parametrize("name", ["not_imported", "torch_hub.conf", __name__])
def test_variables_of_files_that_are_not_imported(name: str, tmp_path: Path) -> None:
    """Also one that has the name of another module."""
    found = of_a_file(name, tmp_path)
    state = found["STATE"]
    trains_alike(found["Net"](), lambda: state.update(count=0), lambda: state["count"])
    trains_alike(found["Global"](), lambda: found.update(COUNT=0), lambda: found["COUNT"])


class Leaves(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.loss(x)
        type(self).last = loss.detach()
        return loss


def test_an_attribute_of_a_class_that_only_forward_makes() -> None:
    model = Leaves()
    hap = HAP(model, cluster(1), example=(X,))
    hap.run_lowered()
    assert not hasattr(Leaves, "last")
    loss = hap(X)
    assert float(Leaves.last) == float(loss.detach())
    del Leaves.last


def test_a_class_in_lists_is_found_by_every_rank() -> None:
    def hidden() -> Any:
        class Kept:
            count = 0

        return [[Kept]]

    class Net(Base):
        def __init__(self) -> None:
            super().__init__()
            self.inside = hidden()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kind = self.inside[0][0]
            kind.count += 1
            return self.loss(x)

    model = Net()
    graph = trace(model, (X,), {})
    assert [place.path for place in (*graph.host.writes, *graph.host.counters)] == [(".count",)]
    assert model.inside[0][0].count == 0


def test_variables_of_the_environment_that_name_a_rank_are_no_part_of_a_plan() -> None:
    """Each rank has others, as it should: a line that the first alone prints."""

    class Net(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = os.environ.get("SLURM_PROCID", "0") == "0" and os.getenv("NODE_RANK", "0") == "0"
            return self.loss(x) * float(os.getenv("HETSPMD_TEST_SCALE", "1") if first else 1)

    read = [path for _, *path in ((r.root, *r.path) for r in trace(Net(), (X,), {}).host.reads)]
    assert [".environ", '["HETSPMD_TEST_SCALE"]'] in read
    assert not any("RANK" in step or "PROCID" in step for path in read for step in path)
