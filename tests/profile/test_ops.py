"""Measuring ops: local calls, which are measured, lines, the cache, and the command."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.devices import Device, Network
from hetspmd.cost.model import CostModel
from hetspmd.cost.op_keys import VIEW_KEY, memory_orders
from hetspmd.cost.signatures import row_keys
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.profile import ops as measuring
from hetspmd.profile import single
from hetspmd.profile.cache import cache_file, cache_folder, load_points, save_points
from hetspmd.profile.cases import OpCase, cases_of, tasks_of, together
from hetspmd.profile.local_op import Alone, Arena, alone, index_bound, local_op
from hetspmd.profile.measure import Options, Profile, with_ops
from hetspmd.profile.ops import fit_points, measure_ops
from hetspmd.profile.pages import Sample
from hetspmd.profile.profile_thresholds import THRESHOLDS
from hetspmd.profile.session import Session
from hetspmd.rules.rule import Call, TensorType
from hetspmd.rules.theory import Theory, derive
from hetspmd.trace.graph import Ref
from hetspmd.trace.trace import trace

TARGETS = Path(__file__).parents[1] / "cli" / "targets.py"
CPU = torch.device("cpu")
WIDER = """
import torch
from torch import nn

class Wider(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(24, 6)

    def forward(self, x):
        return self.layer(x).square().mean()

def build():
    return Wider(), {"x": torch.zeros(10, 24)}
"""
ONE = Cluster((Device("cpu", {"default": 5e10}, memory_bandwidth=1e10),))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETSPMD_CACHE", str(tmp_path / "cache"))
    quick = replace(THRESHOLDS, sample_seconds=1e-5, cpu_arena_bytes=2**20)
    monkeypatch.setattr(measuring, "THRESHOLDS", quick)
    monkeypatch.setattr(single, "THRESHOLDS", quick)


@cache
def theory_of(name: str) -> Theory:
    torch.manual_seed(0)
    model, example, loss = zoo.ZOO[name]()
    args, kwargs = (example, {}) if isinstance(example, tuple) else ((), example)
    return derive(trace(model, args, kwargs, loss=loss))


@pytest.mark.parametrize("name", ["bert", pytest.param("resnet50", marks=pytest.mark.slow)])
def test_every_row_of_a_model_runs_alone(name: str) -> None:
    """Each local call at the whole, at a part and at one unit, on made-up inputs: nothing is refused."""
    theory = theory_of(name)
    arena = Arena(CPU, 2**20)
    seen: dict[int, tuple[Alone, Theory]] = {}
    cases = [c for c in cases_of(theory, ONE).values() if c.op is not None]
    assert len(cases) > 100
    if name != "bert":
        cases = cases[::4]
    with torch.no_grad():
        for case in cases:
            assert case.op is not None
            own, row = case.op
            small = seen.setdefault(id(own), (own, own.theory))[1]
            for held in sorted({case.units, case.held(0.5), 1}):
                op = local_op(small, own.orders, row, held, CPU)
                results = op.run(op.runtime, *op.make(arena))
                instruction = small.graph.instructions[-1]
                whole = [small.graph.tensors[t].shape for t in instruction.outputs if t >= 0]
                assert [r.ndim for r in results] == [len(s) for s in whole], case.key
                if held == case.units:
                    assert [tuple(r.shape) for r in results] == whole, case.key
                assert op.held >= op.nbytes


def test_inputs_lie_in_memory_as_in_the_model() -> None:
    """The orders that keys know are those of a step on this device (what op results have, not only views)."""
    theory = theory_of("bert")
    graph, orders = theory.graph, memory_orders(theory)
    turned = [i for i in graph.instructions if any(orders[t] for t in i.inputs) and not i.is_source]
    assert turned
    own = alone(graph, next(i for i in turned if not theory.rules[i.id].alias), orders)
    op = local_op(own.theory, own.orders, 0, 0, CPU)
    made = op.make(Arena(CPU, 2**20))
    for tensor, order in zip(made, own.orders, strict=True):
        if order is not None:
            strides = [tensor.stride(d) for d in order]
            assert strides == sorted(strides, reverse=True)


def test_the_arena_goes_round() -> None:
    arena = Arena(CPU, 4096)
    first, second = arena.take((16, 16), None, "float32"), arena.take((16, 16), (1, 0), "float32")
    assert second.stride() == (1, 16)
    assert second.storage_offset() == 256
    starts = [arena.take((16, 16), None, "float32").storage_offset() for _ in range(4)]
    assert starts == [512, 768, 0, 256]
    assert 0.1 <= float(first.min()) <= float(first.max()) < 1
    wide = arena.take((3, 2000), (1,), "float32")
    assert wide.stride() == (0, 1), "larger than the arena, and expanded"
    assert set(arena.take((64,), None, "bool").tolist()) == {False, True}


def test_indices_stay_within_their_tensor() -> None:
    ints = TensorType((5,), "int64")
    embedding = Call(
        "aten.embedding.default", (Ref(0), Ref(1)), {}, (TensorType((9, 4), "float32"), ints), (None,)
    )
    assert index_bound(embedding, 1, [(9, 4), (5,)], (5, 4)) == 9
    gather = Call(
        "aten.gather.default", (Ref(0), 1, Ref(1)), {}, (TensorType((5, 7), "float32"), ints), (None,)
    )
    assert index_bound(gather, 1, [(5, 7), (5, 1)], (5, 1)) == 7
    index = Call(
        "aten.index.Tensor", (Ref(0), (None, Ref(1))), {}, (TensorType((5, 7), "float32"), ints), (None,)
    )
    assert index_bound(index, 1, [(5, 7), (5,)], (5, 5)) == 7
    assert index_bound(index, 0, [(5, 7), (5,)], (5, 5)) == 2


def case(key: str, weight: float, units: int = 1, whole: str = "") -> OpCase:
    return OpCase(key, whole or key, None, (TensorType((units,), "float32"), None), units, weight)


def test_what_takes_longest_comes_first() -> None:
    cases = [case("a", 1.0), case("a/8", 1.0, 8, "a"), case("b", 5.0), case("b/2", 5.0, 2, "b")]
    found = [(t.key, t.share) for t in tasks_of(cases)]
    # Whole calls once; of an axis of two units a quarter is a half.
    assert found == [("b", 1.0), ("a", 1.0), ("b/2", 0.5), ("a/8", 0.25), ("a/8", 0.5), ("a/8", 0.125)]


def test_cases_are_the_keys_of_the_cost_model() -> None:
    theory = theory_of("bert")
    cases = cases_of(theory, ONE)
    keys = {k for of_rows in row_keys(theory) for k in of_rows}
    assert cases.keys() == keys
    assert all(c.whole in cases for c in cases.values())
    whole = sum(c.weight for c in cases.values() if c.key == c.whole != VIEW_KEY)
    assert whole == pytest.approx(CostModel(theory, ONE).alone()[0])
    views = sum(VIEW_KEY in of_rows for of_rows in row_keys(theory))
    assert views > 50
    assert cases[VIEW_KEY].weight == pytest.approx(views * ONE.devices[0].launch)
    both = together([theory, theory_of("resnet50")], ONE)
    assert sum(c.weight for c in both if c.key == c.whole) == pytest.approx(2.0)
    assert {s for s in THRESHOLDS.shares if not 0 < s < 1} == set()


def test_lines_are_convex_and_meet_exact_points() -> None:
    cases = [case("a", 1.0), case("a/8", 1.0, 8, "a"), case("b", 1.0), case("b/8", 1.0, 8, "b")]
    points = {
        "a": {1.0: (9e-3, 0.0, 0.0, 3)},
        "a/8": {s: (1e-3 + 8e-3 * s, 0.0, 0.0, 3) for s in THRESHOLDS.shares},
        "b": {1.0: (1e-3, 0.0, 0.0, 3)},
    }
    found = {f.time.key: f for f in fit_points(cases, points)}
    assert sorted(found) == ["a", "a/8", "b"], "of b/8 nothing but the whole is known"
    assert (found["a"].time.constant, found["a"].time.slope) == (9e-3, 0.0)
    assert found["a/8"].time.constant == pytest.approx(1e-3, rel=1e-3)
    assert found["a/8"].time.slope == pytest.approx(8e-3, rel=1e-3)
    assert found["a/8"].error < 1e-3
    assert [s for s, _ in found["a/8"].points] == [0.125, 0.25, 0.5, 1.0]
    falling = {"a": {1.0: (1e-3, 0, 0, 3)}, "a/8": {0.125: (4e-3, 0, 0, 3), 0.5: (2e-3, 0, 0, 3)}}
    (line,) = (f for f in fit_points(cases, falling) if f.time.key == "a/8")
    assert line.time.slope == 0
    assert line.error > 0.5


def session() -> Session:
    from hetspmd.dist.communicator import LoneCommunicator

    return Session(LoneCommunicator(), CPU, start=time.perf_counter())


def test_a_second_model_costs_only_what_is_new() -> None:
    cases = together([theory_of("bert")], ONE)[:12]
    first = measure_ops(session(), ONE, cases, 30.0, 0.5)
    assert first.measured == first.tasks > len(cases) / 2
    assert first.cached == 0
    assert first.failed == ()
    again = measure_ops(session(), ONE, cases, 30.0, 0.5)
    assert (again.measured, again.cached) == (0, first.tasks)
    assert again.ops == first.ops
    momentum = measure_ops(session(), ONE, cases, 0.0, 0.5, "momentum")
    assert (momentum.measured, momentum.cached) == (0, 0), "no time; and another optimizer is another cache"


def test_a_failing_op_keeps_the_roofline(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [c for c in together([theory_of("bert")], ONE) if "aten.mm" in c.key][:3]

    def refuse(*arguments: object) -> None:
        raise IndexError("out of range\nin detail")

    monkeypatch.setattr(measuring, "local_op", refuse)
    report = measure_ops(session(), ONE, cases, 30.0, 0.5)
    assert report.failed == ("aten.mm.default: out of range",)
    assert report.ops == (((0,), ()),)
    assert "failed, such as aten.mm.default: out of range" in str(report)


def test_a_slow_spell_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tasks are sampled in turns, and one turn that is ten times as slow for half of them changes no time."""
    cases = [c for c in together([theory_of("bert")], ONE) if c.op is not None][:12]
    number, calls = len(tasks_of(cases)), count()

    def samples(*rest: object) -> list[Sample]:
        call = next(calls)
        return [Sample(1e-2)] * 5 if call < number // 2 else [Sample(1e-3)]

    monkeypatch.setattr(measuring, "_samples", samples)
    report = measure_ops(session(), ONE, cases, 30.0, 0.5)
    assert next(calls) == THRESHOLDS.op_turns * number
    assert {seconds for _, fits in report.ops for fit in fits for _, seconds in fit.points} == {1e-3}
    stored = next(iter(cache_folder().glob("*.json"))).read_text()
    assert {tuple(p[2:]) for of in json.loads(stored)["points"].values() for p in of} == {
        (1e-3, 1e-2, 7), (1e-3, 1e-3, 3)
    }  # fmt: skip


def test_a_short_budget_reaches_each_op_before_any_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = together([theory_of("bert")], ONE)[:12]
    number, calls, clock = len(tasks_of(cases)), count(), [0.0]

    def samples(*rest: object) -> list[Sample]:
        clock[0] += 1.0
        next(calls)
        return [Sample(1e-3)]

    monkeypatch.setattr(measuring, "_samples", samples)
    monkeypatch.setattr(measuring, "perf_counter", lambda: clock[0])
    report = measure_ops(session(), ONE, cases, number + 2.0, 0.5)
    assert report.measured == report.tasks == number
    assert next(calls) == number + 2


def test_kinds_share_the_work_and_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow = Device("f", {"default": 4e10}), Device("s", {"default": 1e10})
    cluster = Cluster((fast, slow, slow), Network(1e9))
    cases = together([theory_of("bert")], cluster)[:20]
    monkeypatch.setattr(measuring, "_samples", lambda *rest: [Sample(1e-3)] * 3)

    def run(comm: Any) -> Profile:
        of_rank = Session(comm, CPU, "simulated", start=time.perf_counter())
        return with_ops(of_rank, Profile.open(text), cases, Options(budget=30.0))

    text = str(cache_folder().parent / "cluster.yaml")
    Path(text).parent.mkdir(parents=True)
    Path(text).write_text(cluster.to_text())
    found = run_ranks(3, run)
    assert found[0] == found[1] == found[2]
    assert [k.ranks for k in found[0].cluster.ops] == [(0,), (1, 2)]
    keys = [[t.key for t in k.times] for k in found[0].cluster.ops]
    assert keys[0] == keys[1] == sorted(c.key for c in cases)
    assert Cluster.from_text(found[0].to_text()) == found[0].cluster
    assert len(list(cache_folder().glob("*.json"))) == 2, "the kinds differ in speed"


def test_the_cache_survives_what_happens_to_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device("cpu", {"default": 5e10})
    file = cache_file(CPU, device, "adamw")
    assert file.parent == tmp_path / "cache" / "ops"
    assert load_points(file) == {}
    save_points(file, {"a": {1.0: (1e-3, 9e-4, 2e-3, 5)}})
    save_points(file, {"a": {0.5: (6e-4, 5e-4, 7e-4, 5)}, "b": {1.0: (1.0, 1.0, 1.0, 3)}})
    assert load_points(file) == {
        "a": {1.0: (1e-3, 9e-4, 2e-3, 5), 0.5: (6e-4, 5e-4, 7e-4, 5)}, "b": {1.0: (1.0, 1.0, 1.0, 3)},
    }  # fmt: skip
    for text in (
        "{",
        "[]",
        '{"version": 1, "points": {}}',
        '{"version": 4, "points": {"a": [[1, 0, 1, 1, 3]]}}',
    ):
        file.write_text(text)
        with pytest.warns(UserWarning, match="is damaged"):
            assert load_points(file) == {}
    with pytest.warns(UserWarning, match="is damaged"):
        save_points(file, {"a": {1.0: (1e-3, 9e-4, 2e-3, 5)}})
    assert json.loads(file.read_text())["points"].keys() == {"a"}
    assert cache_file(CPU, Device("cpu", {"default": 5.01e10}), "adamw") == file
    assert cache_file(CPU, Device("cpu", {"default": 2.5e10}), "adamw") != file
    assert cache_file(CPU, device, "sgd") != file
    monkeypatch.setenv("HETSPMD_DEVICE_NAME", "Slow one")
    assert cache_file(CPU, device, "adamw").name.startswith("slow-one-")
    monkeypatch.delenv("HETSPMD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "hetspmd" / "ops"


def test_the_command_measures_a_model(command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    path, other = tmp_path / "one.yaml", tmp_path / "other.yaml"
    made = command("profile", "--model", TARGETS, "--out", path, "--budget", "4s", "--device", "cpu")
    assert made.status == 0, made.err
    assert "Measuring " in made.err
    assert "Ops on cpu (ranks 0): " in made.out
    profile = Profile.load(str(path))
    (kind,) = profile.cluster.ops
    assert kind.ranks == (0,)
    assert any(t.key.startswith("optimizer(") for t in kind.times)
    assert profile.cluster.devices[0].optimizer is not None
    assert command("compile", TARGETS, "--cluster", path).status == 0
    # Op times for a file of a person's own; and a second model adds to those of the first.
    other.write_text("devices: [{name: mine, flops: 5e10}]")
    assert command("profile", "--model", TARGETS, "--cluster", other, "--budget", "2s").status == 0
    added = Profile.load(str(other))
    assert added.cluster.devices == (Device("mine", {"default": 5e10}),)
    first = {t.key for t in added.cluster.ops[0].times}
    assert first
    target = tmp_path / "wider.py"
    target.write_text(WIDER)
    second = ("--model", target, "--cluster", other, "--budget", "2s")
    assert command("profile", *second).status == 0
    assert first < {t.key for t in Profile.load(str(other)).cluster.ops[0].times}
    assert command("profile", "--show", other).status == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cluster", "two.yaml"), "--cluster FILE goes with --model TARGET"),
        (("--show", "two.yaml", "--model", "x.py"), "--model and --cluster measure"),
        (("--model", "none.py", "--cluster", "two.yaml"), "none.py does not exist"),
        (
            ("--model", str(TARGETS), "--cluster", "two.yaml"),
            "has 2 devices and there are 1 ranks; start as many",
        ),
        (("--model", str(TARGETS), "--out", "x.yaml", "--optimizer", "lion"), "invalid choice: 'lion'"),
    ],
)
def test_bad_input(
    command: Any, arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    two = "devices: [{flops: 1e9, count: 2}]\nnetwork: {bandwidth: 1e9}"
    (tmp_path / "two.yaml").write_text(two)
    outcome = command("profile", *arguments)
    assert outcome.status == 2
    assert message in outcome.err
    assert (tmp_path / "two.yaml").read_text() == two
