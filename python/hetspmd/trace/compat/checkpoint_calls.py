"""Calls of ``torch.utils.checkpoint``, which a trace stands in for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils.checkpoint


@contextmanager
def checkpoints_replaced(
    begin: Callable[..., Callable[[], None]], reentrant: Callable[[Callable[..., Any], tuple[Any, ...]], Any]
) -> Iterator[None]:
    """Within it, what this thread gives ``torch.utils.checkpoint`` is called once and not recomputed.

    ``reentrant(function, args)`` stands for the reentrant kind; ``begin(function, args, kwargs, stops)`` is called
    before a region of the other kind, and what it returns after it. ``stops``: whether torch would end the region's
    second run as soon as it has what was saved.
    """
    module: Any = torch.utils.checkpoint
    names = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
    before = {name: getattr(module, name) for name in ("CheckpointFunction", *names) if hasattr(module, name)}
    thread = threading.get_ident()

    class Plain:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            if threading.get_ident() != thread:
                return before["CheckpointFunction"].apply(function, preserve, *args)
            return reentrant(function, args)

    def implementation(
        function: Callable[..., Any], args: Any, kwargs: Any, **options: Any
    ) -> Iterator[None]:
        if threading.get_ident() != thread:
            yield from before[names[0]](function, args, kwargs, **options)
            return
        end = begin(function, args, kwargs, _stops(options.get("early_stop", True)))
        yield
        end()

    def flat(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        """As torch 2.14 and older call it: five options stand before the arguments, the last is early_stop."""
        if threading.get_ident() != thread:
            yield from before[names[1]](function, *args, **kwargs)
            return
        end = begin(function, args[5:], kwargs, _stops(args[4]))
        yield
        end()

    replaced = {"CheckpointFunction": Plain, names[0]: implementation, names[1]: flat}
    try:
        for name in before:
            setattr(module, name, replaced[name])
        yield
    finally:
        for name, original in before.items():
            setattr(module, name, original)


def _stops(asked: bool) -> bool:
    """Whether a region that asks for it stops early: torch's set_checkpoint_early_stop decides first."""
    everywhere = getattr(torch.utils.checkpoint, "_enable_checkpoint_early_stop", None)
    return asked if everywhere is None else bool(everywhere)


@contextmanager
def saves_told(note: Callable[[], None]) -> Iterator[None]:
    """Within it, ``note`` is called whenever autograd saves a tensor, in a trace too, which has hooks of its user
    rest."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        note()
        return tensor

    before = torch._C._autograd._saved_tensors_hooks_set_tracing(False)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(before)
