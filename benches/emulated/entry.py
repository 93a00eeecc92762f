"""How a bench on emulated clusters ends."""

from __future__ import annotations

import sys
from collections.abc import Callable

from emulated.spec import EmulationError


def exit_status(main: Callable[[], int]) -> int:
    """That of ``main``; 1, and the message on standard error, where a cluster failed."""
    try:
        return main()
    except EmulationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
