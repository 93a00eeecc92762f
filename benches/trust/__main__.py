"""``python benches/trust``: see :mod:`trust.command`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])

from emulated.cluster import EmulationError  # noqa: E402  # the path first
from trust.command import main  # noqa: E402  # the path first

if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except EmulationError as error:
        sys.exit(f"error: {error}")
