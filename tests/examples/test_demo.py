"""The demo, as `make demo` runs it, and its neighbour, shortened: four gloo workers, the single device beside them,
real data."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments", "measure"),
    [("digits.py", [], "accuracy"), ("docstrings.py", ["--steps", "6"], "perplexity")],
)
def test_four_workers_equal_one_device(script: str, arguments: list[str], measure: str) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = re.findall(r"^ *\d+ +(\d+\.\d{4}) +(\d+\.\d{4})$", done.stdout, re.MULTILINE)
    assert rows
    assert all(workers == device for workers, device in rows)
    assert "Sharding ratios" in done.stdout
    (workers, device) = re.search(
        rf"held-out {measure}[^:]*: (\S+) \(four workers\), (\S+) \(one", done.stdout
    ).groups()
    assert workers == device
