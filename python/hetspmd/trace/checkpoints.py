"""Activation checkpointing in a model: regions whose forward eager PyTorch runs again in the backward.

A region is traced as the plain call that it is, and what it makes carries its number, so that the graph may
compute it again (:mod:`hetspmd.trace.recompute`). A region inside of another one has a number of its own, and what it
makes is a part of both. What the second run does besides computing activations has to be kept: it updates running
statistics once more. It is traced after the forward, the last region first, as the backward does it. How far that run gets depends on what autograd saves,
so a number that a region counts on in Python is refused. A region that changes buffers and draws random numbers is
refused, since its second run would draw others. With ``use_reentrant=True`` a region of which no argument requires
a gradient gives none, in the plan as in eager PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from hetspmd.errors import TraceError
from hetspmd.trace.compat.checkpoint_calls import checkpoints_replaced
from hetspmd.trace.compat.joint import in_region
from hetspmd.trace.compat.tensors import TorchDispatchMode
from hetspmd.trace.frames import here
from hetspmd.trace.host.places import text
from hetspmd.trace.host.recorder import Place


class Checkpoints:
    """The regions of a step, numbered from 0 in the order in which they begin.

    ``counted`` tells the numbers that forward has changed so far, by their places.
    """

    def __init__(self, model: nn.Module, counted: Callable[[], Mapping[Place, object]] = dict) -> None:
        self._model, self._counted = model, counted
        self._around: list[int | None] = []
        """Of each region the one that it lies in."""
        self._inside: int | None = None
        self._open = ExitStack()
        self._again: list[Callable[[], Any]] = []

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Within it, regions are plain calls. One that an error ends is closed behind it."""
        self._inside = None
        with ExitStack() as self._open, checkpoints_replaced(self._begin, self._reentrant):
            yield

    def whole(self, made: Mapping[int, Iterable[int]]) -> dict[int, frozenset[int]]:
        """The tensors of each region, with those of the regions in it; ``made`` has them by the innermost region."""
        tensors = {number: set(made.get(number, ())) for number in range(len(self._around))}
        for number, around in reversed(list(enumerate(self._around))):
            if around is not None:
                tensors[around] |= tensors[number]
        return {number: frozenset(each) for number, each in tensors.items() if each}

    def run_again(self) -> None:
        """Do what the second runs do to buffers."""
        with torch.no_grad(), _NoDraws():  # type: ignore[no-untyped-call]  # torch's is untyped
            for again in reversed(self._again):
                again()

    def _begin(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Callable[[], None]:
        """Note a region that begins; what is returned is called at its end."""
        if not torch.is_grad_enabled():
            return lambda: None
        around, number = self._inside, len(self._around)
        self._around.append(around)
        self._inside = number
        scope = self._open.enter_context(ExitStack())
        scope.enter_context(in_region(number))
        before, numbers = self._buffers(), dict(self._counted())

        def end() -> None:
            self._inside = around
            scope.close()
            for place, value in self._counted().items():
                if numbers.get(place) != value:
                    raise TraceError(
                        f"the region of torch.utils.checkpoint at {here(self._model)} changes {text(*place)}, "
                        "which the backward would change again; change it outside of the region"
                    )
            changed = [name for name, state in self._buffers().items() if before.get(name) != state]
            if changed:
                self._refuse_others(changed)
                self._again.append(lambda: function(*args, **kwargs))

        return end

    def _reentrant(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if torch.is_grad_enabled() and not any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            with torch.no_grad():
                return function(*args)
        end = self._begin(function, args, {})
        output = function(*args)
        end()
        return output

    def _buffers(self) -> dict[str, tuple[int, int]]:
        return {name: (id(b), b._version) for name, b in self._model.named_buffers()}

    def _refuse_others(self, changed: list[str]) -> None:
        """Refuse buffers that are no running statistics: how far the second run gets depends on what is saved."""
        for name in changed:
            path, _, leaf = name.rpartition(".")
            owner = self._model.get_submodule(path)
            if not isinstance(owner, nn.modules.batchnorm._NormBase) or leaf not in owner._buffers:
                raise TraceError(
                    f"the region of torch.utils.checkpoint at {here(self._model)} changes buffer {name}, which the "
                    "backward would change again when it recomputes the region; change it outside the region"
                )


class _NoDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is untyped
    """Refuses random numbers in a second run."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise TraceError(
                "a region of torch.utils.checkpoint changes running statistics and draws random numbers "
                f"({func}), the same ones again when the backward recomputes it; leave the batch norm or the "
                "dropout outside of the region"
            )
        return func(*args, **(kwargs or {}))
