"""``python benches/foreign``: see :mod:`foreign.command`."""

from __future__ import annotations

import sys
from pathlib import Path


def run() -> int:
    """The survey, with its package on the path."""
    sys.path[0] = str(Path(__file__).parents[1])
    from foreign.command import main

    return main()


if __name__ == "__main__":
    raise SystemExit(run())
