"""Makes the hand-built graphs of tests/cost importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "cost"))
