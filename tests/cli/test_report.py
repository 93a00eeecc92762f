"""The text forms of a plan: small ones in full."""

from __future__ import annotations

from dataclasses import replace

import targets as t
import torch

import hetspmd
from hetspmd.codec.tables import shortened, table
from hetspmd.lower import lower_plan
from hetspmd.optimize.compiler import plan_for
from hetspmd.plan.plan_facts import collectives, sent, storage, tensor_roles, transfers
from hetspmd.program.program import Communicate
from hetspmd.report import plan_json, plan_text, program_text
from hetspmd.rules.theory import derive
from hetspmd.search import constraints as known
from hetspmd.trace.trace import trace

TWO = {
    "devices": [
        {"name": "fast", "flops": 3e6, "memory_bandwidth": 3e6, "launch": 1e-9},
        {"name": "slow", "flops": 1e6, "memory_bandwidth": 1e6, "launch": 1e-9},
    ],
    "network": {"bandwidth": 1e8, "latency": 1e-9},
}


def plan(**options: object) -> hetspmd.Plan:
    return hetspmd.compile(*t.build(), TWO, **options)


def test_one_line_per_step_with_its_triple() -> None:
    made = plan(constraints={"up.weight": "shard(0)", "down.weight": "replicated"})
    lines = program_text(made).splitlines()
    assert len(lines) == len(made.program.steps)
    calls = [line.split("  ")[0] for line in lines]
    assert calls[0] == "e0 = Parameter-Shard(0)"
    assert lines[0].endswith("# up.weight: float32[16, 8]")
    for line, step in zip(lines, made.program.steps, strict=True):
        assert line.count(" -> ") == 1
        if isinstance(step, Communicate):
            assert line.split("(")[0] in {
                "All-Reduce", "Reduce-Scatter", "Grouped-Reduce", "All-Gather", "Grouped-Broadcast", "All-To-All",
                "Rebalance", "Ring-Gather", "Ring-Reduce", "Exchange-Reduce",
            }  # fmt: skip


def test_collectives_add_up_to_the_predicted_communication() -> None:
    made = plan()
    found = collectives(made)
    assert found, "the cluster is made so that dividing pays"
    assert abs(sum(c.seconds for c in found) - made.cost.communication_seconds) < 1e-12
    assert all(c.nbytes == made.graph.tensors[c.step.tensor].nbytes for c in found)


def test_rounding_is_no_overlap() -> None:
    made = plan()
    alone = replace(made.cost, stage_seconds=made.cost.step_seconds * (1 - 1e-12), stages=1)
    assert "communication in 1 stage, of which 0 s overlap" in plan_text(replace(made, cost=alone))
    hidden = replace(made.cost, stage_seconds=made.cost.step_seconds + 1e-3, stages=2)
    assert "communication in 2 stages, of which 1 ms overlap" in plan_text(replace(made, cost=hidden))


def test_small_collectives_share_transfers() -> None:
    """As many as the local graphs start, forward and backward."""
    slow = hetspmd.Cluster.load({**TWO, "network": {"bandwidth": 1e8, "latency": 1e-5}})
    model, example = t.build()
    theory = derive(trace(model, (), example))
    made = plan_for(theory, slow, known.data_parallel(theory), (0.75, 0.25))
    program = lower_plan(made, 0, torch.device("cpu"))
    assert program.backward is not None
    nodes = (*program.forward.graph.nodes, *program.backward.graph.nodes)
    started = sum("transfer" in node.meta for node in nodes)
    assert transfers(made) == started < len(collectives(made))
    told = f"Collectives: {len(collectives(made))}, in {started} transfers: small ones share buckets of up to"
    assert told in plan_text(made)
    assert plan_json(made)["transfers"] == started
    few = plan(constraints={"up.weight": "shard(0)", "down.weight": "replicated"})
    assert (transfers(few) == len(sent(few))) == (" transfers" not in plan_text(few))


def test_roles_name_gradients_parameters_and_the_loss() -> None:
    graph = plan().graph
    roles = tensor_roles(graph)
    for parameter in graph.parameters:
        assert roles[parameter.tensor] == f"parameter {parameter.name}"
        assert parameter.gradient is not None
        assert roles[parameter.gradient] == f"gradient of {parameter.name}"
    assert graph.loss is not None
    assert roles[graph.loss] == "loss"


def test_storage_shows_elements_per_device() -> None:
    groups = {
        g.pattern: g for g in storage(plan(constraints={"up.weight": "shard(0)", "down.*": "replicated"}))
    }
    assert sum(groups["up.weight"].extents) == 16
    assert groups["up.weight"].nbytes == 16 * 8 * 4
    assert groups["down.weight"].extents == ()


def test_print_shows_the_plan() -> None:
    made = plan()
    assert str(made) == plan_text(made)
    assert "Sharding ratios\n  rank  device" in str(made)


def test_a_single_device_communicates_for_nothing() -> None:
    made = hetspmd.compile(*t.build(), {"devices": [{"flops": 1e9}]})
    assert all(c.seconds == 0 for c in collectives(made))
    assert "Cluster of 1 device\n" in str(made)


def test_table() -> None:
    text = table(["a", "long"], [["xyz", "1"], ["y", "10"]], right=(1,))
    assert text.splitlines() == ["  a    long", "  xyz     1", "  y      10"]


def test_shortened() -> None:
    assert shortened("abcdef", 6) == "abcdef"
    assert shortened("abcdefghij", 7) == "ab...ij"
    assert all(len(shortened("x" * 50, n)) == n for n in range(4, 50))
