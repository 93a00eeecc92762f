"""``python benches/trust``: see :mod:`trust.command`."""

from __future__ import annotations

import sys
from pathlib import Path


def run() -> int:
    """The bench, with its packages on the path."""
    sys.path[0] = str(Path(__file__).parents[1])
    from emulated.cluster import EmulationError
    from trust.command import main

    try:
        return main()
    except EmulationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(run())
