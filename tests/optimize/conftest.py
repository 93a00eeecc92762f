"""Makes the shared helpers of tests/, tests/run, tests/cost importable."""

import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
for folder in (
    TESTS,
    TESTS / "run",
    TESTS / "cost",
):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
