"""docs/training.md: its blocks run as one script, on four ranks and on one device, and the losses agree."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "training.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)


def script(folder: Path) -> Path:
    """The page's script. It works in float64, and rank 0 leaves the losses behind."""
    (cluster,) = (block for block in blocks("yaml") if "# cluster.yaml" in block)
    (folder / "cluster.yaml").write_text(cluster, encoding="utf-8")
    head = "import torch\ntorch.set_default_dtype(torch.float64)\ntorch.set_num_threads(1)\n"
    tail = "import json\nif rank == 0:\n    json.dump(losses, open('losses.json', 'w'))\n"
    path = folder / "train.py"
    path.write_text("\n".join((head, *blocks("python"), tail)), encoding="utf-8")
    return path


def run(folder: Path, ranks: int) -> list[float]:
    folder.mkdir()
    path = script(folder)
    if ranks == 1:
        cluster = "devices: [{name: lone, flops: 1e+9, memory_bandwidth: 1e+9}]\n"
        (folder / "cluster.yaml").write_text(cluster, encoding="utf-8")
    command = [sys.executable, "-W", "error::FutureWarning", "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", path.name]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[float] = json.loads((folder / "losses.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.slow
def test_the_pages_script_trains_as_one_device_does(tmp_path: Path) -> None:
    four, one = run(tmp_path / "four", 4), run(tmp_path / "one", 1)
    assert len(four) > 15
    assert four == pytest.approx(one, rel=1e-7)


def test_the_page_has_its_parts() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for part in ("Install and launch", "The loop", "Evaluation", "Saving and resuming", "What is exact"):
        assert f"## {part}" in text, part
    assert len(blocks("python")) >= 9
