"""Parameters that are stored in shards so that the forward hides half of what their gradients cost."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hetspmd
import hetspmd.optimize.overlap as overlap
import hetspmd.optimize.prefetch as prefetch
import hetspmd.optimize.synthesize as synthesize
from hetspmd.cluster.cluster import Cluster
from hetspmd.codec.records import encode
from hetspmd.cost.step import StepModel
from hetspmd.errors import PlanError
from hetspmd.optimize.candidate import Candidate, Evaluator
from hetspmd.optimize.compile_options import CompileOptions
from hetspmd.optimize.compiler import compile_plan, plan_for
from hetspmd.optimize.prefetch import further, storage_axes, stored_evenly
from hetspmd.optimize.synthesis import Synthesis
from hetspmd.optimize.thresholds import THRESHOLDS
from hetspmd.placement import REPLICATE, is_sharded, shard
from hetspmd.plan.plan import Plan
from hetspmd.plan.text import content, file_text
from hetspmd.program.checker import check
from hetspmd.program.lengths import by_segment, lengths_for
from hetspmd.program.program import Communicate
from hetspmd.report.summary import plan_text
from hetspmd.search import constraints as known
from hetspmd.search.constraints import Constraints, named_tensors
from hetspmd.search.search import Limits, search
from hetspmd.search.space import search_space
from hetspmd.trace.trace import split_example
from workbench import Traced, simulated_error, single_device, traced


def on(bandwidth: float, *speeds: float, memory: float = 1e9) -> Cluster:
    """Devices on which a step of a small model takes about 20 ms, and links of ``bandwidth`` bytes/s."""
    devices = [
        {"name": f"d{j}", "flops": s * 1e8, "memory_bandwidth": s * 1e9, "launch": 1e-7, "memory": memory}
        for j, s in enumerate(speeds)
    ]
    return Cluster.load({"devices": devices, "network": {"bandwidth": bandwidth, "latency": 1e-6}})


def compiled(name: str, devices: Cluster, constraints: dict[str, str | int] | None = None) -> Plan:
    entry = traced(name)
    return hetspmd.compile(entry.model, entry.example, devices, loss=entry.loss, constraints=constraints)


@cache
def vit_on_two() -> Plan:
    """Rows of the batch are 2 to 1."""
    return compiled("vit", on(1e7, 2, 1))


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Switches off what is tested here, and what does as much by itself."""

    def off() -> None:
        monkeypatch.setattr(overlap, "prefetched", lambda *_: [])
        monkeypatch.setattr(synthesize, "storage_variants", lambda _ctx, _costs, candidate: (candidate, []))

    return off


def sharded(plan: Plan) -> list[tuple[int, ...]]:
    """The extents of the parameters that are stored in shards."""
    return [extents for form, extents in plan.parameter_layout().values() if is_sharded(form)]


def error_of(entry: Traced, plan: Plan) -> float:
    """The largest relative error of a step of the plan's program."""
    args, kwargs = split_example(entry.example)
    tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    assert len(tensors) == len(plan.graph.inputs)
    want = single_device(plan.theory, entry.model, tensors)
    return simulated_error(plan.theory, plan.program, plan.lengths, entry.model, tensors, want)


@pytest.mark.parametrize(
    ("name", "devices", "gain"),
    [
        ("vit", on(1e7, 2, 1), 0.10),
        pytest.param("vit", on(1e7, 1, 1, 1), 0.05, marks=pytest.mark.slow),
        ("gpt2", on(1e7, 2, 1), 0.02),
    ],
)
def test_links_work_while_the_forward_runs(
    name: str, devices: Cluster, gain: float, without: Callable[[], None]
) -> None:
    plan = compiled(name, devices)
    check(plan.theory, plan.program)
    assert plan.schedule.prefetch_distance > 1
    assert f"gathered {plan.schedule.prefetch_distance} groups ahead" in plan_text(plan)
    assert sharded(plan)
    assert error_of(traced(name), plan) < 1e-9
    without()
    before = compiled(name, devices)
    assert plan.cost.step_seconds < before.cost.step_seconds * (1 - gain)
    assert before.schedule.prefetch_distance == 1


