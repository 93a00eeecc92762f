"""Lowering shares the programs and models of tests/run and the graphs of tests/cost."""

import sys
from pathlib import Path

for folder in ("run", "cost"):
    sys.path.append(str(Path(__file__).parent.parent / folder))
