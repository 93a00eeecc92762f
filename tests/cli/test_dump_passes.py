"""``hetspmd compile --dump-passes DIR``: the files, what is printed, and folders that cannot be written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hetspmd.cli import outputs as files
from hetspmd.errors import OutputError
from hetspmd.lower.passes import PASSES

FILES = [f"{place:02d}-{each.name}.txt" for place, each in enumerate(PASSES)]

SHARED = """\
devices:
  - {name: fast, flops: 4e6, memory_bandwidth: 4e6, launch: 1e-9}
  - {name: slow, count: 2, flops: 1e6, memory_bandwidth: 1e6, launch: 1e-9}
network: {bandwidth: 1e8, latency: 1e-9}
"""
MACHINES = """\
devices:
  - {name: pair, flops: 4e6, memory: 1GiB, memory_bandwidth: 4e6, launch: 1e-9, accelerators: 2,
     inside: {bandwidth: 1e10, latency: 1e-9}}
  - {name: lone, flops: 1e6, memory: 1GiB, memory_bandwidth: 1e6, launch: 1e-9}
network: {bandwidth: 1e8, latency: 1e-9}
"""


def test_every_rank_after_every_pass(command, targets, tmp_path: Path) -> None:
    cluster, folder = tmp_path / "shared.yaml", tmp_path / "passes"
    cluster.write_text(SHARED)
    outcome = command("compile", targets, "--cluster", cluster, "--dump-passes", folder)
    assert (outcome.status, outcome.err) == (0, "")
    assert f"\nLocal graphs of ranks 0-2 after each pass: {folder}\n" in outcome.out
    assert sorted(p.name for p in folder.iterdir()) == ["rank0", "rank1", "rank2"]
    for rank in range(3):
        assert sorted(os.listdir(folder / f"rank{rank}")) == FILES
    first, *_, last = [(folder / "rank1" / name).read_text() for name in FILES]
    assert "aten.mul.Tensor(" in first
    assert "aten.mul_.Tensor(" in last
    again = tmp_path / "again"
    command(
        "compile", targets, "--cluster", cluster, "--dump-passes", again, "--json", tmp_path / "plan.json"
    )
    for path in folder.rglob("*.txt"):
        assert (again / path.relative_to(folder)).read_bytes() == path.read_bytes()


def test_accelerators_of_machines(command, targets, tmp_path: Path) -> None:
    cluster, folder = tmp_path / "machines.yaml", tmp_path / "passes"
    cluster.write_text(MACHINES)
    arguments = ("compile", targets, "--cluster", cluster, "--machines", "virtual", "--dump-passes", folder)
    assert command(*arguments).status == 0
    folders = sorted(p.name for p in folder.iterdir())
    assert folders[:2] == ["rank0", "rank1"]
    assert all(sorted(os.listdir(folder / name)) == FILES for name in folders)


def test_a_step_in_micro_batches(command, targets, tmp_path: Path) -> None:
    cluster, folder = tmp_path / "shared.yaml", tmp_path / "passes"
    cluster.write_text(SHARED)
    arguments = ("compile", targets, "--cluster", cluster, "--micro-batches", "2", "--dump-passes", folder)
    assert command(*arguments).status == 0
    for rank in range(3):
        assert sorted(os.listdir(folder / f"rank{rank}")) == FILES
        last = (folder / f"rank{rank}" / FILES[-1]).read_text()
        assert last.startswith(f"# rank {rank} of a program on ranks 0-2\nmicro-batch 0, with what is before")
        assert "\nmicro-batch 1, with what is after the loop\n" in last


def test_idle_ranks_have_no_folder(command, targets, cluster, tmp_path: Path) -> None:
    outcome = command("compile", targets, "--cluster", cluster, "--dump-passes", tmp_path, "--json", "-")
    assert outcome.status == 0
    assert json.loads(outcome.out)["ratios"] == [1.0, 0.0, 0.0]
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == ["rank0"]
    assert sorted(os.listdir(tmp_path / "rank0")) == FILES


def test_the_folder_is_checked_before_the_work(command, tmp_path: Path) -> None:
    # The target does not exist either: the first complaint shows what was looked at first.
    taken = tmp_path / "taken"
    taken.write_text("")
    for folder, words in (
        (tmp_path / "no" / "passes", "there is no folder"),
        (taken, "is a file; name a folder"),
    ):
        outcome = command("compile", "nowhere.py", "--cluster", "none.yaml", "--dump-passes", folder)
        assert outcome.status == 2
        assert "OutputError" in outcome.line
        assert words in outcome.line
    assert not (tmp_path / "no").exists()


def test_a_folder_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    for folder in (tmp_path, tmp_path / "new"):
        with pytest.raises(OutputError, match="no permission in"):
            files.check_folder_writable(str(folder))
