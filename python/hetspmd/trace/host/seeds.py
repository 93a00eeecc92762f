"""Torch's random state, which a forward must not set: a plan draws numbers of its own.

A seed in forward makes the same numbers in every step on one device, and a plan would draw others each time, also
where the state is put back afterwards (``torch.random.fork_rng``). All of torch's functions ask its default
generator, in whose place something else lies while a model is traced.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any, Final, cast

import torch

from hetspmd.errors import TraceError
from hetspmd.trace.frames import frame_line
from hetspmd.trace.host.foreign import is_foreign

_SETTERS: Final = frozenset({"manual_seed", "seed", "set_state"})
_BETWEEN: Final = ("torch.random", "torch._compile", "torch._dynamo")
"""Modules that lie between a call of ``torch.manual_seed`` and the generator."""
_LOCK = threading.Lock()
_TRACING: ContextVar[bool] = ContextVar("hetspmd_tracing_seeds", default=False)
_traces = 0
_INSTEAD: Final = (
    "a plan draws random numbers of its own, others in each step. What is the same in every step is drawn once, in "
    "__init__: self.register_buffer(name, torch.rand(...)); what is drawn anew needs no generator: torch.rand(...)"
)


class _Default:
    """Torch's default generator, whose state the model's own code cannot set."""

    def __init__(self, of: torch.Generator) -> None:
        self.of = of

    def __getattr__(self, name: str) -> Any:
        if (name in _SETTERS or name == "initial_seed") and _TRACING.get():
            frame = _of_the_model(sys._getframe(1))
            if frame is not None and name == "initial_seed":
                raise TraceError(
                    f"the forward reads torch's seed at {frame_line(frame)}: a plan would keep the one of its "
                    "trace. Give the number to the model as an argument, or set it as an attribute"
                )
            if frame is not None:
                raise TraceError(f"the forward sets torch's random state at {frame_line(frame)}: {_INSTEAD}")
        return getattr(self.of, name)


@contextmanager
def seeds_refused() -> Iterator[None]:
    """Within the context this thread's models cannot set torch's random state. Raises TraceError where they do."""
    global _traces
    module = cast(Any, torch.random)
    with _LOCK:
        if not _traces:
            module.default_generator = _Default(module.default_generator)
        _traces += 1
    token = _TRACING.set(True)
    try:
        yield
    finally:
        _TRACING.reset(token)
        with _LOCK:
            _traces -= 1
            if not _traces:
                module.default_generator = module.default_generator.of


def refuse_generator(at: str) -> TraceError:
    """The refusal of an op that draws from a generator of its own."""
    return TraceError(f"the forward draws from a torch.Generator{f' at {at}' if at else ''}: {_INSTEAD}")


def _of_the_model(frame: FrameType | None) -> FrameType | None:
    """The model's own code that has called, by way of torch's functions for seeds and Python's library at most."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name.startswith(_BETWEEN) or name == __name__:
            frame = frame.f_back
            continue
        if name.partition(".")[0] not in sys.stdlib_module_names:
            return None if is_foreign(name) else frame
        if name == "__main__":
            return frame
        frame = frame.f_back
    return None
