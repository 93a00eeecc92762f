"""What the commands do with good input, and status 1 where a check fails."""

from __future__ import annotations

import json
import math
from importlib import import_module
from pathlib import Path

import pytest
import torch

import hetspmd
from hetspmd.placement import shard
from hetspmd.plan.plan import Plan
from hetspmd.rules import registry
from hetspmd.verify.comparison import VerifyReport

SEARCH = {"cost", "lower_bound", "gap", "seconds", "expansions", "stop_reason"}
COST = {"step_seconds", "compute_seconds", "communication_seconds", "memory_bytes"}
STAGES = {"trace", "rules", "synth", "balance", "total"}


def test_compile_for_people(command, targets, cluster) -> None:
    outcome = command("compile", targets, "--cluster", cluster)
    assert outcome.status == 0
    assert outcome.err == ""
    parts = [
        "Cluster of 3 devices", "Sharding ratios", "Parameters: 4 tensors", "Collectives", "Predicted step",
        "data parallel even", "data parallel proportional", "lower bound", "Compiled in",
    ]  # fmt: skip
    assert [part for part in parts if part not in outcome.out] == []
    assert "e0 = Parameter" not in outcome.out


def test_compile_why(command, targets, cluster) -> None:
    silent = command("compile", targets, "--cluster", cluster)
    told = command("compile", targets, "--cluster", cluster, "--why")
    assert (silent.status, told.status) == (0, 0)
    assert "compared" not in silent.out
    head, *rows = told.out[told.out.index("compared") :].splitlines()[1:]
    assert head.split() == ["a", "step", "devices", "why", "not", "candidate"]
    assert "the plan" in rows[0]
    assert sum("the plan" in row for row in rows) == 1
    assert len(rows) > 3
    assert all("slower" in row or "as slow" in row or "as fast" in row for row in rows[1:])
    assert any("data parallel even" in row for row in rows)


