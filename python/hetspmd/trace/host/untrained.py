"""Leaves of autograd outside of the model on which the loss depends: a plan has no gradient for them.

They are found where autograd's graph of the traced loss ends: what the step reads under ``no_grad`` is not one of
them. That such a tensor requires a gradient is part of what the trace has read, by which every rank finds its own
(:func:`untrained_places`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

from hetspmd.errors import OutsideParameterWarning
from hetspmd.trace.compat.tensors import is_traced
from hetspmd.trace.host.changes import where
from hetspmd.trace.host.facts import Read
from hetspmd.trace.host.places import Path, Roots, items
from hetspmd.trace.host.plain import is_container
from hetspmd.trace.host.raw import size
from hetspmd.trace.host.steps import spoken

_FLAG: Final = ".requires_grad"
_MOST_ELEMENTS: Final = 10_000
_NAMED: Final = 3
Place = tuple[str, Path]


def untrained_places(reads: tuple[Read, ...]) -> list[Place]:
    """Where the leaves lie, by what a trace has read."""
    return [
        (read.root, read.path[:-1]) for read in reads if read.path[-1:] == (_FLAG,) and read.value == "True"
    ]


class Untrained:
    """The leaves outside of a model that its loss depends on."""

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self._leaves: dict[int, torch.Tensor] = {}
        self._places: dict[int, Place] = {}

    def look(self, loss: torch.Tensor | None) -> None:
        """Note the leaves of a loss that was traced."""
        seen: set[Any] = set()
        rest: list[Any] = [] if loss is None else [loss.grad_fn]
        while rest:
            node = rest.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, torch.Tensor) and not is_traced(leaf):
                self._leaves[id(leaf)] = leaf
            rest += [inner for inner, _ in node.next_functions]

    def reads(self, values: Mapping[Place, Any]) -> Iterator[Place]:
        """The places of their flags, found in the ``values`` that the trace has read."""
        if not self._leaves:
            return
        for place, value in values.items():
            for path, tensor in _tensors_in(value):
                if id(tensor) in self._leaves:
                    self._places.setdefault(id(tensor), (place[0], (*place[1], *path)))
        yield from ((root, (*path, _FLAG)) for root, path in self._places.values())

    def warn(self) -> None:
        """Say that they get no gradient, and what to write."""
        if not self._leaves:
            return
        places = [self._places.get(key) for key in self._leaves]
        reachable = [place for place in places if place is not None]
        names = [where(self._roots, *place) for place in reachable[:_NAMED]]
        if len(places) > len(names):
            names.append(
                f"{len(places) - len(names)} more" if names else "a tensor that no variable leads to"
            )
        what, name = self._part(*reachable[0]) if reachable else ("it", "it")
        plain = reachable and not isinstance(self._roots.value(*reachable[0]), nn.Parameter)
        value = f"nn.Parameter({what})" if plain else what
        warnings.warn(
            f"the loss depends on what requires a gradient and is no parameter of the model: {', '.join(names)}. "
            "On several devices it gets no gradient, and no optimizer can train it. To train it, make it a part of "
            f"the model before HAP(...), model.{name} = {value}, and read model.{name} in the step. If it is to "
            "stay as it is, or another loop trains it, say so before HAP(...) and around the step: "
            f"{what}.requires_grad_(False)",
            OutsideParameterWarning,
            stacklevel=5,
        )

    def _part(self, root: str, path: Path) -> tuple[str, str]:
        """What to put into the model, and by which name: the outermost module around a tensor, or that itself."""
        end = len(path)
        while end > 1 and isinstance(self._roots.value(root, path[: end - 1]), nn.Module):
            end -= 1
        prefix = root if root in ("model", "loss") else ""
        if path[0] in (".__defaults__", ".__kwdefaults__"):
            return "it", "it"
        named = [step[1:] for step in path[:end] if step.startswith(".") and step[1:].isidentifier()]
        what = "".join(map(spoken, path[:end]))
        return f"{prefix}{what}".removeprefix("."), named[-1] if named else "it"


def _tensors_in(value: Any, depth: int = 0) -> Iterator[tuple[Path, torch.Tensor]]:
    """The tensors of a value that is one, or a container of some, each with the steps to it."""
    if isinstance(value, torch.Tensor):
        yield (), value
    elif is_container(value) and size(value) <= _MOST_ELEMENTS and depth < 8:
        for step, inner in items(value):
            for path, tensor in _tensors_in(inner, depth + 1):
                yield (step, *path), tensor
