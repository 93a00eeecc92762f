"""Reports about lists in which a forward collects what it computes."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import torch
from cases_forward import Body, Made, only_x
from harness import Run, called, case
from torch import nn


class Collecting(Body):
    """A body that keeps activations in ``acts``, and adds a penalty on the first of them to its loss."""

    acts: Any

    def __init__(self) -> None:
        super().__init__()
        self.acts = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.start()
        hidden = torch.relu(self.first(x))
        self.collect(hidden)
        return self.second(hidden).pow(2).mean() + 0.1 * self.kept()[0].abs().mean()

    def start(self) -> None:
        self.acts.clear()

    def collect(self, hidden: torch.Tensor) -> None:
        self.acts.append(hidden)

    def kept(self) -> Sequence[torch.Tensor]:
        return list(self.acts)


def collected(run: Run, model: nn.Module, batches: Sequence[Any]) -> dict[str, Any]:
    """Train; what was collected is read after every step."""
    wrapped = run.wrap(model, batches[0], gather_outputs=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found: list[Any] = []
    for batch in batches:
        optimizer.zero_grad()
        loss = called(wrapped, batch)
        loss.backward()
        optimizer.step()
        found += [loss.detach().clone(), [a.detach().clone() for a in model.kept()]]  # type: ignore[operator]  # a method
    return {"found": found, "state": run.state(wrapped)}


@case("forum: a list that forward clears at its beginning", loop=collected)
def a_list_that_is_cleared_first() -> Made:
    return Collecting(), only_x()


@case("forum: two activations in a list that forward empties by a slice", loop=collected)
def a_list_that_is_emptied_by_a_slice() -> Made:
    class Model(Collecting):
        def start(self) -> None:
            del self.acts[:]

        def collect(self, hidden: torch.Tensor) -> None:
            self.acts.extend([hidden, hidden.detach() * 2])

    return Model(), only_x()


@case("forum: a list in a dict, which forward clears at its beginning", loop=collected)
def a_list_in_a_dict_that_is_cleared() -> Made:
    class Model(Collecting):
        def __init__(self) -> None:
            super().__init__()
            self.acts = {"hidden": []}

        def start(self) -> None:
            self.acts["hidden"].clear()

        def collect(self, hidden: torch.Tensor) -> None:
            self.acts["hidden"].append(hidden)

        def kept(self) -> Sequence[torch.Tensor]:
            return list(self.acts["hidden"])

    return Model(), only_x()


@case("forum: a deque that holds the last activation", loop=collected)
def a_deque_of_the_last_activation() -> Made:
    class Model(Collecting):
        def __init__(self) -> None:
            super().__init__()
            self.acts = collections.deque(maxlen=1)

        def start(self) -> None:
            pass

    return Model(), only_x()


@case("forum: a hook fills a list that forward clears", loop=collected)
def a_hook_fills_a_list() -> Made:
    class Model(Collecting):
        def __init__(self) -> None:
            super().__init__()
            self.first.register_forward_hook(self.hook)

        def hook(self, _module: nn.Module, _args: Any, output: torch.Tensor) -> None:
            self.acts.append(output)

        def collect(self, hidden: torch.Tensor) -> None:
            pass

    return Model(), only_x()


def cleared_outside(run: Run, model: nn.Module, batches: Sequence[Any]) -> dict[str, Any]:
    """The loop reads and clears what forward collects."""
    wrapped = run.wrap(model, batches[0], gather_outputs=True)
    losses, means = [], []
    for batch in batches:
        losses.append(called(wrapped, batch).detach().clone())
        means.append([a.detach().mean() for a in model.acts])  # type: ignore[union-attr]  # a list
        model.acts.clear()  # type: ignore[operator,union-attr]  # a list
    return {"losses": losses, "means": means}


@case("forum: a list that the loop clears after every step", loop=cleared_outside)
def a_list_that_the_loop_clears() -> Made:
    class Model(Collecting):
        def start(self) -> None:
            pass

    return Model(), only_x()


@case(
    "forum: a list that grows in every step",
    loop=collected,
    refused=r"acts was \[\] and is \[tensor .*adds to the list acts of Model .*self\.acts\.clear\(\)",
)
def a_list_that_grows() -> Made:
    class Model(Collecting):
        def start(self) -> None:
            pass

        def collect(self, hidden: torch.Tensor) -> None:
            self.acts.append(hidden.detach())

    return Model(), only_x()


@case("forum: tensors in a set", loop=collected, refused=r"tensors in the set acts of Model .*in a list")
def a_set_of_activations() -> Made:
    class Model(Collecting):
        def __init__(self) -> None:
            super().__init__()
            self.acts = set()

        def collect(self, hidden: torch.Tensor) -> None:
            self.acts.add(hidden)

    return Model(), only_x()


def carried_over(run: Run, model: nn.Module, batches: Sequence[Any]) -> dict[str, Any]:
    """Truncated backpropagation: the loop puts the last hidden state where forward begins."""
    wrapped = run.wrap(model, batches[0], gather_outputs=True)
    losses = []
    for batch in batches:
        loss = called(wrapped, batch)
        loss.backward()
        losses.append(loss.detach().clone())
        model.state = model.last  # type: ignore[assignment]  # plain attributes
    return {"losses": losses}


@case(
    "forum: a hidden state that is a plain attribute of the model",
    loop=carried_over,
    refused=r"state was None and is tensor float64\[16, 24\].*register_buffer\('last'",
)
def a_state_that_is_a_plain_attribute() -> Made:
    class Model(Body):
        state: torch.Tensor | None = None
        last: torch.Tensor | None = None

        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(12, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.cell(x, self.state)
            self.last = hidden.detach()
            return self.second(hidden).pow(2).mean()

    return Model(), only_x()
