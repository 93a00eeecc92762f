"""HAP(..., cuda_graphs=...) of a step in micro-batches: the bits of a step without, turns that are alike by the
same captures, sums that are added to in place."""

from __future__ import annotations

import copy
import itertools
import re
from typing import Any

import pytest
import torch
from captures import accumulated, all_captured, both, compared, equal, gradients, sgd, steps_of, trained
from program_builder import divided_in_the_loop
from ranks import loss_of, own_gradient
from small_models import Case, case
from small_plans import cluster, segmented_in_turns
from test_captures_fallen_back import step
from test_micro_batches_training import Model, batch

import hetspmd
from hetspmd.dist.random import Randomness
from hetspmd.errors import CudaGraphsWarning
from hetspmd.lower import calls
from hetspmd.optimize.compiler import plan_for
from hetspmd.optimize.in_micro_batches import in_micro_batches
from hetspmd.plan.plan import Plan
from hetspmd.program.micro_batches import in_own_turns
from hetspmd.rules.rule import Triple
from hetspmd.rules.theory import derive
from hetspmd.run import captured_regions as captured
from hetspmd.run.capturer import CaptureError
from hetspmd.run.module import HAP
from hetspmd.run.simulated_capture import SimulatedCapturer
from hetspmd.search.constraints import Constraints
from hetspmd.trace.trace import trace

pytestmark = pytest.mark.filterwarnings("ignore::hetspmd.errors.DroppedOutputWarning")


def rows_of(count: int, *, dropout: float = 0.0) -> Case:
    """The model with a batch of so many rows."""
    model, rows = Model(dropout=dropout).double(), batch(count, 0)
    return Case(model, rows, derive(trace(copy.deepcopy(model), (), rows)))


def planned(c: Case, *devices: float, **options: Any) -> Plan:
    return hetspmd.compile(copy.deepcopy(c.model), c.batch, cluster(*devices), **options)


def turns(hap: HAP, plan: int = 0) -> list[tuple[int, ...]]:
    return [one.turns for one in hap.cuda_graphs_report().plans[plan].turns]


@pytest.mark.parametrize(
    ("rows", "count", "shared"),
    [
        (4, 2, [(0,), (1,)]),
        (7, 3, [(0,), (1,), (2,)]),  # 3, 2, 2
        (9, 5, [(0,), (1, 2, 3), (4,)]),  # 2, 2, 2, 2, 1
        (9, 6, [(0,), (1, 2), (3, 4), (5,)]),  # 2, 2, 2, 1, 1, 1
    ],
)
def test_turns_that_are_alike_have_the_same_captures(
    rows: int, count: int, shared: list[tuple[int, ...]]
) -> None:
    c = rows_of(rows)
    hap = both(c, plan=planned(c, 1, micro_batches=count))
    assert turns(hap) == shared
    assert all_captured(hap)
    report = hap.cuda_graphs_report().plans[0]
    assert report.stretches == len(shared)  # there is nothing between them on one device
    assert report.between == 0
    assert report.steps == {"": 4}
    for numbers in shared:
        name = f"turn {numbers[0]}" if len(numbers) == 1 else f"turns {numbers[0]}-{numbers[-1]}, by the same"
        assert name in str(report)


@pytest.mark.parametrize(("rows", "count"), [(9, 2), (7, 3), (9, 5)])
def test_dropout(rows: int, count: int) -> None:
    c = rows_of(rows, dropout=0.5)
    hap = both(c, plan=planned(c, 1, micro_batches=count))
    assert all_captured(hap)
    losses = {step(hap, c).item() for _ in range(4)}
    assert len(losses) == 4  # each step draws anew


RANKS = [
    ("mlp", {"micro_batches": 2}),
    ("mlp", {"micro_batches": 3, "zero": 3, "recompute": "all"}),
    *(pytest.param(name, options, marks=pytest.mark.slow)
      for name in ("mlp", "attention")
      for options in (
          {"micro_batches": 4, "zero": 1},
          {"micro_batches": 3, "zero": 2},
          {"micro_batches": 4, "zero": 3, "recompute": "all"},
          {"micro_batches": 3, "recompute": "all"},
      )),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), RANKS)
def test_ranks(name: str, options: dict[str, Any]) -> None:
    c = case(name)
    plan = planned(c, 4, 2, 1, **options)
    assert len(plan.active) > 1
    reports = compared(c, plan)
    assert all("4 steps by captures" in reports[rank] for rank in plan.active)
    assert not any("not captured" in report or "steps without" in report for report in reports)


