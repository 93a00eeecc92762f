"""What the bench on GPUs makes of its lines, how short runs add up, and its parts on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from emulated.spec import EmulationError
from gpu import command, one, report, results, session, shared, shares, statistics
from gpu.machine import described, words
from gpu.points import (
    ARMS,
    AUTOCAST,
    COMPILED,
    EAGER,
    FEW,
    NEEDS,
    ONE_GPU_MODELS,
    PARTS,
    PURE,
    REAL,
    SHARES,
    SINGLE,
    SMALL,
    TRUST,
    UNLIKE,
    UNLIKE_MODELS,
    Key,
    every,
    size_of,
    wanted,
)
from gpu.results import Arm, Line
from trust.models import MODELS
from versus.points import COMPILED as HETSPMD
from versus.points import DDP, INCUMBENTS

MACHINE = {"device": "GPU X", "torch": "2.11", "nccl": "2.28.9", "driver": "580"}


CLUSTER = """devices:
- {name: a, flops: 60 GFLOP/s, memory: 8GiB, memory_bandwidth: 10GB/s}
- {name: b, flops: 40 GFLOP/s, memory: 8GiB, memory_bandwidth: 10GB/s}
network: {bandwidth: 1GB/s, latency: 50us}
"""


def line(
    part: str = EAGER, model: str = "BERT", precision: str = AUTOCAST, at: str = REAL, **of: Any
) -> Line:
    """A line of one machine."""
    about = {"size": {"batch": 4, "tokens": 8}, "machine": MACHINE, "day": "2026-11-30", "took": 9.0}
    return Line(part, model, precision, at, **(about | of))


def paired(times: float, part: str = EAGER, at: str = REAL, launching: float = 0.5, **of: Any) -> Line:
    """A point of one GPU at which hetspmd takes so many times PyTorch's seconds, and half of its memory."""
    torchs, own = ARMS[part]
    arms = {
        torchs: Arm((0.010, 0.011, 0.030), (2.0, 1.0), (launching,) * 3, 4 << 30),
        own: Arm((0.010 * times, 0.011 * times, 0.030 * times), (2.0, 1.0), (launching,) * 3, 2 << 30),
    }
    return line(part, at=at, arms=arms, **of)


def unlike(own: float, predicted: float, communicating: float = 0.1, **of: Any) -> Line:
    """A point of several ranks at which the incumbents take 1 to 3 seconds, proportional DDP 3."""
    seconds = dict(zip(INCUMBENTS, (1.0, 2.5, 3.0, 2.8, 2.9), strict=True))
    arms = {name: Arm((s - 0.1, s, s + 0.1), (2.0, 1.0)) for name, s in seconds.items()}
    arms[HETSPMD] = Arm((own,), (2.0, 1.0), predicted=predicted, words="4 rows")
    measured = {"arms": arms, "computing": 0.1, "communicating": communicating}
    return line(UNLIKE, at=SHARES[0], **(measured | of))


def verdicts(*lines: Line) -> list[bool | None]:
    return [check.holds for check in statistics.checks(lines, every())]


def test_every_requirement_passes_fails_or_was_not_measured() -> None:
    assert verdicts() == [None] * 9
    few = paired(0.6, at=FEW, launching=0.95)
    good = [paired(0.99), few, paired(1.0, COMPILED), unlike(0.5, 0.49), unlike(0.6, 0.61, model="ViT")]
    assert verdicts(*good) == [True] * 9
    bad = [paired(1.01), paired(0.8, at=FEW, launching=0.95), paired(1.01, COMPILED), unlike(1.6, 0.8)]
    bad.append(unlike(1.5, 1.9, model="ViT"))
    assert verdicts(*bad) == [False, False, False, True, False, False, False, False, False]
    assert verdicts(paired(0.99), paired(0.8, at=FEW, launching=0.5))[:2] == [True, None], "the GPU limits it"
    assert verdicts(unlike(1.02, 1.0, 0.3))[4:7] == [True, None, True], "not balanced"
    assert verdicts(unlike(1.04, 1.0))[4] is False


