"""``python benches/gpu``: see :mod:`gpu.command`."""

from __future__ import annotations

import sys
from pathlib import Path


def run() -> int:
    """The bench, with its packages on the path."""
    sys.path[0] = str(Path(__file__).parents[1])
    from emulated.entry import exit_status
    from gpu.command import main

    return exit_status(main)


if __name__ == "__main__":
    raise SystemExit(run())
