"""What is done with an exception that ends this process, before the hook that was there prints it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Final

__all__ = ["Action", "before_the_end"]

Action = Callable[[BaseException], None]

_ACTIONS: Final[list[Action]] = []


def before_the_end(action: Action) -> None:
    """Call ``action`` with the exception that nothing has caught, once however often this is asked for."""
    if not _ACTIONS:
        before = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            for each in _ACTIONS:
                each(error)
            before(kind, error, trace)

        sys.excepthook = hook
    if action not in _ACTIONS:
        _ACTIONS.append(action)
