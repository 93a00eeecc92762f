"""Standard output that holds data and nothing else.

Where a command writes its result there (``--json -``), all that is printed on the way goes to standard error: by
the target's own code, by libraries, and by compiled code that writes to the file descriptor past Python.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from contextvars import ContextVar
from io import StringIO

_held: ContextVar[StringIO | None] = ContextVar("held", default=None)


def write_data(text: str) -> None:
    """Write a command's result to standard output; within :func:`kept_for_data`, at its end."""
    (_held.get() or sys.stdout).write(text)


@contextmanager
def kept_for_data(wanted: bool) -> Iterator[None]:
    """Within the context nothing else than :func:`write_data` reaches standard output, if that is ``wanted``."""
    if not wanted:
        yield
        return
    held = StringIO()
    token = _held.set(held)
    try:
        with redirect_stdout(sys.stderr), _descriptor_redirected():
            yield
    finally:
        _held.reset(token)
        sys.stdout.write(held.getvalue())


@contextmanager
def _descriptor_redirected() -> Iterator[None]:
    """File descriptor 1 is file descriptor 2 within the context."""
    if sys.__stdout__ is not None:
        sys.__stdout__.flush()
    _flush_compiled()
    try:
        descriptor = os.dup(1)
    except OSError:  # closed: there is nothing to keep clean
        yield
        return
    try:
        with suppress(OSError):  # no standard error
            os.dup2(2, 1)
        yield
    finally:
        _flush_compiled()
        os.dup2(descriptor, 1)
        os.close(descriptor)


def _flush_compiled() -> None:
    """Have the C library write what it has buffered, so that it goes where the descriptor points now."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).fflush(None)
