"""When Python's cyclic garbage collector rests.

A trace and a theory are a few million objects that almost all live on, and every allocation of some hundred of
them would have the collector walk them again: time that grows faster than the model. Nothing large hangs on a
cycle that waits for it, since fake tensors have no data.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """No cyclic garbage collection within the context; afterwards as it was before. Contexts may nest."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
