"""Well-known programs, forced upon the search by constraints, equal the single device (HAP 2.3, 2.5.2).

A search that always answered "data parallel" would hide wrong rules; here each style of parallelism is pinned
on every model that has it, at uneven ratios of which one is zero, and its tell-tale steps are asserted.
"""

from __future__ import annotations

from collections import Counter

import pytest

import zoo
from hetspmd.cluster.collective_kinds import kinds_between
from hetspmd.optimize.compiler import plan_for
from hetspmd.placement import PARTIAL, REPLICATE, Placement, is_sharded, shard
from hetspmd.plan.plan import Plan
from hetspmd.program.program import Communicate, Compute, Program
from hetspmd.search import constraints as known
from hetspmd.search.constraints import Constraints
from hetspmd.verify.comparison import verify
from workbench import (
    Traced,
    cluster,
    collectives_of,
    copies,
    row_of,
    sufficient_factors,
    traced,
    used_where_it_lies,
    weight_contractions,
)

RATIOS = (0.5, 0.0, 0.3, 0.2)
CLUSTER = cluster(5, 1, 3, 2)
MODELS = [
    pytest.param(n, marks=pytest.mark.slow if n == "resnet50" else ()) for n in (*zoo.REQUIRED, "bert-moe")
]

GATHERS = kinds_between("shard", "replicated")
REDUCES = {"all_reduce", *kinds_between("partial", "shard")}


def forced(entry: Traced, constraints: Constraints) -> Plan:
    """The best program under ``constraints``, proven by the checker and equal to the single device."""
    plan = plan_for(entry.theory, CLUSTER, constraints, RATIOS)
    report = verify(
        entry.model, entry.example, CLUSTER, plan=plan, loss=entry.loss, optimizers=("sgd",), tolerance=1e-9
    )
    report.require()
    return plan


def stored(plan: Plan) -> dict[str, Placement]:
    return {name: form for name, (form, _) in plan.parameter_layout().items()}


@pytest.mark.parametrize("name", MODELS)
def test_data_parallel(name: str) -> None:
    entry = traced(name)
    theory = entry.theory
    plan = forced(entry, known.data_parallel(theory))
    assert set(stored(plan).values()) == {REPLICATE}
    batch = theory.batch_axes
    for step in plan.program.steps:
        if isinstance(step, Compute) and is_divided(plan, step):
            rows = theory.rows[step.instruction]
            assert theory.row_axes[step.instruction][rows.index(step.row)] in batch
    for weight in weight_contractions(theory):
        (parameter,) = (p for p in theory.graph.parameters if p.tensor == weight)
        assert parameter.gradient is not None
        assert reduced_on_the_way(plan.program, plan, parameter.gradient), parameter.name


@pytest.mark.parametrize("name", MODELS)
def test_sharded_parameters_as_in_zero(name: str) -> None:
    entry = traced(name)
    theory = entry.theory
    plan = forced(entry, known.zero_like(theory))
    forms = stored(plan)
    for parameter in theory.graph.parameters:
        shape = theory.graph.tensors[parameter.tensor].shape
        axis = theory.axes.axis(parameter.tensor, 0) if shape else None
        if axis is not None and axis.units >= 2:
            assert forms[parameter.name] == shard(0), parameter.name
    sharded = [p for p in theory.graph.parameters if is_sharded(forms[p.name])]
    assert len(sharded) > len(theory.graph.parameters) // 2
    kinds = Counter(s.kind for s in plan.program.steps if isinstance(s, Communicate))
    assert sum(kinds[k] for k in GATHERS) > 0
    assert sum(kinds[k] for k in ("reduce_scatter", "grouped_reduce")) > 0


# The first weight is divided by columns (its outputs), the second by rows (its inputs). nn.Linear and
# convolutions store [outputs, inputs], GPT-2's Conv1D [inputs, outputs].
MEGATRON: dict[str, tuple[tuple[str, ...], str, int]] = {
    "bert": (
        ("bert.encoder.layer.0.intermediate.dense.weight",),
        "bert.encoder.layer.0.output.dense.weight",
        0,
    ),
    "gpt2": (("transformer.h.0.mlp.c_fc.weight",), "transformer.h.0.mlp.c_proj.weight", 1),
    "llama": (
        ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        "model.layers.0.mlp.down_proj.weight",
        0,
    ),
    "vit": (("vit.layers.0.mlp.fc1.weight",), "vit.layers.0.mlp.fc2.weight", 0),
    "vgg19": (("classifier.0.weight",), "classifier.3.weight", 0),
    "resnet50": (("layer2.0.conv1.weight",), "layer2.0.conv2.weight", 0),
    "bert-moe": (("layers.0.feed_forward.up.weight",), "layers.0.feed_forward.down.weight", 0),
}


