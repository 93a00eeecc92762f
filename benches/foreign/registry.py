"""The cases: models of packages in small configurations, and training loops.

A case names the package that it needs; nothing of it is imported before the case is made, so that cases of packages
that are not installed are left out.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from foreign.run import Run, called, loss_of, trainable

MODULES = (
    "transformers_text", "transformers_more", "timm_models", "torchvision_models", "diffusers_models", "graphs",
    "audio", "other_models", "loops_basic", "loops_pairs", "loops_packages",
)  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """A model, its batches (dicts or tuples) and where its loss is."""

    model: nn.Module
    batches: Sequence[Any]
    loss: Any = None
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda ps: torch.optim.SGD(ps, lr=0.02, momentum=0.9)
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """``make`` is called with torch seeded, once for one device and once per rank; ``play`` gets what it returns.

    ``package`` is the import name. What ``play`` returns (tensors in lists and dicts) is compared.
    """

    name: str
    package: str
    kind: Literal["model", "loop"]
    make: Callable[[], Any]
    play: Callable[[Run, Any], dict[str, Any]]

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


CASES: dict[str, Case] = {}


def add(case: Case) -> None:
    """Raises ValueError for a second case of the same name."""
    if case.name in CASES:
        raise ValueError(f"two cases are called {case.name}")
    CASES[case.name] = case


def model(name: str, package: str, make: Callable[[], Sample]) -> None:
    """Add a model that is trained for three steps and evaluated."""
    add(Case(name, package, "model", make, train))


def loop(
    package: str, make: Callable[[], Any]
) -> Callable[[Callable[[Run, Any], dict[str, Any]]], Callable[[Run, Any], dict[str, Any]]]:
    """Add the decorated function as a loop under its own name, with ``-`` for ``_``."""

    def added(play: Callable[[Run, Any], dict[str, Any]]) -> Callable[[Run, Any], dict[str, Any]]:
        add(Case(play.__name__.replace("_", "-"), package, "loop", make, play))
        return play

    return added


def load() -> dict[str, Case]:
    """All cases, in order."""
    for module in MODULES:
        importlib.import_module(f"foreign.{module}")
    return CASES


def train(run: Run, sample: Sample) -> dict[str, Any]:
    """Three steps, an evaluation without gradients, and the whole state."""
    optimizer = sample.optimizer(trainable(sample.model))
    loss = {} if sample.loss is None else {"loss": sample.loss}
    wrapped = run.wrap(sample.model, sample.batches[0], **loss, **sample.options)
    at = None if callable(sample.loss) else sample.loss
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        value = loss_of(called(wrapped, sample.batches[step % len(sample.batches)]), at)
        value.backward()
        optimizer.step()
        losses.append(value.detach().clone())
    state = run.state(wrapped)
    wrapped.eval()
    with torch.no_grad():
        evaluated = loss_of(called(wrapped, sample.batches[0]), at).clone()
    return {"losses": losses, "state": state, "evaluation": evaluated}


def without_dropout(model: nn.Module) -> nn.Module:
    """The model with every dropout at 0: random numbers of ranks are right but others than one device's."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            drops = "drop" in name or (name == "p" and "Drop" in type(module).__name__)
            if drops and isinstance(value, float) and 0.0 < value < 1.0:
                setattr(module, name, 0.0)
    return model
