"""Ordinary training scripts, converted as docs/training.md says: on four gloo ranks they train, evaluate, clip,
save and resume as on one device."""

from __future__ import annotations

import os
import subprocess
import sys
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


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted(path.stem for path in HERE.glob("script_*.py")))
def test_a_script_trains_as_on_one_device(script: str, tmp_path: Path) -> None:
    if script in NEEDED and not any((folder / NEEDED[script]).is_dir() for folder in map(Path, PATHS)):
        pytest.skip(f"needs {NEEDED[script]}: make test-slow installs it")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, PATHS))}
    command = [sys.executable, str(HERE / "forked.py"), script, str(tmp_path)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
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