def test_compile_json(command, targets, cluster, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    assert command("compile", targets, "--cluster", cluster, "--json", out).status == 0
    document = json.loads(out.read_text())
    assert set(document) == {
        "version", "graph", "search", "cost", "baselines", "candidates", "ratios", "segments", "inside",
        "micro_batches", "own_turns", "rows_of_turns", "zero_levels", "recomputed", "program", "schedule",
        "transfers", "lengths", "sensitivity", "seconds",
    }  # fmt: skip
    assert all(set(s) == {"quantity", "ranks", "elasticity", "gain"} for s in document["sensitivity"])
    assert sum(-abs(s["elasticity"]) for s in document["sensitivity"]) == pytest.approx(-1.0)
    step, whole = document["cost"]["step_seconds"], document["lengths"]
    assert step == pytest.approx(whole["fractional_seconds"] * (1 + whole["loss"]))
    assert document["graph"]["parameters"] == 8 * 16 + 16 + 16 * 4 + 4
    assert document["graph"]["instructions"] > 10
    assert set(document["graph"]) == {"instructions", "parameters"}
    assert set(document["search"]) == SEARCH
    assert set(document["cost"]) == COST
    assert set(document["seconds"]) == STAGES
    assert {"data_parallel_even", "data_parallel_proportional"} <= set(document["baselines"])
    cost = document["cost"]
    assert cost["step_seconds"] == pytest.approx(cost["compute_seconds"] + cost["communication_seconds"])
    baselines = document["baselines"]
    programs = [v for k, v in baselines.items() if k != "fastest_device_alone"]
    assert cost["step_seconds"] <= min(programs)
    assert baselines["fastest_device_alone"] > 0
    assert len(cost["memory_bytes"]) == 3
    assert math.isclose(sum(document["ratios"]), 1.0)
    search = document["search"]
    assert 0 <= search["lower_bound"] <= search["cost"]
    assert search["gap"] == pytest.approx(1 - search["lower_bound"] / search["cost"])
    assert document["seconds"]["total"] >= document["seconds"]["trace"] > 0
    communication = sum(step["seconds"] for step in document["program"] if "kind" in step)
    assert document["ratios"] == [1.0, 0.0, 0.0], "the second and third device are idle"
    loss_to_idle = 1e-6 + 4 / 1.25e8
    assert communication + loss_to_idle == pytest.approx(cost["communication_seconds"])
    assert cost["memory_bytes"][1:] == [0, 0]


def test_micro_batches(command, targets, cluster, tmp_path: Path) -> None:
    out, plan = tmp_path / "out.json", tmp_path / "plan.json"
    target = targets
    told = command(
        "compile", target, "--cluster", cluster, "--micro-batches", 2, "--json", out, "--plan", plan
    )
    assert told.status == 0
    assert "Micro-batches: 2, of 6, 6 samples, one after the other." in told.out
    document = json.loads(out.read_text())
    assert document["micro_batches"] == Plan.load(plan).micro_batches == 2
    rows = document["rows_of_turns"]
    assert {len(of) for of in rows.values()} == {2}
    assert sum(map(sum, rows.values())) == 12
    assert command("verify", target, "--cluster", cluster, "--micro-batches", 2).status == 0
    many = command("compile", target, "--cluster", cluster, "--micro-batches", 13)
    assert many.status == 2
    assert "micro_batches=13: the batch has 12 samples" in many.err
    folder = tmp_path / "passes"
    dumped = command("compile", target, "--cluster", cluster, "--micro-batches", 2, "--dump-passes", folder)
    assert dumped.status == 0
    assert "micro-batch 1, with what is after the loop" in (folder / "rank0" / "00-emit.txt").read_text()


def test_recompute(command, targets, cluster, tmp_path: Path) -> None:
    out, plan = tmp_path / "out.json", tmp_path / "plan.json"
    target = f"{targets}:blocks"
    plain = command("compile", target, "--cluster", cluster, "--json", out)
    assert "Recomputation" not in plain.out
    assert json.loads(out.read_text())["recomputed"] == []
    told = command(
        "compile", target, "--cluster", cluster, "--recompute", "all", "--json", out, "--plan", plan
    )
    assert told.status == 0
    assert "Recomputation: the backward computes 3 blocks again, which adds" in told.out
    assert "layers.*" in told.out
    document = json.loads(out.read_text())["recomputed"]
    assert [block["block"] for block in document] == ["layers.0", "layers.1", "layers.2"]
    assert all(block["seconds"] > 0 and block["bytes"] == 2 * 12 * 8 * 4 for block in document)
    assert len(Plan.load(plan).graph.recomputed) == 3
    assert command("verify", target, "--cluster", cluster, "--recompute", "layers.0,layers.2").status == 0
    wrong = command("compile", target, "--cluster", cluster, "--recompute", "layer.*")
    assert wrong.status == 2
    assert (
        "recompute='layer.*': no module of the model that computes something matches it; near are"
        in wrong.err
    )


def test_json_to_standard_output_is_all_there_is(command, targets, cluster) -> None:
    outcome = command("compile", f"{targets}:positional", "--cluster", cluster, "--json", "-")
    assert outcome.status == 0
    assert set(json.loads(outcome.out)["search"]) == SEARCH


def test_program(command, targets, cluster, tmp_path: Path) -> None:
    constraints = tmp_path / "constraints.yaml"
    constraints.write_text("up.weight: shard(0)\n")
    plan = tmp_path / "plan"
    outcome = command(
        "compile",
        f"{targets}:on_meta",
        "--cluster",
        cluster,
        "--program",
        "--constraints",
        constraints,
        "--plan",
        plan,
    )
    assert outcome.status == 0
    lines = outcome.out.split("\nProgram\n")[1].splitlines()
    first = lines[0].split("  #")[0].split()
    assert " ".join(first) == "e0 = Parameter-Shard(0) {} -> {e0 | shard(0)}"
    saved = Plan.load(plan)
    assert len(lines) == len(saved.program.steps)
    assert saved.update.stored["up.weight"][0] == shard(0)


@pytest.mark.parametrize(
    "text", ['{"up.weight": "shard(0)", "output[0]": "replicated"}', "u*.we[hi]*: shard(0)"]
)
def test_explain_beside_constraints(command, targets, cluster, tmp_path: Path, text: str) -> None:
    constraints, out = tmp_path / "constraints.json", tmp_path / "plan.json"
    constraints.write_text(text)
    outcome = command(
        "compile", targets, "--cluster", cluster, "--constraints", constraints, "--json", out,
        "--explain", "up.weight", "--explain", "x",
    )  # fmt: skip
    assert outcome.status == 0
    weight, x = outcome.out.split("\n\n")[-2:]
    glob = text.split(":")[0].strip('{"')
    assert weight.startswith(f"up.weight (float32[16, 8]): shard(0), as the constraint {glob!r} asks\n")
    assert x.startswith("x (float32[12, 8]): ")
    assert [line.split()[1] for line in weight.splitlines() if line.startswith("  *  ")] == ["shard(0)"]
    first, second = json.loads(out.read_text())["explain"]
    assert (first["name"], first["chosen"], first["constraint"]) == ("up.weight", "shard(0)", glob)
    assert (second["name"], second["constraint"]) == ("x", None)
    assert {a["form"] for a in first["alternatives"]} == {"replicated", "shard(0)", "shard(1)"}
    for a in first["alternatives"]:
        assert 0 < a["lower_bound"] <= a["cost"] <= a["step_seconds"] * 3


def test_compile_is_the_same_in_every_run(command, targets, cluster, tmp_path: Path) -> None:
    texts = []
    for run in range(2):
        out = tmp_path / f"plan{run}"
        assert command("compile", targets, "--cluster", cluster, "--plan", out).status == 0
        texts.append(out.read_bytes())
    assert texts[0] == texts[1]


def test_a_module_as_target(
    command, cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, targets
) -> None:
    package = tmp_path / "some_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "model.py").write_text(
        Path(targets).read_text().replace("hetspmd_cli_test", "hetspmd_cli_test2")
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert command("compile", "some_package.model:positional", "--cluster", cluster).status == 0


def test_autocast(command, targets, cluster, tmp_path: Path) -> None:
    """The plan is that of the step as autocast casts it, and verify proves it."""
    out = tmp_path / "plan.json"
    given = [targets, "--cluster", cluster, "--autocast", "bfloat16"]
    assert command("compile", *given, "--plan", out).status == 0
    plan = Plan.load(out)
    assert plan.graph.autocast == "bfloat16"
    assert {t.dtype for t in plan.graph.tensors} >= {"float32", "bfloat16"}
    assert command("verify", *given, "--steps", "1").status == 0
    assert not torch.is_autocast_enabled("cpu")


def test_random_numbers_of_python(command, targets, cluster, tmp_path: Path) -> None:
    coin, out = f"{targets}:coin", tmp_path / "plan.json"
    refused = command("compile", coin, "--cluster", cluster)
    assert refused.status == 2
    assert "random" in refused.err
    assert (
        command("compile", coin, "--cluster", cluster, "--plan", out, "--host-randomness", "freeze").status
        == 0
    )
    assert Plan.load(out).graph.host.draws


def test_verify(command, targets, cluster, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    outcome = command("verify", targets, "--cluster", cluster, "--json", out, "--steps", "1")
    assert outcome.status == 0
    assert outcome.out.startswith("equal to the single device")
    document = json.loads(out.read_text())
    assert {"ok", "loss_error", "gradient_error", "parameter_error", "unproved", "notes", "located"} == set(
        document
    )
    assert document["ok"] is True
    assert all(document[k] <= 1e-9 for k in ("loss_error", "gradient_error", "parameter_error"))


def test_verify_that_fails(command, targets, cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def failing(model: object, example: object, cluster: object, **options: object) -> VerifyReport:
        asked.update(options)
        return VerifyReport(
            ok=False, loss_error=0.0, gradient_error=math.inf, parameter_error=1e-3, tolerance=1e-9,
            random=False, worst={}, rounding=2e-15,
        )  # fmt: skip

    monkeypatch.setattr(import_module("hetspmd.verify.comparison"), "verify", failing)
    outcome = command(
        "verify", targets, "--cluster", cluster, "--json", "-", "--steps", 5, "--dtype", "float32"
    )
    assert outcome.status == 1
    assert json.loads(outcome.out) == {
        "ok": False, "loss_error": 0.0, "gradient_error": None, "parameter_error": 1e-3, "rounding": 2e-15,
        "unproved": "", "notes": [], "located": "",
    }  # fmt: skip
    assert asked == {
        "dtype": "float32",
        "steps": 5,
        "constraints": None,
        "segments": "auto",
        "machines": "auto",
        "micro_batches": 1,
        "zero": None,
        "recompute": "checkpoints",
        "locate": False,
    }
    outcome = command("verify", targets, "--cluster", cluster)
    assert outcome.status == 1
    assert outcome.out.startswith("NOT EQUAL to the single device within 1e-09\n")


def test_verify_locate_says_where_the_two_part(
    command, targets, cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = "e7 = addmm of module b at model.py:3 is the first value that differs, on rank 1"
    asked = []

    def failing(model: object, example: object, cluster: object, **options: object) -> VerifyReport:
        asked.append(options["locate"])
        located = where if options["locate"] else ""
        return VerifyReport(False, 0.5, 0.0, 0.0, 1e-9, False, {"loss": "loss (sgd)"}, located=located)

    monkeypatch.setattr(import_module("hetspmd.verify.comparison"), "verify", failing)
    plain = command("verify", targets, "--cluster", cluster)
    told = command("verify", targets, "--cluster", cluster, "--locate")
    document = json.loads(command("verify", targets, "--cluster", cluster, "--locate", "--json", "-").out)
    assert asked == [False, True, True]
    assert (plain.status, told.status) == (1, 1)
    assert where in told.out + told.err
    assert where not in plain.out + plain.err
    assert document["located"] == where


def test_rules_list(command) -> None:
    outcome = command("rules", "list")
    assert outcome.status == 0
    names = outcome.out.splitlines()
    assert "aten.mm.default" in names
    assert names == sorted(names)
    assert command("rules").out == outcome.out


def test_rules_show(command) -> None:
    outcome = command("rules", "show", "mm")
    assert outcome.status == 0
    assert "  {shard(1), shard(0)} k {partial}\n" in outcome.out


def test_rules_check(command) -> None:
    outcome = command("rules", "check", "mm", "aten::add.Tensor", "--missing")
    assert outcome.status == 0
    assert outcome.out.startswith("aten.mm.default: ok")
    assert outcome.out.endswith("2 ops: all ok\n")


RULES = """
import torch
from hetspmd.rules.registry import rule

@torch.library.custom_op("hetspmd_cli_rules::{name}", mutates_args=())
def {name}(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(0)

rule("hetspmd_cli_rules::{name}", "{annotation}")
SAMPLES = {{"hetspmd_cli_rules::{name}": lambda: [((torch.randn(4, 5, dtype=torch.float64),), {{}})]}}
"""


@pytest.mark.parametrize(
    ("name", "annotation", "status"), [("wrong", "a b -> a b", 1), ("right", "a! b -> a! b", 0)]
)
def test_rules_check_of_ones_own(command, tmp_path: Path, name: str, annotation: str, status: int) -> None:
    path = tmp_path / f"{name}_rules.py"
    path.write_text(RULES.format(name=name, annotation=annotation))
    try:
        outcome = command("rules", "check", f"hetspmd_cli_rules::{name}", "--load", path)
    finally:
        registry.unregister(f"hetspmd_cli_rules::{name}")
    assert outcome.status == status, outcome
    assert ("wrong: " in outcome.out) == bool(status)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["check", "no_such_op"], "no_such_op has no rule"),
        (["show", "mmm"], "mmm has no rule; the nearest with one are"),
        (["check", "mm", "--load", "nowhere.py"], "nowhere.py does not exist"),
    ],
)
def test_rules_bad_input(command, arguments: list[str], text: str) -> None:
    outcome = command("rules", *arguments)
    assert outcome.status == 2
    assert text in outcome.line


def test_doctor(command) -> None:
    outcome = command("doctor")
    assert outcome.status == 0
    assert torch.__version__ in outcome.out
    assert "gloo" in outcome.out


def test_doctor_with_another_torch(command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.4.1+cpu")
    outcome = command("doctor")
    assert outcome.status == 1
    assert "BAD  torch" in outcome.out


def test_a_fault_is_not_bad_input(command, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> tuple[str, ...]:
        raise ZeroDivisionError("inside")

    monkeypatch.setattr("hetspmd.rules.registry.registered", broken)
    outcome = command("rules", "list")
    assert outcome.status == 70
    assert "Traceback" in outcome.err
    assert "fault of hetspmd" in outcome.err


def test_interrupt(command, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop() -> tuple[str, ...]:
        raise KeyboardInterrupt

    monkeypatch.setattr("hetspmd.rules.registry.registered", stop)
    assert command("rules", "list") == (130, "", "hetspmd: interrupted\n")


def test_the_version_is_told(command) -> None:
    outcome = command("--version")
    assert (outcome.status, outcome.out) == (0, f"hetspmd {hetspmd.__version__}\n")
