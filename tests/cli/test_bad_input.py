"""Bad input: status 2, one line that says what, where and how to mend it, and no file touched."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from hetspmd.cli.options import auto_or_count

CASES = {
    "bild": "has no function bild; did you mean build?",
    "not_a_function": "is a int; name a function that returns (model, example)",
    "takes_arguments": "missing a required argument: 'width'; give its parameters defaults",
    "raises": "raised KeyError: 'no such checkpoint' (",
    "exits": "raised SystemExit: 0 (",
    "returns_nothing": "returned nothing; return (model, example)",
    "returns_model": "returned a Perceptron; return (model, example)",
    "returns_three": "returned a tuple of 3; return (model, example)",
    "returns_text": "returned a str as the model; return (torch.nn.Module, example)",
    "returns_tensor": "returned a Tensor as the example; return a dict of keyword arguments or a tuple",
}


@pytest.mark.parametrize("function", list(CASES))
def test_target_function(command, targets, cluster, function: str) -> None:
    outcome = command("compile", f"{targets}:{function}", "--cluster", cluster)
    assert outcome.status == 2
    assert outcome.line.startswith("hetspmd compile: TargetError: ")
    assert CASES[function] in outcome.line


def test_a_function_that_is_nowhere_near_any(command, targets, cluster) -> None:
    outcome = command("verify", f"{targets}:zzz", "--cluster", cluster)
    assert outcome.status == 2
    assert "has no function zzz; it has build, positional" in outcome.line


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("nowhere.py", "nowhere.py does not exist; write path/to/file.py:function"),
        ("nowhere/model.py:build", "nowhere/model.py does not exist"),
        ("no_such_package.model:build", "there is no module no_such_package"),
        ("json.no_such_module", "there is no module json.no_such_module"),
        ("model.py:", "'model.py:' is no target"),
        ("a model", "'a model' is neither a file nor a module"),
        (":build", "':build' is no target"),
    ],
)
def test_target_place(command, cluster, target: str, text: str) -> None:
    outcome = command("compile", target, "--cluster", cluster)
    assert outcome.status == 2
    assert f"TargetError: {text}" in outcome.line


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("import no_such_package\n", "ModuleNotFoundError: No module named 'no_such_package' ("),
        ("x = 1\nx = 1 / 0\n", "ZeroDivisionError: division by zero ("),
        ("def build(:\n", "SyntaxError: "),
        ("raise SystemExit\n", "raised SystemExit ("),
    ],
)
def test_target_file_that_fails(command, cluster, tmp_path: Path, source: str, text: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(source)
    outcome = command("compile", path, "--cluster", cluster)
    assert outcome.status == 2
    assert f"{path} raised" in outcome.line
    assert text in outcome.line


def test_the_line_of_the_target_is_named(command, cluster, tmp_path: Path) -> None:
    path = tmp_path / "deep.py"
    path.write_text("import json\n\ndef build():\n    return json.loads('{')\n")
    outcome = command("compile", path, "--cluster", cluster)
    assert f"({path}:4)" in outcome.line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("devices: [", "cluster.yaml:"),
        ("devices: []\n", "empty"),
        ("network: {bandwidth: 1e9}\n", "'devices'"),
        ("devices: [{flops: 1e9, colour: red}]\n", "'colour'"),
        ("devices: [{flops: -1e9}]\n", "flops"),
        ("devices: [{flops: 1e9, count: 0}]\n", "count"),
        ("devices: [{flops: 1e9, count: 2}]\nnetwork: {bandwidth: -1}\n", "bandwidth"),
        ("devices: [{flops: 1e9, count: 2}]\nnetwork: {bandwidth: 1Gbit}\n", "bandwidth"),
        ("devices: [{flops: 1e9, count: 2}]\n", "network"),
        ("", "cluster.yaml"),
    ],
)
@pytest.mark.parametrize("name", ["compile", "verify"])
def test_cluster_file(command, targets, tmp_path: Path, name: str, text: str, expected: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    out = tmp_path / "out.json"
    outcome = command(name, targets, "--cluster", path, "--json", out)
    assert outcome.status == 2
    assert outcome.line.startswith(f"hetspmd {name}: ClusterError: ")
    assert expected in outcome.line
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("compile", "model.py", "--clster", "file"), "unknown option --clster; did you mean --cluster?"),
        (("profile", "--bugdet=3s"), "unknown option --bugdet; did you mean --budget?"),
        (("compile", "model.py", "--zzz"), "unknown option --zzz; see"),
        (("compile", "model.py"), "the following arguments are required: --cluster"),
        (
            ("compile", "model.py", "--cluster", "file", "--jsn=3"),
            "unknown option --jsn; did you mean --json?",
        ),
    ],
)
def test_a_misspelt_option_is_named_before_a_missing_one(
    command, arguments: tuple[str, ...], text: str
) -> None:
    outcome = command(*arguments)
    assert outcome.status == 2
    assert text in outcome.line


def test_missing_cluster_file(command, targets, tmp_path: Path) -> None:
    outcome = command("compile", targets, "--cluster", tmp_path / "none.yaml")
    assert outcome.status == 2
    assert "ClusterError: cannot read the cluster file" in outcome.line


@pytest.mark.parametrize(
    ("function", "error"),
    [
        ("two_devices", "DeviceError"),
        ("misfit", "ExampleError"),
        ("wrong_width", "ExampleError"),
        ("branching", "TraceError"),
    ],
)
@pytest.mark.parametrize("name", ["compile", "verify"])
def test_model_and_example(
    command, targets, cluster, tmp_path: Path, name: str, function: str, error: str
) -> None:
    out = tmp_path / "out.json"
    outcome = command(name, f"{targets}:{function}", "--cluster", cluster, "--json", out)
    assert outcome.status == 2
    assert f"{error}: " in outcome.line
    assert not out.exists()


def test_strict_makes_an_op_without_a_rule_an_error(command, targets, cluster) -> None:
    outcome = command("compile", f"{targets}:unruly", "--cluster", cluster, "--strict")
    assert outcome.status == 2
    assert "MissingRuleError" in outcome.line
    assert "hetspmd_cli_test.twice.default" in outcome.line


def test_without_strict_it_is_a_warning(command, targets, cluster) -> None:
    outcome = command("compile", f"{targets}:unruly", "--cluster", cluster)
    assert outcome.status == 0
    assert outcome.err.count("hetspmd: warning: ops without a rule run replicated") == 1
    assert "Predicted step" in outcome.out


def test_verify_needs_weights(command, targets, cluster) -> None:
    outcome = command("verify", f"{targets}:on_meta", "--cluster", cluster)
    assert outcome.status == 2
    assert "up.weight on the meta device, where it has no values" in outcome.line


MEND = "; write lines like encoder.*.weight: shard(0)"
FORM = "is no placement; write replicated or shard(d), such as shard(0)"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", f"ConstraintError: FILE: constraints map names to forms{MEND}"),
        ("[1, 2]", f"ConstraintError: FILE: constraints map names to forms{MEND}"),
        ("up.weight: [0]", f"ConstraintError: FILE:1: 'up.weight' is given a list{MEND}"),
        ("up.*: shard(0)\nx: {a: b}", f"ConstraintError: FILE:2: 'x' is given a mapping{MEND}"),
        ("[up.weight]: shard(0)", f"ConstraintError: FILE:1: a key is no name{MEND}"),
        ("{up.weight", "ConstraintError: FILE:1: neither YAML nor JSON (expected ',' or '}'"),
        ("up.weight: shard(0)\n*.bias: replicated\n", "ConstraintError: FILE:2: neither YAML nor JSON ("),
        ("*.bias: replicated", "; put names that start with * in quotes: '*.weight': shard(0)"),
        ("up.weight: a\n---\n", "ConstraintError: FILE:2: neither YAML nor JSON ("),
        ("\0", "ConstraintError: FILE: neither YAML nor JSON"),
        ("up.weight: divided", f"ConstraintError: FILE:1: 'up.weight': 'divided' {FORM}"),
        ("up.weight: 0", f"ConstraintError: FILE:1: 'up.weight': '0' {FORM}"),
        ("up.weight:", f"ConstraintError: FILE:1: 'up.weight': '' {FORM}"),
        (
            "# a\nup.weight: shard(-1)",
            f"ConstraintError: FILE:2: 'up.weight': 'shard(-1)' {FORM}; dims count from 0",
        ),
        (
            "up.weight: shard(0)\n\n'up.weight': shard(0)",
            "ConstraintError: FILE:3: 'up.weight' stands twice (first at FILE:1); remove one",
        ),
        (
            '{"x": "shard(0)",\n\t"x": "shard(0)"}',
            "ConstraintError: FILE:2: 'x' stands twice (first at FILE:1)",
        ),
        (
            "sideways.*: shard(0)",
            "InfeasibleError: constraint 'sideways.*' matches no parameter, input or output",
        ),
        ("up.wieght: shard(0)", "; did you mean 'up.weight'?"),
        ("up.weight: shard(7)", "InfeasibleError: up.weight has shape [16, 8]: there is no dim 7 to shard"),
        ("up.weight: partial", "InfeasibleError: up.weight cannot be kept as summands"),
        ("up.*: shard(0)\n'*.weight': replicated", "both match up.weight; keep one"),
    ],
)
@pytest.mark.parametrize("name", ["compile", "verify"])
def test_constraints(command, targets, cluster, tmp_path: Path, name: str, text: str, expected: str) -> None:
    path = tmp_path / "constraints.yaml"
    path.write_text(text)
    outcome = command(name, targets, "--cluster", cluster, "--constraints", path)
    assert outcome.status == 2
    assert expected.replace("FILE", str(path)) in outcome.line


def test_constraints_that_are_no_text(command, targets, cluster, tmp_path: Path) -> None:
    path = tmp_path / "constraints.yaml"
    path.write_bytes(b"up.weight: \xff")
    outcome = command("compile", targets, "--cluster", cluster, "--constraints", path)
    assert outcome.status == 2
    assert f"ConstraintError: {path}: not UTF-8 text" in outcome.line


def test_constraints_in_conflict(command, targets, cluster, tmp_path: Path) -> None:
    path = tmp_path / "constraints.yaml"
    path.write_text('{"noise": "shard(1)", "up.*": "shard(0)", "x": "replicated"}')
    outcome = command("compile", f"{targets}:noisy", "--cluster", cluster, "--constraints", path)
    assert outcome.status == 2
    assert (
        "InfeasibleError: no program satisfies these constraints together: noise: shard(1) [float32[12, 8], "
        "read by add.Tensor in the model]; x: replicated [float32[12, 8], read by add.Tensor in the model]; "
        in outcome.line
    )
    assert outcome.line.endswith("; drop or change one (2 others are fine)")


def test_explaining_what_is_not_there(command, targets, cluster) -> None:
    outcome = command("compile", targets, "--cluster", cluster, "--explain", "up.wieght")
    assert outcome.status == 2
    assert (
        "ConstraintError: 'up.wieght' is no parameter, input or output of the plan; did you mean 'up.weight'?"
        in outcome.line
    )


def test_missing_constraints(command, targets, cluster, tmp_path: Path) -> None:
    outcome = command("compile", targets, "--cluster", cluster, "--constraints", tmp_path / "none.yaml")
    assert outcome.status == 2
    assert "ConstraintError: cannot read the constraints" in outcome.line


@pytest.mark.parametrize("option", ["--plan", "--problem", "--timeline"])
def test_what_is_no_data_for_others_is_not_written_to_standard_output(command, option: str) -> None:
    outcome = command("compile", "nowhere.py", "--cluster", "none.yaml", option, "-")
    assert outcome.status == 2
    assert "OutputError: only --json and --out write to standard output (-); name a file" in outcome.line


@pytest.mark.parametrize("option", ["--json", "--plan", "--problem", "--timeline"])
def test_a_name_that_leaves_no_room_beside_it(command, targets, cluster, tmp_path: Path, option: str) -> None:
    """A file is written under a longer name first: only writing shows that it cannot be."""
    outcome = command("compile", targets, "--cluster", cluster, option, tmp_path / ("n" * 250))
    assert outcome.status == 2
    assert "OutputError: " in outcome.line
    assert "cannot be written: File name too long; name another file" in outcome.line
    assert not list(tmp_path.glob("n*"))


@pytest.mark.parametrize("option", ["--json", "--plan", "--problem", "--timeline", "--dump-passes"])
def test_a_name_that_no_file_can_have(command, tmp_path: Path, option: str) -> None:
    outcome = command("compile", "nowhere.py", "--cluster", "none.yaml", option, tmp_path / ("n" * 300))
    assert outcome.status == 2
    assert "OutputError: " in outcome.line
    assert "File name too long" in outcome.line


@pytest.mark.parametrize("option", ["--json", "--plan"])
def test_outputs_are_checked_before_the_work(command, tmp_path: Path, option: str) -> None:
    # The target does not exist either: the first complaint shows what was looked at first.
    outcome = command("compile", "nowhere.py", "--cluster", "none.yaml", option, tmp_path / "no" / "out")
    assert outcome.status == 2
    assert "OutputError" in outcome.line
    assert "there is no folder" in outcome.line
    outcome = command("compile", "nowhere.py", "--cluster", "none.yaml", option, tmp_path)
    assert "is a folder" in outcome.line


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["compile"],
        ["compile", "model.py"],
        ["compile", "model.py", "--cluster", "c.yaml", "--time-limit", "-3"],
        ["compile", "model.py", "--cluster", "c.yaml", "--time-limit", "soon"],
        ["verify", "model.py", "--cluster", "c.yaml", "--steps", "0"],
        ["verify", "model.py", "--cluster", "c.yaml", "--dtype", "int8"],
        ["guess"],
        ["rules", "show"],
    ],
)
def test_usage(command, arguments: list[str]) -> None:
    outcome = command(*arguments)
    assert outcome.status == 2
    assert "--help" in outcome.line
    assert outcome.out == ""


def test_debug_adds_the_traceback(command, targets) -> None:
    outcome = command("compile", targets, "--cluster", "none.yaml", "--debug")
    assert outcome.status == 2
    assert "Traceback (most recent call last)" in outcome.err
    assert "ClusterError" in outcome.err.splitlines()[-1]


def test_a_process_of_its_own(targets) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hetspmd", "compile", targets, "--cluster", "none.yaml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


@pytest.mark.parametrize("text", ["atuo", "1.5", ""])
def test_a_number_of_micro_batches_that_is_none_is_named(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is neither auto nor a number from 1 on"):
        auto_or_count(text)
