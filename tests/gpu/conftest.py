"""The benches and the models of tests/run on the path."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS.parent / "benches"), str(TESTS / "run")]
