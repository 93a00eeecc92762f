"""Examples with more and fewer rows, wherever their inputs are nested, and models that refuse them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from steps_worker import Body, build
from torch import nn

import zoo
from hetspmd.cost.measured_steps import identity
from hetspmd.errors import BatchSizeError
from hetspmd.profile.rows import find_rows
from hetspmd.profile.step_runs import StepRunner
from hetspmd.profile.whole_steps import step_case
from hetspmd.trace.trace import trace

CPU = torch.device("cpu")


@dataclass
class Pair:
    """A container of a model's own."""

    left: torch.Tensor
    right: list[torch.Tensor]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(
        self, batch: dict[str, Any], pair: Pair, scale: float, positions: torch.Tensor
    ) -> torch.Tensor:
        x = batch["x"][0] + pair.left + pair.right[0]
        mask = batch["mask"]  # rows and rows
        return (mask @ self.layer(x) * scale + positions.sum()).square().mean()


def nested(rows: int) -> dict[str, Any]:
    x = torch.arange(4.0 * rows).view(rows, 4)
    return {
        "batch": {"x": (x,), "mask": torch.eye(rows)},
        "pair": Pair(x, [x]),
        "scale": 0.5,
        "positions": torch.arange(5.0),
    }


def test_rows_are_found_wherever_they_are_nested() -> None:
    model = Nested()
    places = find_rows("nested", model, (), nested(6))
    args, kwargs = places.resized((), nested(6), 9)
    assert args == ()
    assert (
        kwargs["batch"]["x"][0].shape == kwargs["pair"].left.shape == kwargs["pair"].right[0].shape == (9, 4)
    )
    assert torch.equal(kwargs["batch"]["x"][0][6:], nested(6)["batch"]["x"][0][:3]), "the rows, over and over"
    assert kwargs["batch"]["mask"].shape == (9, 9), "every dim that grows with the rows"
    assert kwargs["positions"].shape == (5,)
    assert kwargs["scale"] == 0.5
    assert model(**kwargs).isfinite()
    assert identity(trace(model, (), nested(4)), places.rows) == places.identity
    fewer = places.resized((), nested(6), 2)[1]
    assert fewer["batch"]["mask"].shape == (2, 2)


@pytest.mark.parametrize(
    "name", ["lstm", "dlrm", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bert", "clip", "t5"))]
)
def test_models_of_the_zoo_have_rows(name: str) -> None:
    """Also those that cannot be divided along the batch."""
    model, example, _ = getattr(zoo, name)()
    args, kwargs = ((), example) if isinstance(example, dict) else (example, {})
    places = find_rows(name, model, args, kwargs)
    leaves = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
    assert {leaves[leaf].shape[0] for leaf in places.leaves} == {zoo.BATCH}
    more = places.resized(args, kwargs, 2 * zoo.BATCH)
    returned = model(*more[0], **more[1])
    assert (returned if isinstance(returned, torch.Tensor) else returned.loss).isfinite()


def test_an_example_of_one_row_and_one_on_the_meta_device() -> None:
    places = find_rows("body", Body(), (), {"x": torch.zeros(1, 64), "y": torch.zeros(1, dtype=torch.long)})
    assert places.rows == (("x", 0, 1), ("y", 0, 1))
    with torch.device("meta"):
        model, example = build()
    case = step_case("meta", model, example)
    made = StepRunner(case, CPU, 2**30, "adamw", 0.5).run(3, 0.0)
    assert made.point is not None
    assert made.point.rows == 3


class Fixed(Body):
    """Has six rows, whoever asks."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(x.view(6, 64), y)


class Growing(Body):
    """Computes something else for more rows."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in range(len(x)):
            x = x.tanh()
        return super().forward(x, y)


class Rowless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        return (self.weight * scale).sum()


@pytest.mark.parametrize(
    ("model", "example", "message"),
    [
        (Fixed(), build()[1], r"with 12 rows of x, y it raises \w+: .*"),
        (Growing(), build()[1], "with 12 rows of x, y it computes something else than with 6"),
        (Rowless(), {"scale": torch.ones(())}, "no input has a dim 0 that grows with the rows"),
    ],
)
def test_models_that_cannot_have_other_rows_are_named(model: nn.Module, example: Any, message: str) -> None:
    with pytest.raises(
        BatchSizeError, match=f"mine.py: the model cannot be given more or fewer rows: .*{message}"
    ) as e:
        step_case("mine.py", model, example)
    assert "--no-steps" in str(e.value)
