"""Plan files: what may be wrong with one, each by its name, and that what is read is proved again."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_files import compiled, edited, plans, texts
from small_models import case
from small_plans import cluster

import hetspmd
from hetspmd.codec.records import encode
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import HetspmdError, PlanError
from hetspmd.plan.plan import Plan
from hetspmd.plan.text import VERSION, content, file_text
from hetspmd.run.module import HAP


def test_a_file_holds_its_checksum_and_may_be_formatted_anew() -> None:
    for plan, text in zip(plans(), texts(), strict=True):
        document = json.loads(text)
        assert document["sha256"] == plan.digest
        assert document["version"] == VERSION
        for again in (text, json.dumps(document, indent=2), json.dumps(document, ensure_ascii=False) + "\n"):
            found = Plan.from_json(again)
            assert found == plan
            assert found.to_json() == text
            assert found.digest == plan.digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: "", "not a plan file, or one that is damaged"),
        (lambda t: "[]", "not a plan file; write one with hetspmd compile --plan FILE"),
        (lambda t: "{}", "not a plan file; write one"),
        (lambda t: "7", "not a plan file; write one"),
        (lambda t: t[:-1], "not a plan file, or one that is damaged"),
        (lambda t: t + "x", "Extra data"),
        (lambda t: "[" * 100_000, "nested too deeply"),
        (lambda t: '{"plan":' + '{"a":' * 100_000, "nested too deeply"),
        (lambda t: t.replace(f'"version":{VERSION}', '"version":4'), "plan file of version 4, this release reads"),
        (lambda t: t.replace(f'"version":{VERSION}', '"version":true'), "plan file of version True"),
        (lambda t: t.replace(f'"version":{VERSION}', '"version":"1"'), "plan file of version '1'"),
        (lambda t: t.replace(f'"version":{VERSION}', f'"version":{VERSION},"more":1'), "unknown key 'more'"),
        (lambda t: t.replace('"sha256":', '"sha512":'), "unknown key 'sha512'"),
        (lambda t: t.replace('"active":[0', '"active":[0,0'), "damaged or was edited by hand"),
        (lambda t: t.replace('"saved":', '"saved":1,"saved":'), "the key 'saved' stands twice"),
        (lambda t: t.replace('"launch":5e-06', '"launch":NaN', 1), "NaN is no JSON"),
        (lambda t: t.replace('"launch":5e-06', '"launch":' + "9" * 5000, 1), "damaged"),
        (lambda t: t.replace('"launch":5e-06', '"launch":5.1e-06', 1), "damaged or was edited by hand"),
        (lambda t: "\ufeff" + t, "BOM"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_text(change: Callable[[str], str], message: str) -> None:
    text = texts()[0]
    assert change(text) != text
    with pytest.raises(PlanError) as caught:
        Plan.from_json(change(text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_number_that_nothing_else_contradicts_is_found_by_the_checksum() -> None:
    """One digit in the data of a constant, or in an argument of an op, makes another program that proves."""
    text = texts()[2]
    place = text.index("aten.div.Tensor")
    start = text.rindex('"args":', 0, place)
    changed = text[:start] + text[start:place].replace("2.0", "3.0") + text[place:]
    assert changed != text
    with pytest.raises(PlanError, match="does not have the sha256 that it says"):
        Plan.from_json(changed)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe\x00{", "no UTF-8 text"),
        (b"", "not a plan file"),
        (b"\x00" * 40, "not a plan file"),
        (b"\xef\xbb\xbf{}", "BOM"),
    ],
)
def test_files_that_are_no_text(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=message) as caught:
        Plan.load(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"cannot read the plan file .*none\.json: No such file"):
        Plan.load(tmp_path / "none.json")
    with pytest.raises(PlanError, match="Is a directory"):
        Plan.load(tmp_path)
    with pytest.raises(PlanError, match="is no path of a plan file"):
        Plan.load("a\0b")
    with pytest.raises(PlanError, match="is no path of a plan file"):
        Plan.load(7)


def op_index(plan: Plan, op: str) -> int:
    return next(i.id for i in plan.graph.instructions if i.op == op)


ADDMM = op_index(compiled(), "aten.addmm.default")
MUL = op_index(compiled(), "aten.mul.Tensor")
INSTRUCTION = ("graph", "instructions", ADDMM)
LAST = ("program", "steps", -1)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        # kinds
        (("ratios",), "half", "ratios is 'half', not a list"),
        (("ratios", 0, 0), "0.5", "ratios[0][0] is '0.5', not a number"),
        (("ratios", 0, 0), True, "ratios[0][0] is True, not a number"),
        (("ratios", 0, 0), {"$float": "huge"}, "ratios[0][0] is a mapping, not a number"),
        (("active", 0), 0.0, "active[0] is 0.0, not a whole number"),
        (("graph", "training"), 1, "graph.training is 1, not true or false"),
        (("graph", "tensors", 3, "shape"), [[1]], "graph.tensors[3].shape[0] is a list of 1, not a whole number"),
        (("graph", "tensors", 3, "id"), 2**70, "is a whole number of more than 64 bits"),
        (("graph", "tensors", 3, "name"), "\ud800", "half a character"),
        (("graph", "tensors", 3), {"$": "Ref", "id": 3}, "graph.tensors[3] is a Ref, not a Tensor"),
        (("graph", "tensors", 3, "colour"), "red", "has the unknown 'colour'"),
        ((*INSTRUCTION, "phase"), "sideways", "is 'sideways', not one of 'forward', 'backward'"),
        ((*INSTRUCTION, "args"), lambda v: v[:2], "lists the inputs"),
        ((*INSTRUCTION, "args"), lambda v: [v], "without mat1, mat2"),
        ((*INSTRUCTION, "args", 0), {"$": "Tensor"}, "is a Tensor, not an argument of an op"),
        ((*INSTRUCTION, "args", 0), json.loads("[" * 40 + "]" * 40), "more than 16 levels of lists"),
        ((*LAST, "$"), "Compete", "is a Compete, not Compute or Communicate"),
        (("cost", "memory_bytes"), {"$map": []}, "cost.memory_bytes is a mapping, not a list"),
        (("baselines",), {"$map": [["b", 1.0], ["a", 1.0]]}, "has the key 'a' after 'b'"),
        (("baselines",), {"$map": [["a", 1.0], ["a", 2.0]]}, "has the key 'a' after 'a'"),
        (("cluster", "devices", 0, "launch"), -1.0, "launch is -1.0; it must be positive"),
        (("cluster", "network"), None, "3 devices and no network"),
        # the graph
        (("graph", "tensors", 3, "id"), 4, "tensor 3 has the id 4"),
        (("graph", "tensors", 3, "dtype"), "float33", "the dtype 'float33', which there is not"),
        (("graph", "tensors", 3, "shape"), [-5], "has the shape [-5]"),
        (("graph", "tensors"), lambda v: v[:-1], "names tensor"),
        ((*INSTRUCTION, "id"), 0, "has the id 0"),
        ((*INSTRUCTION, "outputs"), [0], "a second time"),
        ((*INSTRUCTION, "outputs"), [-2], "names tensor -2"),
        ((*INSTRUCTION, "phase"), "backward", "which is of the backward"),
        (("graph", "instructions"), lambda v: v[:-1], "cannot be proved"),
        (("graph", "parameters"), lambda v: v[:-1], "the list of parameters has others than"),
        (("graph", "parameters", 0, "names"), [], "has no name"),
        (("graph", "parameters", 0, "names"), ["b.weight"], "has no name, or another one's"),
        (("graph", "parameters", 0, "gradient"), 0, "requires none"),
        (("graph", "loss"), None, "has a gradient, and there is no loss or no backward"),
        (("graph", "loss"), 0, "which is not one number"),
        (("graph", "outputs"), [], "output_spec has 2 leaves, the graph 0 outputs"),
        (("graph", "output_spec"), "[1, {}]", "output_spec cannot be read"),
        (("graph", "input_spec"), "[" * 50_000, "input_spec"),
        (("graph", "inputs", 0, "leaf"), 5, "the list of inputs has the places"),
        (("graph", "segments"), [0, 0], "are given for 2 instructions"),
        (("graph", "autocast"), "yes", "autocast is 'yes', which is no dtype"),
        # ops
        ((*INSTRUCTION, "op"), "aten.addmn.default", "aten.addmn.default, which is not there"),
        ((*INSTRUCTION, "op"), "os.system", "os.system, which is not there"),
        ((*INSTRUCTION, "op"), "aten.__class__.default", "which is not there"),
        ((*INSTRUCTION, "op"), "aten.addmm_.default", "which changes its arguments in place"),
        ((*INSTRUCTION, "op"), "aten.baddbmm.default", "no rules fit its graph"),
        ((*INSTRUCTION, "args"), lambda v: [*v, 1.0], "with 4 arguments; it takes 3"),
        ((*INSTRUCTION, "kwargs"), [["gamma", 1.0]], "with 'gamma', which it does not take"),
        ((*INSTRUCTION, "kwargs"), [["mat1", 1.0]], "with 'mat1' twice"),
        ((*INSTRUCTION, "kwargs"), [["beta", "x"]], "which fails"),
        (("graph", "instructions", MUL, "op"), "aten.relu.default", "with 2 arguments; it takes 1"),
        # the plan around it
        (("ratios", 0), lambda v: [2 * r for r in v], "are not positive parts of 1"),
        (("ratios", 0), [1.5, -0.5, 0.0], "are not positive parts of 1"),
        (("ratios",), [], "ratios of 0 segments"),
        (("lengths", "units"), lambda v: v[:-1], "axes, the graph has"),
        (("lengths", "units", 0, 0), lambda v: v + 1, "do not divide the"),
        (("lengths", "units", 0), lambda v: [v[0] + v[1] + 1, -1, *v[2:]], "do not divide the"),
        (("lengths", "units", 0), lambda v: v[:-1], "do not divide the"),
        (("lengths", "world"), 2, "lengths of 2 devices"),
        (("active",), [0, 1, 9], "active devices"),
        (("cost", "memory_bytes"), [0], "cost.memory_bytes is of 1 devices"),
        (("cost", "step_seconds"), {"$float": "nan"}, "cost has nan"),
        (("search", "gap"), -1.0, "search has -1.0"),
        (("constraints",), {"$map": [["a.*", "shard"]]}, "'shard' is no placement"),
        (("inside",), {"$": "Inside", "program": 1, "seconds": 0.0, "memory_bytes": [], "bucket_bytes": 0},
            "inside.program is 1"),
        (("considered", 0, "verdict"), "best", "is no reason why a candidate was not taken"),
        (("considered", 0, "seconds"), -1.0, "considered has -1.0"),
        (("active",), [], "no device is active"),
        (("considered", 0, "active"), [-1], "has ranks that there cannot be"),
        (("considered",), lambda v: [*v, v[0]], "more than one of its candidates was taken"),
        # the proof
        (("program", "steps"), lambda v: v[:-1], "cannot be proved"),
        (("program", "steps"), lambda v: v[::-1], "cannot be proved"),
        (("program", "gradients"), [], "cannot be proved"),
        (("program", "loss"), None, "cannot be proved"),
        (("schedule", "prefetch_distance"), 0, "a prefetch distance of 0; it is at least 1"),
        (("schedule", "bucket_bytes"), -1, "buckets of at most -1 bytes"),
        (("schedule", "backward"), lambda v: v[:-1], "cannot run by its schedule"),
        (("schedule", "forward"), lambda v: v[::-1], "cannot run by its schedule"),
        (("schedule", "forward"), lambda v: [*v, v[-1]], "stands twice"),
        (("schedule", "forward"), lambda v: [*v, []], "an entry has no step"),
        (("schedule", "saved"), [], "cannot run by its schedule"),
        (("schedule", "forward", 0), [10**6], "there is no step 1000000"),
        ((*LAST, "instruction"), 10**6, "there is no instruction 1000000"),
        ((*LAST, "row", "post"), [9], "is not in the theory"),
    ],
)  # fmt: skip
def test_what_is_wrong_behind_a_right_checksum(path: tuple[Any, ...], value: Any, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_json(edited(path, value))
    assert message in str(caught.value)
    assert "again" in str(caught.value), "how to mend it"


def test_shapes_that_no_op_makes_are_found_without_a_rule_that_looks() -> None:
    """A view, a sum and a constant whose result has another shape than the graph says."""
    plan = plans()[2]
    for op in ("aten.view.default", "aten.clone.default", "aten.softmax.int", "aten._softmax.default"):
        if not any(i.op == op for i in plan.graph.instructions):
            continue
        tensor = plan.graph.instructions[op_index(plan, op)].outputs[0]
        with pytest.raises(PlanError):
            Plan.from_json(edited(("graph", "tensors", tensor, "shape"), lambda v: [*v, 2], plan))
        with pytest.raises(PlanError):
            Plan.from_json(edited(("graph", "tensors", tensor, "dtype"), "float16", plan))
    constant = plan.graph.constants[0]
    with pytest.raises(PlanError, match=r"is computed as|no rules fit|which gives"):
        Plan.from_json(edited(("graph", "tensors", constant.tensor, "dtype"), "float32", plan))


def test_data_of_constants() -> None:
    class Table(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(4))
            self.table = torch.arange(4.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.w * self.table).sum()

    plan = hetspmd.compile(Table(), (torch.ones(8, 4),), cluster(2, 1))
    at, constant = next((i, c) for i, c in enumerate(plan.graph.constants) if c.data is not None)
    assert constant.data is not None
    assert Plan.from_json(plan.to_json()) == plan
    place = ("graph", "constants", at, "data")
    for value, message in (
        (constant.data[4:], "bytes, and"), (constant.data + "AAAA", "bytes, and|no base64"), ("", "has 0 bytes"),
        ("not base64!", "no base64"), (None, "has not one of data and program"), ("é", "no base64"),
    ):  # fmt: skip
        with pytest.raises(PlanError, match=message):
            Plan.from_json(edited(place, value, plan))


def test_machines_are_checked_inside_as_well() -> None:
    plan = plans()[5]
    assert plan.inside is not None
    for path, value, message in (
        (
            ("inside", "program", "steps"),
            lambda v: v[:-1],
            "the program inside its machines cannot be proved",
        ),
        (("inside", "memory_bytes"), [1], "inside.memory_bytes is of 1 devices"),
        (("inside", "seconds"), -1.0, "inside.seconds has -1.0"),
        (("inside",), None, "says nothing of their accelerators"),
        (
            ("cluster", "devices", 0, "machine", "accelerators"),
            "2",
            "accelerators is '2', not a whole number",
        ),
    ):
        with pytest.raises(PlanError) as caught:
            Plan.from_json(edited(path, value, plan))
        assert message in str(caught.value)
    alone = compiled()
    inside = encode(plan)["inside"]
    with pytest.raises(PlanError, match="its cluster has no machines"):
        Plan.from_json(edited(("inside",), inside, alone))


def test_every_rank_is_told_of_a_file_that_one_cannot_read(tmp_path: Path) -> None:
    plan = compiled()
    models = [copy.deepcopy(case("mlp").model) for _ in range(3)]
    plan.save(tmp_path / "0.json")
    plan.save(tmp_path / "1.json")
    (tmp_path / "2.json").write_text(plan.to_json()[:-20])

    def body(communicator: Any) -> str:
        path = tmp_path / f"{communicator.rank}.json"
        with pytest.raises(PlanError) as caught:
            HAP(models[communicator.rank], plan.cluster, plan=path, process_group=communicator)
        return str(caught.value)

    said = run_ranks(3, body)
    assert all("2.json: not a plan file, or one that is damaged" in text for text in said)
    assert said[0].startswith("rank 2 cannot read its plan")


def test_canonical_text_is_the_files() -> None:
    plan = compiled()
    assert file_text(content(encode(plan))) == plan.to_json()
    assert issubclass(PlanError, HetspmdError)
