"""Local programs against the single device, by brute force over random programs."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from program_builder import build, cheap_random_program, data_parallel, random_program, uneven
from small_models import Attention, Case, case

from hetspmd.dist.communicator import Communicator
from hetspmd.dist.random import Randomness
from hetspmd.dist.runtime import Runtime
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import PlanError
from hetspmd.lower import LocalProgram, calls
from hetspmd.lower.emit import take_saved
from hetspmd.placement import PARTIAL, REPLICATE, is_sharded, shard
from hetspmd.program.dataflow import reads, writes
from hetspmd.program.lengths import Lengths
from hetspmd.program.program import Communicate, Compute, Program, Result
from hetspmd.rules.rule import Triple
from hetspmd.trace.graph import Instruction
from hetspmd.verify.reference import ReferenceResult, run_reference
from scheduled import lower, order_of

CPU = torch.device("cpu")
Local = tuple[LocalProgram, torch.Tensor, list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]


def randomness(rank: int = 0) -> Randomness:
    found = Randomness(5, rank, CPU, reference=True)
    found.begin_step()
    return found


def inputs(c: Case) -> list[torch.Tensor]:
    return [c.batch[i.path] for i in c.theory.graph.inputs]


def reference(c: Case) -> ReferenceResult:
    parameters, buffers = dict(c.model.named_parameters()), dict(c.model.named_buffers())
    return run_reference(c.theory, parameters, buffers, inputs(c), randomness=randomness())


def distributed(c: Case, program: Program, lengths: Lengths, delay: bool = False) -> list[Local]:
    graph = c.theory.graph
    parameters, buffers = dict(c.model.named_parameters()), dict(c.model.named_buffers())

    def body(communicator: Communicator) -> Local:
        local = lower(c.theory, program, lengths, communicator.rank, CPU)
        runtime = Runtime(communicator, randomness(communicator.rank))
        with torch.no_grad():
            shards = [
                layout.slice(parameters[p.name].detach())
                for layout, p in zip(local.parameters, graph.parameters, strict=True)
            ]
            whole = [buffers[b.name] for b in graph.buffers]
            loss, outputs, updated, saved = local.forward(runtime, *shards, *whole, *inputs(c))
            gradients = local.backward(runtime, torch.ones((), dtype=loss.dtype), saved)
        assert all(s is None for s in saved), "backward leaves saved values behind"
        return local, loss, outputs, updated, gradients

    return run_ranks(lengths.world, body)


def compare(c: Case, program: Program, lengths: Lengths) -> None:
    graph, want = c.theory.graph, reference(c)
    close = {"rtol": 1e-9, "atol": 1e-10}
    results = distributed(c, program, lengths)
    for local, loss, outputs, updated, gradients in results:
        torch.testing.assert_close(loss, want.loss, **close)
        for layout, value in zip(local.outputs, outputs, strict=True):
            if layout.form != PARTIAL:
                torch.testing.assert_close(value, layout.slice(want.outputs[layout.tensor]), **close)
        for index, value in zip(local.updated, updated, strict=True):
            torch.testing.assert_close(value, want.buffers[graph.buffers[index].name], **close)
        for index, value in zip(local.differentiable, gradients, strict=True):
            layout = local.parameters[index]
            assert tuple(value.shape) == layout.local_shape
            whole = want.gradients[graph.parameters[index].name]
            torch.testing.assert_close(value, layout.slice(whole), **close)
    for position, layout in enumerate(results[0][0].outputs):
        if layout.form == PARTIAL:
            total = torch.stack([outputs[position] for _, _, outputs, _, _ in results]).sum(0)
            torch.testing.assert_close(total, want.outputs[layout.tensor], **close)


@pytest.fixture(scope="module", params=["mlp", "conv", "attention"])
def any_case(request: pytest.FixtureRequest) -> Case:
    return case(request.param)


def test_reference_graph_equals_eager_pytorch(any_case: Case) -> None:
    quiet = isinstance(any_case.model, Attention)
    model = case("attention", dropout=0.0) if quiet else any_case
    model.model.zero_grad()
    got = reference(model)
    before = {k: v.clone() for k, v in model.model.state_dict().items()}
    output = model.model(**model.batch)
    loss = output["loss"] if isinstance(output, dict) else output[0] if isinstance(output, tuple) else output
    loss.backward()
    torch.testing.assert_close(got.loss, loss.detach(), rtol=1e-12, atol=1e-12)
    for name, parameter in model.model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(got.gradients[name], parameter.grad, rtol=1e-10, atol=1e-12)
    model.model.load_state_dict(before)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_random_programs_equal_the_single_device(any_case: Case, world: int) -> None:
    for seed in range(6):
        make = random_program if seed % 2 else cheap_random_program
        compare(any_case, make(any_case.theory, seed), uneven(any_case.theory, world, seed))


def test_one_device_may_hold_everything(any_case: Case) -> None:
    program = cheap_random_program(any_case.theory, 1)
    units = tuple((0, axis.units, 0) for axis in any_case.theory.axes.axes)
    compare(any_case, program, Lengths(3, units))


@pytest.mark.parametrize("sharded", [False, True])
def test_data_parallel(any_case: Case, sharded: bool) -> None:
    graph = any_case.theory.graph
    program = data_parallel(any_case.theory, graph.inputs[0].tensor, sharded_parameters=sharded)
    compare(any_case, program, uneven(any_case.theory, 3, 2))
    backward = lower(any_case.theory, program, uneven(any_case.theory, 3), 0, CPU).backward
    assert backward is not None
    starts = Counter(n.args[1] for n in backward.graph.nodes if n.target is calls.start)
    if not sharded:
        trained = sum(p.gradient is not None for p in graph.parameters)
        sums = starts["all_reduce"]
        assert sums >= trained - 1, "every gradient is summed once"


def test_collectives_start_after_their_producer_and_wait_before_their_reader() -> None:
    c = case("mlp")
    program = data_parallel(c.theory, c.theory.graph.inputs[0].tensor)
    backward = lower(c.theory, program, uneven(c.theory, 2), 0, CPU).backward
    assert backward is not None
    nodes = list(backward.graph.nodes)
    for i, node in enumerate(nodes):
        if node.target is calls.start and node.args[1] == "all_reduce":
            assert nodes[i - 1] is node.args[2], "started right after its source"
            (reader,) = node.users
            assert reader.target is calls.wait
    last_start = max(i for i, n in enumerate(nodes) if n.target is calls.start)
    first_wait = min(i for i, n in enumerate(nodes) if n.target is calls.wait)
    assert first_wait > last_start - 4, "gradients are waited for at the end"


def test_ranks_issue_the_same_collectives() -> None:
    c = case("attention")
    starts = (calls.start, calls.start_bucket)
    for seed in range(4):
        program = random_program(c.theory, seed)
        lengths = uneven(c.theory, 4, seed)
        sequences = []
        for rank in range(4):
            local = lower(c.theory, program, lengths, rank, CPU)
            assert local.backward is not None
            nodes = [*local.forward.graph.nodes, *local.backward.graph.nodes]
            sequences.append([(n.target, n.args[1], *n.args[3:]) for n in nodes if n.target in starts])
        assert all(s == sequences[0] for s in sequences)


def test_dead_steps_are_dropped() -> None:
    c = case("mlp")
    program = build(c.theory, lambda _, rows: rows[0])
    loss_only = Program(program.steps, program.loss, (), (), ())
    local = lower(c.theory, loss_only, uneven(c.theory, 1), 0, CPU)
    assert local.backward is None
    names = {n.name for n in local.forward.graph.nodes}
    backward = {i.name for i in c.theory.graph.instructions if i.phase == "backward" and not i.is_source}
    assert not names & backward


def test_a_slice_is_saved_instead_of_the_whole() -> None:
    """Backward reads only shards of the activations: no whole one may cross."""
    c = case("mlp")
    graph = c.theory.graph
    backward_rows = data_parallel(c.theory, graph.inputs[0].tensor)
    steps = {s.instruction: s for s in backward_rows.steps if isinstance(s, Compute)}

    def choose(instruction: Instruction, rows: list[Triple]) -> Triple:
        return rows[0] if instruction.phase == "forward" else steps[instruction.id].row

    program = build(c.theory, choose)
    lengths = Lengths(2, tuple((a.units - 1, 1) if a.units > 1 else (1, 0) for a in c.theory.axes.axes))
    local = lower(c.theory, program, lengths, 1, CPU)
    (output,) = (n for n in local.forward.graph.nodes if n.op == "output")
    saved = [n.name for n in output.args[0][3]]
    assert any(n.endswith("_saved") for n in saved), saved
    assert "relu" not in saved
    compare(c, program, lengths)


def test_parameters_are_saved_as_they_are() -> None:
    c = case("mlp")
    local = lower(
        c.theory, data_parallel(c.theory, c.theory.graph.inputs[0].tensor), uneven(c.theory, 2), 0, CPU
    )
    (output,) = (n for n in local.forward.graph.nodes if n.op == "output")
    placeholders = {n for n in local.forward.graph.nodes if n.op == "placeholder"}
    assert any(n in placeholders and "weight" in n.name for n in output.args[0][3])


def test_views_become_reshapes() -> None:
    c = case("attention")
    local = lower(c.theory, random_program(c.theory, 0), uneven(c.theory, 2), 0, CPU)
    targets = {str(n.target) for n in local.forward.graph.nodes}
    assert not targets & {"aten.view.default", "aten._unsafe_view.default"}
    assert "aten.reshape.default" in targets


def test_constants_are_computed_once_and_cut() -> None:
    c = case("attention")
    (constant,) = c.theory.graph.constants
    name = c.theory.graph.tensors[constant.tensor].name
    whole = ((torch.arange(5) - 2).double() * 0.1)[:, None]

    axis = c.theory.axes.axis(constant.tensor, 0)
    assert axis is not None

    def shards(instruction: Instruction, rows: list[Triple]) -> Triple:
        axes = c.theory.row_axes[instruction.id]
        return rows[axes.index(axis.id)] if constant.tensor in instruction.inputs else rows[0]

    program = build(c.theory, shards)
    for units in ((3, 2), (5, 0)):
        lengths = Lengths(2, tuple((a.units, 0) if a != axis else units for a in c.theory.axes.axes))
        seen = []
        for rank in range(2):
            attributes = dict(lower(c.theory, program, lengths, rank, CPU).forward.named_buffers())
            assert list(attributes) == [f"constant_{name}_shard0"], "the whole constant is not kept"
            seen.append(attributes[f"constant_{name}_shard0"])
        assert [len(s) for s in seen] == list(units)
        assert torch.equal(torch.cat(seen), whole.reshape(5, *seen[0].shape[1:]))


def test_text_of_a_local_program() -> None:
    c = case("mlp")
    text = str(
        lower(c.theory, data_parallel(c.theory, c.theory.graph.inputs[0].tensor), uneven(c.theory, 2), 0, CPU)
    )
    assert text.startswith("# rank 0 of 2, forward\n")
    assert "# rank 0 of 2, backward" in text
    assert "parameter_a_weight" in text
    assert "batch_x" in text
    assert "all_reduce" in text


def test_schedule_covers_exactly_what_is_needed() -> None:
    c = case("mlp")
    graph = c.theory.graph
    for seed in range(5):
        program = random_program(c.theory, seed)
        found = order_of(c.theory, program)
        assert not set(found.forward) & set(found.backward)
        have: set[tuple[int, int]] = set()
        for step in (*found.forward, *found.backward):
            for tensor, form in reads(graph, step):
                assert (tensor, form) in have or (tensor, REPLICATE) in have
            have.update(writes(graph, step))
        for result in (program.loss, *program.gradients):
            assert isinstance(result, Result)
            assert (result.tensor, result.form) in have or (result.tensor, REPLICATE) in have


def test_a_program_that_reads_what_is_not_there_is_refused() -> None:
    c = case("mlp")
    program = random_program(c.theory, 3)
    index = next(i for i, s in enumerate(program.steps) if isinstance(s, Communicate))
    steps = program.steps[:index] + program.steps[index + 1 :]
    broken = Program(steps, program.loss, program.outputs, program.gradients, program.buffers)
    with pytest.raises(PlanError, match="before it is produced"):
        lower(c.theory, broken, uneven(c.theory, 2), 0, CPU)


def test_a_row_of_other_rules_is_refused() -> None:
    c = case("mlp")
    program = data_parallel(c.theory, c.theory.graph.inputs[0].tensor)
    steps = []
    for step in program.steps:
        if isinstance(step, Compute) and step.row.factor is not None:
            row = type(step.row)("bogus", step.row.pre, step.row.post, step.row.factor)
            step = Compute(step.instruction, row)
        steps.append(step)
    broken = Program(tuple(steps), program.loss, program.outputs, program.gradients, program.buffers)
    with pytest.raises(PlanError, match="other rules"):
        lower(c.theory, broken, uneven(c.theory, 2), 0, CPU)


def test_taking_a_saved_value_forgets_it() -> None:
    saved: list[torch.Tensor | None] = [torch.ones(1)]
    assert take_saved(saved, 0).item() == 1
    assert saved == [None]


def test_layouts_tile_every_parameter() -> None:
    c = case("attention")
    program = cheap_random_program(c.theory, 4)
    lengths = uneven(c.theory, 3, 4)
    locals_ = [lower(c.theory, program, lengths, rank, CPU) for rank in range(3)]
    for index, parameter in enumerate(c.theory.graph.parameters):
        layouts = [local.parameters[index] for local in locals_]
        whole = dict(c.model.named_parameters())[parameter.name].detach()
        if is_sharded(layouts[0].form):
            parts = [layout.slice(whole) for layout in layouts]
            assert torch.equal(torch.cat(parts, layouts[0].form - shard(0)), whole)
