"""What ``torch.compiler.is_compiling()`` and ``torch.is_anomaly_enabled()`` answer while a model is traced.

The user's own code gets the answer of eager PyTorch, whose results a plan has. Libraries ask whether they are
compiled to take a way that computes the same and does not look at values (a mask that is all ones, a length), and
are told that it is so. The trace has torch's anomaly mode on, for the lines of the backward; who asks for it is
told what there is outside.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import torch

from hetspmd.trace.host.foreign import is_foreign, is_installed

_LOCK = threading.Lock()
_TOLD: ContextVar[bool] = ContextVar("hetspmd_told_that_it_compiles", default=False)
_traces = 0
_original: Callable[[], bool] = torch.compiler.is_compiling
_anomaly: Callable[[], bool] = torch.is_anomaly_enabled
_OUTSIDE: ContextVar[bool | None] = ContextVar("hetspmd_anomaly_mode_outside_of_a_trace", default=None)


@contextmanager
def libraries_told() -> Iterator[None]:
    """Within the context libraries that this thread runs are told that they are compiled, and all code but torch's
    whether the anomaly mode is on now."""
    global _traces, _original, _anomaly
    compiler = cast(Any, torch.compiler)
    with _LOCK:
        if not _traces:
            _original = compiler.is_compiling
            compiler.is_compiling = _is_compiling
            _anomaly = torch.is_anomaly_enabled
            torch.is_anomaly_enabled = _is_anomaly_enabled
        _traces += 1
    token, outside = _TOLD.set(True), _OUTSIDE.set(_is_anomaly_enabled())
    try:
        yield
    finally:
        _OUTSIDE.reset(outside)
        _TOLD.reset(token)
        with _LOCK:
            _traces -= 1
            if not _traces:
                compiler.is_compiling = _original
                torch.is_anomaly_enabled = _anomaly


def _is_anomaly_enabled() -> bool:
    outside = _OUTSIDE.get()
    name = str(sys._getframe(1).f_globals.get("__name__"))
    return _anomaly() if outside is None or name.partition(".")[0] == "torch" else outside


def _is_compiling() -> bool:
    return _original() or (_TOLD.get() and _is_library(sys._getframe(1).f_globals.get("__name__")))


def _is_library(name: object) -> bool:
    module = sys.modules.get(str(name))
    return name != "__main__" and (is_foreign(name) or (module is not None and is_installed(module)))