@pytest.mark.parametrize("name", MODELS)
def test_megatron(name: str) -> None:
    entry = traced(name)
    theory = entry.theory
    columns, rows, column_dim = MEGATRON[name.removesuffix("-eager")]
    names = known.named_tensors(theory)
    forms = {names[c]: shard(column_dim) for c in columns} | {names[rows]: shard(1 - column_dim)}
    plan = forced(entry, used_where_it_lies(theory, forms))
    weights = copies(theory, forms)
    assert not collectives_of(plan.program, weights), "the weights stay where they are"
    firsts = [forward_reader(theory, copies(theory, [names[c]])) for c in columns]
    for first in firsts:
        assert is_sharded(row_of(plan.program, first).post[0])
    second = forward_reader(theory, copies(theory, [names[rows]]))
    assert row_of(plan.program, second).post[0] == PARTIAL
    between = summands_after(plan, second)
    assert any(s.source == PARTIAL for s in collectives_of(plan.program, between)), "no reduction between"


@pytest.mark.parametrize("name", MODELS)
def test_sufficient_factor_broadcasting(name: str) -> None:
    entry = traced(name)
    theory = entry.theory
    plan = forced(entry, sufficient_factors(theory))
    contractions = weight_contractions(theory)
    assert contractions
    gathered = 0
    for weight, instruction in contractions.items():
        (parameter,) = (p for p in theory.graph.parameters if p.tensor == weight)
        assert parameter.gradient is not None
        node = theory.graph.instructions[instruction]
        whole = copies(theory, [t for t in node.outputs if t >= 0])
        assert not collectives_of(plan.program, {*whole, parameter.gradient}), parameter.name
        factors = views_behind(plan, node.inputs)
        gathered += any(s.kind in GATHERS for s in collectives_of(plan.program, factors))
    # Not every factor comes from a divided op: an input of the model is whole on every device.
    assert gathered > len(contractions) // 2


def test_expert_parallel() -> None:
    entry = traced("bert-moe")
    theory = entry.theory
    names = known.named_tensors(theory)
    weights = ("layers.1.feed_forward.w1_EDH", "layers.1.feed_forward.w2_EHD")
    forms = {names[n]: shard(0) for n in weights}
    held = copies(theory, forms)
    axes = {theory.axes.axis(t, 0).id for t in forms}
    assert len(axes) == 1, "all expert weights are divided alike"
    allowed_axes = theory.batch_axes | axes

    def allowed(instruction: int, row: object, axis: int | None) -> bool:
        inputs = theory.graph.instructions[instruction].inputs
        pre = row.pre
        if any(t in held and not is_sharded(f) for t, f in zip(inputs, pre, strict=True)):
            return False
        return axis is None or axis in allowed_axes

    plan = forced(entry, Constraints(forms, allowed))
    assert not collectives_of(plan.program, held), "experts stay where they are"
    for weight in forms:
        reader = forward_reader(theory, copies(theory, [weight]))
        row = row_of(plan.program, reader)
        (axis,) = axes
        assert theory.row_axes[reader][theory.rows[reader].index(row)] == axis
    moved = [s.kind for s in plan.program.steps if isinstance(s, Communicate)]
    assert "all_to_all" in moved, "tokens travel to their experts and back"


# what is asserted of a program ----------------------------------------------------------------------------


def is_divided(plan: Plan, step: Compute) -> bool:
    return step.row.factor is not None and not plan.graph.instructions[step.instruction].is_source


def reduced_on_the_way(program: Program, plan: Plan, gradient: int) -> bool:
    """Whether a gradient, or a value that it follows from by linear ops, is reduced."""
    behind = views_behind(plan, [gradient], linear=True)
    return any(s.kind in REDUCES for s in collectives_of(program, behind))


def views_behind(plan: Plan, tensors: object, *, linear: bool = False) -> set[int]:
    """The tensors and what they are views of (with ``linear``: or follow from by a row on summands)."""
    theory = plan.theory
    found: set[int] = set()
    stack = [*tensors]
    while stack:
        tensor = stack.pop()
        if tensor in found:
            continue
        found.add(tensor)
        producer = theory.graph.producer(tensor)
        rule = theory.rules.get(producer.id)
        if rule is None:
            continue
        if rule.alias or (linear and PARTIAL in row_of(plan.program, producer.id).pre):
            stack += producer.inputs
    return found


def summands_after(plan: Plan, instruction: int) -> set[int]:
    """The results of an instruction and what follows from them as summands."""
    graph = plan.graph
    found = {t for t in graph.instructions[instruction].outputs if t >= 0}
    for later in graph.instructions[instruction + 1 :]:
        if any(t in found for t in later.inputs):
            row = row_of(plan.program, later.id)
            if row.post and PARTIAL in row.post:
                found.update(t for t in later.outputs if t >= 0)
    return found


def forward_reader(theory: object, tensors: set[int]) -> int:
    """The forward op, no view, that reads one of the tensors."""
    for instruction in theory.graph.instructions:
        rule = theory.rules.get(instruction.id)
        if rule is None or rule.alias or instruction.phase != "forward":
            continue
        if any(t in tensors for t in instruction.inputs):
            return instruction.id
    raise AssertionError("no forward op reads the tensor")
