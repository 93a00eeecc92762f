"""Reports about what a model returns: own classes, several losses, tensors without a gradient."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from cases_forward import Body, Made, only_x
from harness import Run, called, case
from torch import nn


@dataclasses.dataclass
class Result:
    loss: torch.Tensor
    parts: dict[str, torch.Tensor]
    note: str = ""


class Pair(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor


def kinds(run: Run, model: nn.Module, batches: Sequence[Any]) -> dict[str, Any]:
    """The loop also says what came back: its class, its fields, its loss."""
    wrapped = run.wrap(model, batches[0], gather_outputs=True) if not run.alone else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found: list[Any] = []
    for batch in batches:
        optimizer.zero_grad()
        output = called(wrapped, batch)
        loss = output["loss"] if isinstance(output, dict) else output.loss
        loss.backward()
        optimizer.step()
        if dataclasses.is_dataclass(output):
            content: Any = {f.name: getattr(output, f.name) for f in dataclasses.fields(output)}
        else:
            content = output._asdict() if isinstance(output, tuple) else dict(output)
        found += [type(output).__name__, _detached(content)]
    return {"outputs": found, "state": run.state(wrapped)}


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return {k: _detached(v) for k, v in value.items()} if isinstance(value, dict) else value


@case("pytorch#124666: outputs that are a dataclass", loop=kinds)
def outputs_that_are_a_dataclass() -> Made:
    class Model(Body):
        def forward(self, x: torch.Tensor) -> Result:
            y = self.logits(x)
            return Result(y.pow(2).mean(), {"most": y.detach().amax(), "y": y.detach()}, "fine")

    return Model(), only_x()


@case("pytorch#124666: a dataclass that is defined beside the model", loop=kinds)
def a_local_dataclass() -> Made:
    @dataclasses.dataclass
    class Local:
        loss: torch.Tensor
        logits: torch.Tensor

    class Model(Body):
        def forward(self, x: torch.Tensor) -> Local:
            y = self.logits(x)
            return Local(y.pow(2).mean(), y.detach())

    return Model(), only_x()


@case("pytorch#124666: a named tuple", loop=kinds)
def outputs_that_are_a_named_tuple() -> Made:
    class Model(Body):
        def forward(self, x: torch.Tensor) -> Pair:
            y = self.logits(x)
            return Pair(y.pow(2).mean(), y.detach())

    return Model(), only_x()


@case("pytorch#124666: an ordered dict of tensors and plain values", loop=kinds)
def outputs_that_are_an_ordered_dict() -> Made:
    class Model(Body):
        def forward(self, x: torch.Tensor) -> Any:
            y = self.logits(x)
            return collections.OrderedDict(logits=y.detach(), loss=y.pow(2).mean(), epoch=3, name="a")

    return Model(), only_x()


@case("pytorch#14329: a distribution is returned", refused=r"Normal|Bernoulli|loss")
def a_distribution_is_returned() -> Made:
    class Model(Body):
        def forward(self, x: torch.Tensor) -> Any:
            return torch.distributions.Bernoulli(logits=self.logits(x), validate_args=False)

    return Model(), only_x()


@case("pytorch#60882: a tensor that was newly made is returned beside the loss")
def a_new_tensor_beside_the_loss() -> Made:
    class Model(Body):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {
                "loss": self.logits(x).pow(2).mean(),
                "zeros": torch.zeros(3),
                "count": torch.tensor(x.shape[0]),
            }

    return Model(), only_x()


def summed(run: Run, model: nn.Module, batches: Sequence[Any]) -> dict[str, Any]:
    def total(m: Any, *batch: torch.Tensor) -> torch.Tensor:
        found = m(*batch)
        return found["a"] + 0.3 * found["b"]

    wrapped = run.wrap(model, batches[0], loss=total)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = total(wrapped, *batch) if run.alone else wrapped(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    return {"losses": losses, "state": run.state(wrapped)}


@case("pytorch#121594: a sum of the losses of several tasks", loop=summed)
def losses_of_several_tasks() -> Made:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(24, 3)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            hidden = torch.relu(self.first(x))
            return {"a": self.second(hidden).pow(2).mean(), "b": self.other(hidden).abs().mean()}

    return Model(), only_x()


@case("pytorch#20586: the loss comes second", options={"loss": 1})
def the_loss_comes_second() -> Made:
    class Model(Body):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.logits(x)
            return y.detach(), y.pow(2).mean()

    return Model(), only_x()


@case("pytorch#20586: no loss at all", refused=r"loss=")
def no_loss_at_all() -> Made:
    class Model(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.logits(x)

    return Model(), only_x()


class Table(collections.OrderedDict[str, Any]):
    """As in transformers: an item is a class, and an access makes a module of it."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


class Decoded(dict[str, float]):
    """An item is held in another unit than it is given in."""

    def __getitem__(self, key: str) -> float:
        return super().__getitem__(key) / 100


class Shifted(list[float]):
    """A list that counts from one."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index - 1)


TABLE = Table(relu=nn.ReLU, gelu=nn.GELU)


@case("transformers: ACT2FN in forward, a table that makes a module at each access")
def items_that_a_table_makes() -> Made:
    class Model(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return TABLE["gelu"](self.logits(x)).pow(2).mean()

    return Model(), only_x()


@case("a dict of settings whose class decodes what it holds")
def items_that_a_dict_decodes() -> Made:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.settings = Decoded(scale=50.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.logits(x) * self.settings["scale"]).pow(2).mean()

    return Model(), only_x()


@case("a list of settings that counts from one")
def items_of_a_list_that_counts_from_one() -> Made:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.scales = Shifted([0.5, 2.0])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.logits(x) * self.scales[1] * self.scales[2]).pow(2).mean()

    return Model(), only_x()


def counted(run: Run, model: nn.Module, batches: Sequence[Any]) -> dict[str, Any]:
    """The loop also says what the table holds."""
    return {"losses": _trained(run, model, batches), "held": dict(model.settings.items())}


def _trained(run: Run, model: nn.Module, batches: Sequence[Any]) -> list[torch.Tensor]:
    wrapped = run.wrap(model, batches[0])
    return [called(wrapped, batch).detach().clone() for batch in batches]


@case("a dict with own access that forward writes into", loop=counted)
def items_that_are_written_into_a_dict_with_own_access() -> Made:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.settings = Decoded(scale=50.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.settings["last"] = 3.0
            return (self.logits(x) * self.settings["scale"]).pow(2).mean()

    return Model(), only_x()


BACKENDS: dict[type, Any] = {}
"""As in einops: what handles a tensor, by its class, which is another while a model is traced."""


class Backend:
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def backend_of(x: torch.Tensor) -> Backend:
    if type(x) not in BACKENDS:
        BACKENDS[type(x)] = Backend()
    found: Backend = BACKENDS[type(x)]
    return found


@case("einops: a table of backends by the tensor's class")
def a_table_by_the_tensors_class() -> Made:
    class Model(Body):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return backend_of(x).scaled(self.logits(x)).pow(2).mean()

    return Model(), only_x()