def test_what_later_turns_read_is_copied_once() -> None:
    """Parameters that are gathered before the loop: a copy of each, and none in the turns behind the first."""
    c = case("mlp")
    plan = planned(c, 2, 1, micro_batches=4, zero=1)
    copied = {}

    def body(hap: HAP, c: Case) -> Any:
        found = trained(hap, c)
        captures = hap._plans.entries[0].runner.captures
        if captures is not None:
            (variant,) = captures._variants.values()
            own = {t.data_ptr() for t in variant.kept.values()}
            again = [
                to
                for region in captures._regions
                for _, to in variant.captured[region.number].copied
                if tuple(to.shape) in {tuple(t.shape) for t in variant.kept.values()}
            ]
            copied[hap.rank] = len(own), len(again)
        return found

    compared(c, plan, body)
    weights = sum(p.gradient is not None for p in plan.graph.parameters)
    assert all(kept >= weights - 1 and not again for kept, again in copied.values()), copied
    assert sorted(copied) == [0, 1]


def test_sums_are_added_to_in_place() -> None:
    """Those of all turns lie in one place, from the first turn's captures on."""
    c = rows_of(9)
    hap = both(c, plan=planned(c, 1, micro_batches=5))
    captures = hap._plans.entries[0].runner.captures
    assert captures is not None
    (variant,) = captures._variants.values()
    first, between, last = (variant.captured[region.number] for region in captures._regions)
    made = {t.data_ptr() for t in first.capture.outputs if isinstance(t, torch.Tensor)}
    read = {place.address for place in between.read}
    assert {t.data_ptr() for t in between.capture.outputs} <= made & read
    assert {place.address for place in last.read} & made
    assert {to.shape[0] for _, to in between.copied} == {2}  # rows, and nothing else


