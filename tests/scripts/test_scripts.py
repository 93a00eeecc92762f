"""Ordinary training scripts, converted as docs/training.md says: on four gloo ranks they train, evaluate, clip,
save and resume as on one device."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
NEEDED = {"script_accelerate": "accelerate", "script_trainer": "accelerate", "script_lora": "peft"}
NEEDED |= {"script_lightning": "lightning"}
PATHS = (*os.environ.get("PYTHONPATH", "").split(os.pathsep), str(Path(sys.prefix) / "libraries"))
"""Where libraries are looked for beside the environment's own."""
CLOSE = {"script_trainer": 1e-6, "script_lora": 1e-6}
"""Language models of transformers compute their loss in float32."""


def installed(package: str) -> bool:
    """Whether a package is in the environment, or where libraries are looked for beside it."""
    return PathFinder.find_spec(package, [*sys.path, *filter(None, PATHS)]) is not None


def run(
    command: list[str], folder: Path, environment: dict[str, str], timeout: float = 300
) -> tuple[int, str]:
    """The status of a command, and what it said. No process that it has started outlives it."""
    with (folder / "said").open("w+") as said:
        started = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=said, stderr=said, start_new_session=True
        )
        try:
            status = started.wait(timeout)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            started.wait()
        said.seek(0)
        return status, said.read()


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted(path.stem for path in HERE.glob("script_*.py")))
def test_a_script_trains_as_on_one_device(script: str, tmp_path: Path) -> None:
    if script in NEEDED and not installed(NEEDED[script]):
        pytest.skip(f"needs {NEEDED[script]}: make test-slow installs it")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, PATHS))}
    status, said = run(
        [sys.executable, str(HERE / "forked.py"), script, str(tmp_path)], tmp_path, environment
    )
    assert status == 0, said[-6000:]
    alone, *ranks = (
        torch.load(tmp_path / f"{who}.pt", weights_only=False)
        for who in ("alone", *(f"rank{r}" for r in range(4)))
    )
    assert len(alone["figures"]) >= 10
    assert max(found["held"] for found in ranks[2:]) < 0.9 * alone["held"], "the plan must divide"
    for found in ranks:
        _compare(alone, found, CLOSE.get(script, 1e-8))


def _compare(alone: dict[str, Any], found: dict[str, Any], close: float) -> None:
    assert found["figures"] == pytest.approx(alone["figures"], rel=close)
    assert found["samples"] == alone["samples"]
    assert found["weights"].keys() == alone["weights"].keys()
    for name, weight in alone["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=1e-7, atol=1e-9, msg=name)


def living(folder: Path) -> list[str]:
    """Processes whose command names a folder."""
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit() and str(folder) in (process / "cmdline").read_text():
                found.append((process / "stat").read_text().rpartition(")")[2].split()[0])
    return [state for state in found if state != "Z"]


def left(folder: Path) -> list[str]:
    """Processes of a folder that are still there when those that were killed have had time to end."""
    limit = time.monotonic() + 20
    while (found := living(folder)) and time.monotonic() < limit:
        time.sleep(0.05)
    return found


PROCESSES = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")


@PROCESSES
@pytest.mark.slow
def test_when_a_rank_fails_the_others_are_ended(tmp_path: Path) -> None:
    (tmp_path / "script_here.py").write_text(
        "import os, time\n\n\ndef train(alone, folder):\n"
        "    if os.environ.get('RANK') == '3':\n        raise ValueError('on purpose')\n    time.sleep(120)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, PATHS)])}
    start = time.monotonic()
    status, said = run(
        [sys.executable, str(HERE / "forked.py"), "script_here", str(tmp_path)], tmp_path, environment
    )
    assert status == 1
    assert time.monotonic() - start < 60
    assert "on purpose" in said
    assert left(tmp_path) == []


@PROCESSES
def test_nothing_outlives_the_time_limit(tmp_path: Path) -> None:
    code = f"import os, time; os.fork(); os.fork(); time.sleep(120); {str(tmp_path)!r}"
    with pytest.raises(subprocess.TimeoutExpired):
        run([sys.executable, "-c", code], tmp_path, dict(os.environ), timeout=1)
    assert left(tmp_path) == []


def test_packages_of_the_environment_are_found() -> None:
    assert installed("torch")
    assert installed("pytest")
    assert not installed("no_package_has_this_name")
