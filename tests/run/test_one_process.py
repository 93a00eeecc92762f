"""``hetspmd.hide_ranks`` comes before the libraries that it hides the ranks from."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist

import hetspmd
from hetspmd.errors import WorldSizeError
from hetspmd.run.one_process import NAMES

LIBRARIES = Path(sys.prefix) / "libraries"
REAL = """
import sys, torch.distributed as dist, hetspmd
from accelerate import Accelerator
dist.init_process_group("gloo")
assert Accelerator(cpu=True).num_processes == 2
try:
    hetspmd.hide_ranks()
except hetspmd.errors.WorldSizeError as error:
    print(error)
"""


@pytest.fixture
def of_accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What ``accelerate.state`` shares among its objects, in a group of one rank that looks like one of four."""
    shared = dict[str, Any]()
    module = ModuleType("accelerate.state")
    module.PartialState = type("PartialState", (), {"_shared_state": shared})  # type: ignore[attr-defined]  # made here
    monkeypatch.setitem(sys.modules, "accelerate.state", module)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for name in NAMES:
        monkeypatch.setenv(name, "4")
    yield shared
    dist.destroy_process_group()


@pytest.mark.parametrize("count", [2, 4])
def test_accelerate_has_seen_the_ranks(of_accelerate: dict[str, Any], count: int) -> None:
    of_accelerate["num_processes"] = count
    with pytest.raises(
        WorldSizeError, match=rf"has seen {count} processes already; .*before\s+Accelerator\(\)"
    ):
        hetspmd.hide_ranks()
    assert all(os.environ[name] == "4" for name in NAMES), "a refusal changes nothing"


@pytest.mark.parametrize("shared", [{}, {"num_processes": 1}])
def test_accelerate_has_seen_one_process(of_accelerate: dict[str, Any], shared: dict[str, Any]) -> None:
    of_accelerate.update(shared)
    assert hetspmd.hide_ranks() == 0
    assert not [name for name in NAMES if name in os.environ]


@pytest.mark.slow
@pytest.mark.skipif(not (LIBRARIES / "accelerate").is_dir(), reason="make test-slow installs accelerate")
def test_accelerate_itself_has_seen_the_ranks(tmp_path: Path) -> None:
    """So that what is asked of ``accelerate.state`` is what it has."""
    paths = filter(None, (os.environ.get("PYTHONPATH", ""), str(LIBRARIES)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
    script = tmp_path / "early.py"
    script.write_text(REAL, encoding="utf-8")
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
    ]
    done = subprocess.run(launch, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("Accelerate has seen 2 processes already") == 2
