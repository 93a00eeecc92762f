"""Leaves of autograd outside of the model on which the loss depends: a plan has no gradient for them.

They are found where autograd's graph of the traced loss ends: what the step reads under ``no_grad`` is not one of
them. That such a tensor requires a gradient is part of what the trace has read, by which every rank finds its own
(:func:`untrained_leaves`). What was computed of a leaf before the step leads to it as well.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

from hetspmd.errors import OutsideParameterWarning, TraceError
from hetspmd.trace.compat.tensors import is_traced
from hetspmd.trace.host.changes import where
from hetspmd.trace.host.facts import Read
from hetspmd.trace.host.places import Path, Roots, items, text
from hetspmd.trace.host.plain import is_container
from hetspmd.trace.host.raw import size
from hetspmd.trace.host.steps import spoken

_FLAG: Final = ".requires_grad"
_MOST_ELEMENTS: Final = 10_000
_NAMED: Final = 3
Place = tuple[str, Path]


def untrained_leaves(reads: tuple[Read, ...], roots: Roots) -> Iterator[tuple[torch.Tensor, str]]:
    """The leaves, and how people call them, by what a trace has read."""
    for read in reads:
        if read.path[-1:] != (_FLAG,) or read.value != "True":
            continue
        place = read.root, read.path[:-1]
        tensor = roots.value(*place)
        for leaf in _leaves(tensor) if isinstance(tensor, torch.Tensor) else ():
            yield leaf, text(*place) if leaf is tensor else f"what {text(*place)} was computed of,"


class Untrained:
    """The leaves outside of a model that its loss depends on."""

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self._leaves: dict[int, torch.Tensor] = {}
        self._places: dict[int, Place] = {}

    def look(self, loss: torch.Tensor | None) -> None:
        """Note the leaves of a loss that was traced."""
        if loss is not None:
            self._leaves.update((id(leaf), leaf) for leaf in _leaves(loss) if not is_traced(leaf))

    def reads(self, values: Mapping[Place, Any]) -> Iterator[Place]:
        """The places of the flags of those that lead to leaves, found in the ``values`` that the trace has read."""
        if not self._leaves:
            return
        for place, value in values.items():
            for path, tensor in _tensors_in(value):
                for leaf in _leaves(tensor) if tensor.requires_grad and not is_traced(tensor) else ():
                    if id(leaf) in self._leaves:
                        self._places.setdefault(id(leaf), (place[0], (*place[1], *path)))
        yield from dict.fromkeys((root, (*path, _FLAG)) for root, path in self._places.values())

    def check(self) -> None:
        """Raise TraceError for a leaf to which no place leads: no rank could say which optimizer holds it."""
        lost = next((leaf for key, leaf in self._leaves.items() if key not in self._places), None)
        if lost is not None:
            raise TraceError(
                f"the loss depends on a tensor {list(lost.shape)} that requires a gradient and is no parameter of "
                "the model, in a way that cannot be followed: from a set, a weak reference, under a key that is an "
                "object, in a variable of a context, in what a function keeps; on several devices it gets no "
                "gradient. To train it, make it a parameter of the model (model.name = nn.Parameter(...)); if it "
                "is to stay as it is, tensor.requires_grad_(False)"
            )

    def warn(self) -> None:
        """Say that they get no gradient, and what to write."""
        places = list(dict.fromkeys(self._places.values()))
        if not places:
            return
        names = [where(self._roots, *place) for place in places[:_NAMED]]
        if len(places) > len(names):
            names.append(f"{len(places) - len(names)} more")
        warnings.warn(
            f"the loss depends on what requires a gradient and is no parameter of the model: {', '.join(names)}. "
            f"On several devices it gets no gradient, and no optimizer can train it. {self._mend(*places[0])}",
            OutsideParameterWarning,
            stacklevel=5,
        )

    def _mend(self, root: str, path: Path) -> str:
        what, name = self._part(root, path)
        tensor = self._roots.value(root, path)
        if isinstance(tensor, torch.Tensor) and not tensor.is_leaf:
            return (
                f"{what} was computed before the step: compute it in the step, of a parameter of the model; or, if "
                f"what it was computed of is to stay as it is, {what}.detach()"
            )
        value = what if isinstance(tensor, nn.Parameter) else f"nn.Parameter({what})"
        return (
            f"To train it, make it a part of the model before HAP(...), model.{name} = {value}, and read "
            f"model.{name} in the step. If it is to stay as it is, or another loop trains it, say so before "
            f"HAP(...) and around the step: {what}.requires_grad_(False)"
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


def _leaves(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The leaves of autograd that require a gradient and of which a tensor was computed, or itself."""
    if tensor.grad_fn is None:
        yield from (tensor,) if tensor.requires_grad else ()
        return
    seen: set[Any] = set()
    rest: list[Any] = [tensor.grad_fn]
    while rest:
        node = rest.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):
            yield leaf
        rest += [inner for inner, _ in node.next_functions]


def _tensors_in(value: Any, depth: int = 0) -> Iterator[tuple[Path, torch.Tensor]]:
    """The tensors of a value that is one, or a container of some, each with the steps to it."""
    if isinstance(value, torch.Tensor):
        yield (), value
    elif is_container(value) and size(value) <= _MOST_ELEMENTS and depth < 8:
        for step, inner in items(value):
            for path, tensor in _tensors_in(inner, depth + 1):
                yield (step, *path), tensor