def test_a_plan_for_the_same_shards_gathers_ahead_too() -> None:
    entry, first = traced("vit"), vit_on_two()
    args, kwargs = split_example(entry.example)
    plan = compile_plan(entry.model, args, kwargs, first.cluster, CompileOptions(loss=entry.loss), like=first)
    assert plan.parameter_layout() == first.parameter_layout()
    seconds = at_distances(plan)
    assert seconds[plan.schedule.prefetch_distance] == pytest.approx(plan.cost.step_seconds)
    assert min(seconds.values()) == seconds[plan.schedule.prefetch_distance] < 0.95 * seconds[1]


def at_distances(plan: Plan) -> dict[int, float]:
    """Predicted seconds by how far ahead parameters are gathered."""
    step, shares = StepModel(plan.costs, plan.program), plan.costs.shares(plan.lengths)
    return {n: step.prefetching(n).streams.seconds(shares) for n in (1, *THRESHOLDS.prefetch_distances)}


def test_gathers_are_as_far_ahead_as_the_memory_lets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is gathered ahead is held until it is used: of the distances that fit the best is taken."""
    plan = vit_on_two()
    seconds = at_distances(plan)
    assert plan.schedule.prefetch_distance > 3
    layout = plan.parameter_layout()
    forms = {p.tensor: layout[p.name][0] for p in plan.graph.parameters}
    ctx = Synthesis(plan.theory, plan.cluster, Constraints(forms), Limits())
    costs = ctx.costs(ctx.everyone)
    found = ctx.search(costs, plan.lengths)
    candidate = Evaluator(ctx, costs, found, ctx.everyone, None, "")(plan.ratios, plan.lengths)
    lacking = Candidate.lacking.func  # type: ignore[attr-defined]  # a cached property

    def lacks(self: Candidate) -> dict[int, int]:
        return {0: 1} if self.evaluator.prefetch_distance > 3 else lacking(self)

    monkeypatch.setattr(Candidate, "lacking", property(lacks))
    made = further(ctx, costs, candidate)
    assert made is not None
    assert made.fits
    assert made.evaluator.prefetch_distance == min((1, 2, 3), key=seconds.__getitem__)


def test_what_is_only_stored_is_in_even_shares() -> None:
    """Rows of the batch are 2 to 1, parameters 1 to 1."""
    plan = vit_on_two()
    rows, others = plan.ratios[0]
    assert rows > 1.5 * others
    theory, free = plan.theory, storage_axes(plan.theory, plan.program)
    shares, layout = [], plan.parameter_layout()
    for p in plan.graph.parameters:
        form, extents = layout[p.name]
        axis = theory.axes.sharded(p.tensor, form) if is_sharded(form) else None
        if axis is not None and axis.id in free:
            shares.append([n * axis.units / sum(extents) for n in extents])
    assert len(shares) > 10
    assert all(abs(one - other) <= 1 for one, other in shares), "but for a unit"


def test_the_plan_is_the_same_every_time_and_in_a_file() -> None:
    plan = vit_on_two()
    assert compiled("vit", on(1e7, 2, 1)).to_json() == plan.to_json()
    again = Plan.from_json(plan.to_json())
    assert again.program == plan.program
    assert again.schedule.prefetch_distance == plan.schedule.prefetch_distance
    held = plan.timeline()
    assert again.timeline() == held
    with pytest.raises(PlanError, match="damaged"):
        Plan.from_json(
            plan.to_json().replace(
                f'"prefetch_distance":{plan.schedule.prefetch_distance}', '"prefetch_distance":0'
            )
        )
    edited = encode(plan)
    edited["schedule"]["prefetch_distance"] = 0
    with pytest.raises(PlanError, match="damaged: a prefetch distance of 0"):
        Plan.from_json(file_text(content(edited)))


def test_forms_that_are_asked_for_are_kept() -> None:
    asked = compiled("vit", on(1e7, 2, 1), constraints={"*": "replicated"})
    assert sharded(asked) == []
    assert sharded(vit_on_two())


def test_memory_is_kept_to() -> None:
    """What the best plan holds where there is room does not fit; the one that comes out does."""
    free = vit_on_two()
    limit = max(free.cost.memory_bytes) * 0.98
    tight = compiled("vit", on(1e7, 2, 1, memory=limit))
    assert max(tight.cost.memory_bytes) <= limit
    assert tight.cost.step_seconds >= free.cost.step_seconds


def test_axes_along_which_work_is_divided_are_not_free() -> None:
    entry = traced("vit")
    theory = entry.theory
    devices = on(1e7, 2, 1)
    rows = plan_for(theory, devices, known.data_parallel(theory), (0.7, 0.3))
    free = storage_axes(theory, rows.program)
    assert free.isdisjoint(known.batch_axes(theory))
    stored = {a.id for p in theory.graph.parameters if (a := theory.axes.axis(p.tensor, 0)) is not None}
    assert stored & free, "nothing else is divided along the rows of a weight"
    columns = plan_for(theory, devices, known.tensor_parallel(theory), (0.7, 0.3))
    assert any(isinstance(s, Communicate) for s in columns.program.steps)
    assert not stored & storage_axes(theory, columns.program) >= stored & free


def test_devices_without_a_share_store_nothing() -> None:
    theory = traced("vit").theory
    ratios = by_segment((0.6, 0.4, 0.0), theory.axes.segments)
    lengths = lengths_for(theory.axes, ratios)
    axis = theory.axes.axis(theory.graph.parameters[0].tensor, 0) or theory.axes.axes[0]
    assert axis is not None
    even = stored_evenly(theory, lengths, ratios, frozenset({axis.id}))
    units = even.units[axis.id]
    assert units[2] == 0
    assert abs(units[0] - units[1]) <= 1
    others = [a.id for a in theory.axes.axes if a.id != axis.id]
    assert all(even.units[i] == lengths.units[i] for i in others)


def test_a_program_that_is_known_stays_as_it_is() -> None:
    """Forced data parallelism stores every parameter whole, and nothing is ahead."""
    theory = traced("vit").theory
    forced = plan_for(theory, on(1e7, 2, 1), known.data_parallel(theory), (0.7, 0.3))
    assert {form for form, _ in forced.parameter_layout().values()} == {REPLICATE}
    assert forced.schedule.prefetch_distance == 1


@pytest.mark.parametrize(
    ("units", "dim"), [((2, 512), 0), ((63, 512), 0), ((5, 512), 1), ((5, 7), 1), ((1, 2), 1), ((1, 1), None)]
)
def test_dim_0_is_divided_where_it_is_fine_enough(units: tuple[int, int], dim: int | None) -> None:
    """Between two devices 2 and 63 units are, of which slices need not be copied; otherwise the dim of which the
    largest shard is smallest."""
    axes = [SimpleNamespace(id=d, units=count) for d, count in enumerate(units)]
    theory: Any = SimpleNamespace(
        graph=SimpleNamespace(tensors=[SimpleNamespace(shape=units)]),
        axes=SimpleNamespace(axis=lambda tensor, d: axes[d]),
    )
    found = prefetch.divisible(theory, [0], frozenset((0, 1)), 2, THRESHOLDS.even_shard)
    assert found == ({} if dim is None else {0: shard(dim)})


def test_each_alternative_has_its_own_prefetch_distance() -> None:
    plan = vit_on_two()
    ahead = plan.schedule.prefetch_distance
    assert ahead > 1
    name = "vit.layers.0.attention.k_proj.weight"
    tensor = named_tensors(plan.theory)[name]
    quicker = 0
    for alternative in plan.explain(name).alternatives:
        space = search_space(plan.theory, Constraints({tensor: alternative.form}))
        step = StepModel(plan.costs, search(space, plan.costs, plan.lengths, Limits()).program)
        distances = {1, ahead, *THRESHOLDS.prefetch_distances}
        seconds = {n: step.prefetching(n).cost(plan.lengths).step_seconds for n in distances}
        assert alternative.step_seconds == pytest.approx(min(seconds.values()), rel=1e-12)
        quicker += alternative.step_seconds < seconds[ahead]
    assert quicker > 0, "the plan's distance is not the best of every program"
