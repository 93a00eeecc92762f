"""When Python's cyclic garbage collector rests.

A trace and a theory are a few million objects that almost all live on, and every allocation of some hundred of
them would have the collector walk them again: time that grows faster than the model. Nothing large hangs on a
cycle that waits for it, since fake tensors have no data.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LOCK = threading.Lock()
_PAUSES: list[bool] = []
"""One for each thread that is within a context, and nested ones: whether it found the collector at work."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """No cyclic garbage collection within the context, and until no thread is within one; afterwards as it was
    before the first. Contexts may nest."""
    with _LOCK:
        _PAUSES.append(gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _LOCK:
            last = _PAUSES.pop()
            if not _PAUSES and last:
                gc.enable()
