"""Activation checkpointing in a model: regions whose forward eager PyTorch runs again in the backward.

A region is traced as the plain call that it is, and what it makes carries its number, so that the graph may
compute it again (:mod:`hetspmd.trace.recompute`). A region inside of another one is a part of it. What the second
run does besides computing activations has to be kept: it updates running statistics once more. It is traced after
the forward, the last region first, as the backward does it. How far that run gets depends on what autograd saves,
so a number that a region counts on in Python is refused. A region that changes buffers and draws random numbers is
refused, since its second run would draw others. With ``use_reentrant=True`` a region of which no argument requires
a gradient gives none, in the plan as in eager PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
    """The regions of a step: ``count`` of them, and ``nested`` ones inside of others, the first at ``line``.

    ``counted`` tells the numbers that forward has changed so far, by their places.
    """

    def __init__(self, model: nn.Module, counted: Callable[[], Mapping[Place, object]] = dict) -> None:
        self._model, self._counted = model, counted
        self.count, self.nested = 0, 0
        self.line = ""
        self._inside = False
        self._open = ExitStack()
        self._again: list[Callable[[], Any]] = []

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Within it, regions are plain calls. One that an error ends is closed behind it."""
        with ExitStack() as self._open, checkpoints_replaced(self._begin, self._reentrant):
            yield

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
        outermost = not self._inside
        if outermost:
            self._inside = True
            self._open.enter_context(in_region(self.count))
            self.count += 1
        else:
            self.nested += 1
            self.line = self.line or here(self._model)
        before, numbers = self._buffers(), dict(self._counted())

        def end() -> None:
            if outermost:
                self._inside = False
                self._open.close()
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