def test_memory_is_compared_with_eager_pytorchs() -> None:
    both = [paired(0.99), paired(0.99, COMPILED)]
    assert verdicts(*both)[3] is True
    own = ARMS[COMPILED][1]
    more = replace(both[1], arms={**both[1].arms, own: replace(both[1].arms[own], peak=(4 << 30) + 1)})
    assert verdicts(both[0], more)[3] is False
    assert verdicts(more)[3] is None, "eager's was not measured"


def test_a_point_that_failed_lets_its_requirements_fail() -> None:
    failed = line(model="ViT", reason="RuntimeError: rank 0 failed")
    found = statistics.checks([paired(0.9), failed], every())
    assert [check.holds for check in found] == [False, None, None, False, *[None] * 5]
    assert "1 failed" in found[0].what
    lost = paired(0.9)
    lost = replace(lost, arms={**lost.arms, ARMS[EAGER][1]: Arm(reason="out of memory")})
    assert verdicts(lost)[0] is False
    skipped = line(model="ViT", reason="the package transformers is not installed", skipped=True)
    assert verdicts(paired(0.9), skipped)[0] is True


def test_the_page(tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    page.write_text("before\n<!-- results -->\nold\n<!-- end of results -->\nafter\n", encoding="utf-8")
    forced = {
        "tensor parallel": Arm((2.0,), (1.0, 1.0), predicted=1.5),
        "compiled": Arm((1.0,), predicted=1.0),
    }
    lines = [
        paired(0.5),
        paired(0.9, COMPILED, machine={"device": "GPU Y"}),
        unlike(0.5, 0.49),
        line(TRUST, at=SHARES[1], arms=forced),
        line(model="Llama", reason="OutOfMemoryError: a | b"),
        line(model="ViT", reason="no package", skipped=True),
    ]
    report.write(page, lines, every())
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert f"- 4 of {len(every())} points measured" in text
    assert "| 1 | GPU X, torch 2.11, nccl 2.28.9, driver 580 | 2026-11-30 |" in text
    assert "| 2 | GPU Y | 2026-11-30 |" in text
    assert (
        "| BERT | autocast | 4 x 8 | 1 | 11.00 | 5.50 | 0.500 | 0.500 to 0.500 | 50% | 4.00 | 2.00 |" in text
    )
    assert "| BERT | autocast | 4 x 8 | 2 | 11.00 | 9.90 | 0.900 |" in text
    assert "| 1.00 | **1000.0** | 2500.0 | 3000.0 | 2800.0 | 2900.0 | 500.0 |" in text
    assert "| BERT | autocast | 40:20:20:20 | 1 | tensor parallel | 1500.0 | 2000.0 | -25.0% |" in text
    assert "| eager | Llama | autocast | real | failed | OutOfMemoryError: a \\| b |" in text
    assert "| eager | ViT | autocast | real | skipped | no package |" in text
    assert "eager PyTorch's seconds for each model (1 of 14 points), 1 failed: fail (0.500)" in text
    assert list(results.load(tmp_path / "none", page.with_suffix(".jsonl")).values()) == lines


def test_the_page_of_the_documentation_is_what_its_lines_say(tmp_path: Path) -> None:
    kept = results.FOLDER.parents[2] / "docs" / "gpu.md"
    page = tmp_path / "gpu.md"
    page.write_text(kept.read_text(encoding="utf-8"), encoding="utf-8")
    lines = results.load(tmp_path / "none", kept.with_suffix(".jsonl"))
    report.write(page, results.ordered(lines, every()), every())
    assert page.read_text(encoding="utf-8") == kept.read_text(encoding="utf-8")


def test_a_later_run_goes_on(tmp_path: Path) -> None:
    keys = every()[:4]
    assert results.load(tmp_path) == {}
    for of in (paired(0.9, model=keys[0].model), line(model=keys[1].model, reason="failed")):
        results.append(tmp_path, of)
    results.append(tmp_path, line(model=keys[2].model, reason="no package", skipped=True))
    with (tmp_path / "points.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"part": "eag')
    lines = results.load(tmp_path)
    assert list(lines) == keys[:3]
    assert command.missing(keys, lines, again=False) == keys[2:], "what lacked a package is tried again"
    assert command.missing(keys, lines, again=True) == keys[1:]
    results.append(tmp_path, line(model=keys[0].model, reason="failed later"))
    results.append(tmp_path, paired(0.8, model=keys[1].model))
    lines = results.load(tmp_path)
    assert lines[keys[0]].measured, "seconds stay"
    assert lines[keys[1]].measured, "seconds replace a reason"
    assert results.load(tmp_path, small=True) == {}


def test_a_run_ends_between_points_when_its_seconds_are_over(tmp_path: Path) -> None:
    clock: Iterator[float] = iter([0.0, 1.0, 9.0, 10.5, 99.0])
    keys = every()[:4]

    def measure(key: Key) -> Line:
        return line(key.part, key.model, key.precision, key.at, reason="tried")

    assert command.run(keys, measure, tmp_path, 10.0, lambda: next(clock)) == 2
    assert list(results.load(tmp_path)) == keys[:2]
    assert command.run(keys, measure, tmp_path, None) == 4
    assert command.run(keys, measure, tmp_path, 0.0) == 0


def options(*arguments: str) -> Any:
    return command._parsed(["--device", "cpu", "--small", *arguments])


def test_a_point_that_fails_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: session.Session, key: Key) -> dict[str, Any]:
        raise EmulationError(
            "rank 0 failed:\nTraceback\n  a line\ntorch.OutOfMemoryError: CUDA out of memory.\n"
        )

    monkeypatch.setattr(session.Session, "_measured", fail)
    keys = [Key(EAGER, "BERT-MoE", AUTOCAST, REAL), Key(UNLIKE, "BERT-MoE", SINGLE, SHARES[0])]
    with session.Session(options()) as of:
        assert command.run(keys, of.line, tmp_path, None) == 2
    lines = results.load(tmp_path, small=True)
    assert list(lines) == keys
    reason = "EmulationError: rank 0 failed: torch.OutOfMemoryError: CUDA out of memory."
    assert {of.reason for of in lines.values()} == {reason}
    assert session.said(ValueError("")) == "ValueError: no message"


def test_what_a_machine_lacks_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NEEDS, "BERT", "a_package_that_there_is_not")
    with session.Session(options()) as of:
        found = of.line(Key(EAGER, "BERT", AUTOCAST, REAL))
        assert (found.skipped, found.reason) == (
            True,
            "the package a_package_that_there_is_not is not installed",
        )
        monkeypatch.setattr(shares.shutil, "which", lambda name: None)
        of.options.device = "cuda"
        found = of.line(Key(UNLIKE, "BERT-MoE", AUTOCAST, SHARES[0]))
        assert found.skipped
        assert "nvidia-cuda-mps-control" in found.reason


