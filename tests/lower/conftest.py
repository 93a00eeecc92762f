"""Lowering shares the programs and models of tests/run."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "run"))
