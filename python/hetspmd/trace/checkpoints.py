"""Activation checkpointing in a model: regions whose forward eager PyTorch runs again in the backward.

A region is traced as the plain call that it is, and what it makes carries its number, so that the graph may
compute it again (:mod:`hetspmd.trace.recompute`). A region inside of another one has a number of its own, and
what it makes is a part of both. With ``use_reentrant=True`` a region of which no argument requires a gradient
gives none, in the plan as in eager PyTorch.

What the second run does besides computing activations has to be kept: it updates running statistics once more,
and those of a region in another one in the second run of either. It is traced after the forward, the last
region first, as the backward does it. The second run of a region that is not reentrant stops when it has what
autograd had saved, so that a region in it may be left out, if nothing is saved behind. How far that run gets
depends on what autograd saves, so a number that a region counts on in Python is refused. A region that changes
buffers and draws random numbers is refused, since its second run would draw others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from hetspmd.errors import TraceError
from hetspmd.trace.compat.checkpoint_calls import checkpoints_replaced, saves_told
from hetspmd.trace.compat.joint import in_region
from hetspmd.trace.compat.tensors import TorchDispatchMode
from hetspmd.trace.frames import here
from hetspmd.trace.host.places import text
from hetspmd.trace.host.recorder import Place


@dataclass
class _Region:
    """A region: the one ``around`` it, and whether its second run ``stops`` when it has what was saved (None: it is
    reentrant, and a run of the one around it computes it before it can stop).

    ``scope`` is left at its end. ``reached``: whether the second run of the one around computes it, too: where that
    stops, it does so only if it needs something behind."""

    around: int | None
    stops: bool | None
    scope: ExitStack
    reached: bool = True

    def reach(self) -> None:
        self.reached = True


class Checkpoints:
    """The regions of a step, numbered from 0 in the order in which they begin.

    ``counted`` tells the numbers that forward has changed so far, by their places.
    """

    def __init__(self, model: nn.Module, counted: Callable[[], Mapping[Place, object]] = dict) -> None:
        self._model, self._counted = model, counted
        self._regions: list[_Region] = []
        self._inside: int | None = None
        self._again_in: int | None = None
        """The region that runs again now, and the number of the next that it meets."""
        self._next = 0
        self._open = ExitStack()
        self._again: list[Callable[[], Any]] = []

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Within it, regions are plain calls. One that an error ends is closed behind it."""
        self._inside = None
        with ExitStack() as self._open, checkpoints_replaced(self._begin, self._reentrant):
            yield

    def whole(self, made: Mapping[int, Iterable[int]]) -> dict[int, frozenset[int]]:
        """The tensors of each region with those of regions in it; ``made`` has them by the innermost region."""
        tensors = {number: set(made.get(number, ())) for number in range(len(self._regions))}
        for number, region in reversed(list(enumerate(self._regions))):
            if region.around is not None:
                tensors[region.around] |= tensors[number]
        return {number: frozenset(each) for number, each in tensors.items() if each}

    def run_again(self) -> None:
        """Do what the second runs do to buffers."""
        with torch.no_grad(), _NoDraws():  # type: ignore[no-untyped-call]  # torch's is untyped
            for again in reversed(self._again):
                again()

    def _begin(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        stops: bool | None,
    ) -> Callable[[], None]:
        """Note a region that begins; what is returned is called at its end."""
        if not torch.is_grad_enabled():
            self._meet_again()
            return lambda: None
        number, region = len(self._regions), _Region(self._inside, stops, ExitStack())
        for other in self._regions:
            other.reached |= other.around == region.around
        self._regions.append(region)
        self._inside = number
        self._open.enter_context(region.scope).enter_context(in_region(number))
        before, numbers = self._buffers(), dict(self._counted())

        def end() -> None:
            self._inside = region.around
            region.scope.close()
            for place, value in self._counted().items():
                if numbers.get(place) != value:
                    raise TraceError(
                        f"the region of torch.utils.checkpoint at {here(self._model)} changes {text(*place)}, "
                        "which the backward would change again; change it outside of the region"
                    )
            changed = [name for name, state in self._buffers().items() if before.get(name) != state]
            if changed:
                self._refuse_others(changed)
                self._again.append(partial(self._run_again, number, partial(function, *args, **kwargs)))
                self._watch(region)

        return end

    def _watch(self, region: _Region) -> None:
        """Look whether autograd saves something behind a region and inside of the one around it: the tensors that a
        region is given, or what an op saves."""
        around = None if region.around is None else self._regions[region.around]
        if around is not None and around.stops and region.stops is not None:
            region.reached = False
            around.scope.enter_context(saves_told(region.reach))

    def _run_again(self, number: int, call: Callable[[], Any]) -> None:
        self._again_in, self._next = number, number + 1
        with suppress(_StoppedError):
            call()

    def _meet_again(self) -> None:
        """A region begins while another one runs again, which may stop there."""
        if self._again_in is not None and self._next < len(self._regions):
            region = self._regions[self._next]
            self._next += 1
            if region.around == self._again_in and not region.reached:
                raise _StoppedError

    def _reentrant(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if torch.is_grad_enabled() and not any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            with torch.no_grad():
                return function(*args)
        end = self._begin(function, args, {}, None)
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


class _StoppedError(Exception):
    """A second run has what was saved."""


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
