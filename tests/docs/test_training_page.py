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


PARTS: dict[str, tuple[str, ...]] = {
    "Install and launch": ("pip install", "torchrun", "init_process_group", "Seed every rank alike"),
    "The model and the loader": ("DistributedSampler", "DataLoader", "generator="),
    "Wrapping, and what counts as the loss": ("loss=1", 'loss="total"', "loss=lambda", "lr_scheduler"),
    "The loop": ("clip_grad_norm_", "schedule.step()", "Gradient accumulation"),
    "Evaluation": ("hap.eval()", "no_grad"),
    "Averages of weights (EMA), target networks": ("copy.deepcopy(hap)", "lerp_"),
    "Saving and resuming": (
        "full_state_dict()",
        "torch.save",
        "torch.load",
        "load_full_optimizer_state_dict",
    ),
    "Samples, and other methods of the model": ("full_module()", "generate"),
    "When a rank is busy, dead, or does something else": (
        "timeout=",
        "busy between two steps",
        "check_batches",
    ),
    "What is exact, and what is not": ("| in your script | under HAP | the line to write |",),
}
"""What a script needs, and words of the section that says it."""


def sections() -> dict[str, str]:
    text = PAGE.read_text(encoding="utf-8")
    return dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.M | re.S))


def test_the_page_has_its_parts() -> None:
    found = sections()
    for part, words in PARTS.items():
        assert part in found, part
        assert [word for word in words if word not in found[part]] == [], part
    assert len(blocks("python")) >= 9


def test_what_is_wrong_is_called_so_beside_the_line_to_write() -> None:
    """Every row of the table has three columns; one that is not exact has code to write, or what to leave out."""
    table = sections()["What is exact, and what is not"]
    rows = [
        [c.strip() for c in re.split(r"(?<!\\)\|", row)[1:-1]]
        for row in table.splitlines()
        if row[:2] == "| "
    ]
    rows = [row for row in rows if row[0] != "in your script"]
    assert len(rows) > 60
    wrong = [row for row in rows if "WRONG" in row[1]]
    assert len(wrong) >= 4
    for row in rows:
        assert len(row) == 3, row
        assert all(row), row
        if row in wrong:
            assert row[1].startswith("WRONG"), row
            assert re.search(r"`[^`]+`", row[2]), row


def test_readme_leads_here_from_its_first_screen() -> None:
    readme = (PAGE.parents[1] / "README.md").read_text(encoding="utf-8").splitlines()
    assert any("(docs/training.md)" in line for line in readme[:40])
    (start,) = (i for i, line in enumerate(readme) if line == "<!-- faster -->")
    before = " ".join(readme[start - 8 : start])
    assert "hetspmd's plan is the one that `hetspmd.tune` chose" in before
    assert "all other figures on this page are of plans as `hetspmd.compile` makes them" in before