@pytest.mark.filterwarnings("ignore:.*stays where it is:hetspmd.errors.CudaGraphsWarning")
@pytest.mark.parametrize("refused", [0, 1, 2])
def test_sums_of_turns_that_cannot_be_captured(refused: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the others add to may lie anywhere then."""
    asked = itertools.count()
    capture = SimulatedCapturer.capture

    def refusing(self: SimulatedCapturer, *args: Any) -> Any:
        if next(asked) == refused:
            raise CaptureError("it stays where it is")
        return capture(self, *args)

    monkeypatch.setattr(SimulatedCapturer, "capture", refusing)
    c = rows_of(9)
    hap = both(c, plan=planned(c, 1, micro_batches=5))
    report = hap.cuda_graphs_report().plans[0]
    assert [turn.captured for turn in report.turns] == [number != refused for number in range(3)]
    assert "it stays where it is" in str(report)


def test_gradients_that_accumulate_and_a_graph_that_is_kept() -> None:
    c = rows_of(7, dropout=0.3)
    assert steps_of(both(c, accumulated, plan=planned(c, 1, micro_batches=3))) == {"": 10}


def test_a_forward_before_the_backward() -> None:
    def body(hap: HAP, c: Case) -> Any:
        found = []
        for kept in (1, 1, 2, 3, 1):
            hap.zero_grad()
            losses = [loss_of(hap(**c.batch)) for _ in range(kept)]
            for loss in (*losses[1:], losses[0]):
                loss.backward()
                found += gradients(hap)
            found += losses
        return [None if f is None else f.detach() for f in found]

    c = rows_of(7, dropout=0.3)
    with pytest.warns(CudaGraphsWarning, match="before the backward"):
        hap = both(c, body, plan=planned(c, 1, micro_batches=3))
    assert steps_of(hap) == {"": 5, captured.PENDING: 3}


def training(hap: HAP, c: Case) -> Any:
    """Batches of three sizes, an evaluation between a forward and its backward, parameters at another place."""
    optimizer, found = torch.optim.AdamW(hap.parameters(), lr=1e-2), []
    for number in range(12):
        rows = (9, 9, 9, 4, 4, 9)[number % 6]
        hap.zero_grad()
        loss = loss_of(hap(**batch(rows, number)))
        if number % 3 == 0:
            hap.eval()
            with torch.no_grad():
                output = hap(**batch(5, 7))
            found += [loss_of(output).clone(), output["scores"].clone()]
            hap.train()
        loss.backward()
        found += [loss.detach(), *(g.clone() for p in hap.parameters() if (g := own_gradient(p)) is not None)]
        optimizer.step()
        if number == 7:
            with torch.no_grad():
                weight = hap.module.first.weight
                weight.data = weight.data.clone()
    return found, hap.full_tensors()


def test_batches_of_other_sizes_and_evaluations() -> None:
    c = rows_of(9, dropout=0.3)
    hap = both(c, training, plan=planned(c, 1, micro_batches=4))
    reports = hap.cuda_graphs_report().plans
    assert [bool(report.turns) for report in reports] == [True, False, True]
    assert all(set(report.steps) == {""} and report.captured == report.stretches for report in reports)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"micro_batches": 3}, {"micro_batches": 2, "zero": 3}])
def test_ranks_with_batches_of_other_sizes(options: dict[str, Any]) -> None:
    c = rows_of(9)
    reports = compared(c, planned(c, 4, 2, 1, **options), training)
    assert not any("steps without" in report for report in reports)


@pytest.mark.slow
def test_devices_in_turns_of_their_own() -> None:
    c = rows_of(9)
    theory, batches = in_micro_batches(c.theory, 2)
    assert batches is not None
    own = in_own_turns(theory, batches, (1, 4, 2))
    constraints, shares = divided_in_the_loop(theory, 3), (0.3, 0.5, 0.2)
    plan = plan_for(theory, cluster(4, 2, 1), constraints, shares, batches=own)
    reports = compared(c, plan, training)
    numbers = [re.findall(r"turn (\d)", report.split("plan 1")[0]) for report in reports]
    assert numbers == [["0"], ["0", "1", "2", "3"], ["0", "1"]]
    assert not any("steps without" in report for report in reports)


@pytest.mark.parametrize("name", ["mlp", pytest.param("attention", marks=pytest.mark.slow)])
def test_segments(name: str) -> None:
    """What crosses a cut is exchanged in each turn, between the stretches."""
    c = case(name)
    reports = compared(c, segmented_in_turns(c, 4))
    assert all("4 steps by captures" in report for report in reports)


@pytest.mark.slow
def test_empty_shards() -> None:
    c = rows_of(9)
    theory, batches = in_micro_batches(c.theory, 3)
    plan = plan_for(theory, cluster(4, 2, 1), Constraints(), (0.8, 0.0, 0.2), batches=batches)
    assert all("4 steps by captures" in report for report in compared(c, plan))


def test_mixed_precision_with_a_scaler() -> None:
    """In float16, whose gradients are computed of the loss as it is expected to be scaled."""
    model, rows = Model(dropout=0.2), batch(7, 0)
    found, plan = [], None
    for asked in (SimulatedCapturer(), False):
        with torch.autocast("cpu", torch.float16):
            options = {"plan": plan, "check_plan": False} if plan else {"example": rows, "micro_batches": 3}
            hap = HAP(copy.deepcopy(model), cluster(1), cuda_graphs=asked, **options)
            plan = hap.plan
        hap.use_randomness(Randomness(1, 0, torch.device("cpu")))
        optimizer, scaler, mine = sgd(hap), hetspmd.GradScaler("cpu", init_scale=8.0, growth_interval=2), []
        for _ in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(hap(**rows))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            mine += [loss.detach(), *gradients(hap), scaler.get_scale()]
            scaler.step(optimizer)
            scaler.update()
        found.append(mine)
        if asked:
            assert all_captured(hap)
            assert steps_of(hap) == {"": 5}
    equal(*found)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_recordings_and_anomalies_run_as_they_are() -> None:
    def body(hap: HAP, c: Case) -> Any:
        found = [step(hap, c).detach() for _ in range(3)]
        with hap.record():
            found += [step(hap, c).detach() for _ in range(2)]
        with torch.autograd.detect_anomaly():
            found.append(step(hap, c).detach())
        return found + [step(hap, c).detach() for _ in range(2)] + gradients(hap)

    c = rows_of(7)
    counted = {"": 5, captured.RECORDED: 2, captured.ANOMALY: 1}
    assert steps_of(both(c, body, plan=planned(c, 1, micro_batches=3))) == counted


def test_an_error_in_a_turn_names_the_module() -> None:
    wrong = batch(9, 0)
    wrong["ids"][3, 2] = 20
    hap = HAP(
        Model().double(), cluster(1), example=batch(9, 0), micro_batches=3, cuda_graphs=SimulatedCapturer()
    )
    for _ in range(3):
        loss_of(hap(**batch(9, 0))).backward()
    with pytest.raises(IndexError) as caught:
        hap(**wrong)
    assert "of module embed" in "\n".join(getattr(caught.value, "__notes__", []))


def draws(module: Any) -> int:
    """Calls that draw, which stand in a graph itself."""
    return sum(node.target is calls.draw for node in module.graph.nodes)


def test_draws_of_several_ranks_run_between_the_stretches() -> None:
    """Where each turn takes another slice of what all ranks draw, and turns share a graph."""
    c = rows_of(9, dropout=0.5)
    theory, batches = in_micro_batches(c.theory, 5)
    assert batches is not None

    drawing = {i for i, rule in theory.rules.items() if rule.random}

    def whole_draws(instruction: int, row: Triple, _axis: int | None) -> bool:
        return instruction not in drawing or row.factor is None

    constraints = Constraints(row_filter=whole_draws)
    plan = plan_for(theory, cluster(1, 1), constraints, (0.5, 0.5), batches=batches)
    found = []

    def body(hap: HAP, c: Case) -> Any:
        captures = hap._plans.entries[0].runner.captures
        if captures is not None and captures._turns is not None:
            found.append([draws(turn) for turn in captures._turns.turns])
        return trained(hap, c)

    reports = compared(c, plan, body)
    assert [numbers[1:] for numbers in found] == [[1, 1, 1, 0]] * 2
    assert not any("not captured" in report for report in reports)