def test_an_arm_that_fails_leaves_the_others() -> None:
    def broken() -> one.Step:
        raise torch.OutOfMemoryError("no memory")

    found = one.in_turns({"one": lambda: lambda: torch.ones(()), "other": broken}, "cpu", 3, 2)
    assert len(found["one"]["seconds"]) == len(found["one"]["launched"]) == 3
    assert found["one"]["losses"] == [1.0, 1.0]
    assert found["other"] == {"reason": "out of memory beside 1 other arms: OutOfMemoryError: no memory"}


@pytest.mark.parametrize("precision", [AUTOCAST, pytest.param(PURE, marks=pytest.mark.slow)])
def test_a_point_of_one_device(precision: str) -> None:
    size = size_of(Key(EAGER, "BERT-MoE", precision, REAL), small=True)
    found = one.measure(
        None, part=EAGER, model="BERT-MoE", size=size, precision=precision, device="cpu", rounds=2, steps=1
    )
    assert list(found) == list(ARMS[EAGER])
    torchs, own = (of["losses"] for of in found.values())
    assert own == pytest.approx(torchs, rel=session.LOSSES[precision][0])
    assert all(len(of["seconds"]) == 2 and min(of["seconds"]) > 0 for of in found.values())


def test_the_points() -> None:
    keys = every()
    assert len(keys) == len(set(keys)) == 2 * 2 * 2 * 7 + 2 * 2 * 2 * 5
    assert [key.part for key in keys] == sorted((key.part for key in keys), key=PARTS.index)
    assert set(ONE_GPU_MODELS) == set(SMALL) == set(MODELS) > set(UNLIKE_MODELS)
    assert all(2 <= size_of(key, small=False)["batch"] <= 4 for key in keys if key.at == FEW)
    key = Key(UNLIKE, "BERT", SINGLE, SHARES[0])
    assert wanted(key, None)
    assert wanted(key, ["unlike", "BERT", "ViT"])
    assert not wanted(key, ["eager"])
    assert not wanted(key, ["BERT", AUTOCAST])
    assert not wanted(key, [SHARES[1]])


