"""What is done with an exception that ends this process, before the hook that was there prints it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final

Action = Callable[[BaseException], None]
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]

_ACTIONS: Final[list[Action]] = []
_LOCK = threading.Lock()


def before_the_end(action: Action) -> None:
    """Call ``action`` with the exception that nothing has caught, once however often this is asked for."""
    with _LOCK:
        if not _ACTIONS:
            sys.excepthook = _hook(sys.excepthook)
        if action not in _ACTIONS:
            _ACTIONS.append(action)


def _hook(before: Hook) -> Hook:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            for each in _ACTIONS:
                each(error)
        finally:
            before(kind, error, trace)

    return hook
