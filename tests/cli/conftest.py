"""Running commands in this process, with what they print."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from hetspmd.cli.main import main

TARGETS = str(Path(__file__).with_name("targets.py"))

CLUSTER = """\
devices:
  - {name: fast, flops: 4e9, memory_bandwidth: 4e9}
  - {name: slow, count: 2, flops: 1e9, memory_bandwidth: 1e9}
network: {bandwidth: 1Gbit/s, latency: 1us}
"""


class Outcome(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """Standard error, which must be one line."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        return lines[0]


Command = Callable[..., Outcome]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: object) -> Outcome:
        status = main([str(a) for a in arguments])
        return Outcome(status, *capsys.readouterr())

    return run


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    return path


@pytest.fixture
def targets() -> str:
    return TARGETS