def test_the_environment_of_ranks_that_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [shares.environment(rank, ["60", "none"], 1234) for rank in range(2)]
    assert found[0]["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "60"
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in found[1]
    assert [of["NCCL_HOSTID"] for of in found] == ["host0", "host1"], (
        "NCCL refuses two ranks on a GPU of one host"
    )
    assert {of["LOCAL_RANK"] for of in found} == {"0"}
    ran: list[list[str]] = []
    monkeypatch.setattr(shares.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(shares.subprocess, "run", lambda command, **of: ran.append(command))
    with shares.mps(["none", "none"]) as served:
        assert not served
    with shares.mps(["60", "40"]) as served:
        assert served
    assert ran == [["/bin/nvidia-cuda-mps-control", "-d"], ["/bin/nvidia-cuda-mps-control"]]


def test_a_machine() -> None:
    found = described("cpu")
    assert found["device"] == "CPU"
    assert words(found).startswith(f"CPU, torch {torch.__version__}")
    assert words({}) == "not asked"
    assert shared.fingerprint(found) == shared.fingerprint(dict(reversed(found.items())))
    assert shared.fingerprint(found) != shared.fingerprint(MACHINE)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "GPT-9"], "nothing is called 'GPT-9'"), (["--rounds", "0"], "at least 1"),
        (["--seconds", "-1"], "0 or more"), (["--shares", "60:x"], "percents of two ranks"),
        (["--device", "cpu"], "goes with --small"), (["--small", "--write", "page.md"], "tries the bench"),
        (["--write", "no such page.md"], "there is no page"),
    ],
)  # fmt: skip
def test_options_that_mean_nothing(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert said in capsys.readouterr().err


def test_nothing_measured_is_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command.main(["--report", "--folder", str(tmp_path)]) == 0
    assert "nothing has been measured yet" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["--folder", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("skipped: torch sees no GPU")


@pytest.mark.slow
def test_ranks_over_gloo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ops, plan, all arms and the report; a second run finds everything measured. The profile of the ranks, which
    takes longer than all of it, is one that the folder has."""
    folder = tmp_path / f"60-40-{shared.fingerprint(described('cpu'))}"
    folder.mkdir()
    (folder / "cluster.yaml").write_text(CLUSTER, encoding="utf-8")
    arguments = [
        "--device", "cpu", "--small", "--shares", "60:40", "--only", UNLIKE, "BERT-MoE", SINGLE, "--turns", "1",
        "--steps", "1", "--budget", "0.1", "--ops-budget", "0.1", "--longest", "0", "--folder", str(tmp_path),
    ]  # fmt: skip
    assert command.main(arguments) == 0
    (found,) = results.load(tmp_path, small=True).values()
    assert found.measured, found.reason
    assert list(found.arms) == [*INCUMBENTS, HETSPMD]
    assert found.arms[HETSPMD].predicted
    assert found.computing > 0 < found.communicating
    assert found.seconds(DDP) > 0
    assert "- 1 of 1 points measured" in capsys.readouterr().out
    before = (tmp_path / "points.jsonl").read_text(encoding="utf-8")
    assert command.main(arguments) == 0
    assert (tmp_path / "points.jsonl").read_text(encoding="utf-8") == before
