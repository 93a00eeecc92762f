"""The backward's own reading of parameters: the graph, the programs it allows, and what they hold in between."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import case

from hetspmd.cost.memory import memory_profile
from hetspmd.cost.model import CostModel
from hetspmd.cost.step import StepCost
from hetspmd.dist.runtime import Runtime
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.lower import calls
from hetspmd.placement import REPLICATE, is_sharded, shard
from hetspmd.plan.plan import Plan
from hetspmd.plan.reports import SearchReport
from hetspmd.program.checker import check
from hetspmd.program.lengths import Lengths, lengths_for
from hetspmd.program.program import Program
from hetspmd.program.schedule import make_schedule
from hetspmd.rules.theory import Theory, derive
from hetspmd.search import constraints as known
from hetspmd.search.constraints import Constraints
from hetspmd.search.pricing import Prices
from hetspmd.search.search import Limits, Searcher
from hetspmd.search.space import search_space
from hetspmd.trace.graph import SECOND_READ, Graph, Ref, map_refs, refs
from hetspmd.trace.second_reads import with_second_reads
from hetspmd.trace.trace import trace
from memory_cases import devices, gathered_again, kept_for_backward, second_readings, stack
from scheduled import lower, one_fragment
from workbench import CPU, randomness, simulated_error, single_device, traced

SMALL = ("mlp", "conv", "attention")
SHARES = (0.5, 0.3, 0.2)


@cache
def theory_of(name: str) -> Theory:
    return case(name).theory if name in SMALL else traced(name).theory


# the graph -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*SMALL, "gpt2", "llama", "bert-moe"])
def test_each_parameter_that_both_phases_read_is_read_again_once(name: str) -> None:
    graph = theory_of(name).graph
    again = graph.second_reads
    assert again
    parameters = {p.tensor for p in graph.parameters}
    assert len(set(again.values())) == len(again)
    for i, parameter in again.items():
        instruction = graph.instructions[i]
        assert instruction.op == SECOND_READ
        assert instruction.phase == "backward"
        assert parameter in parameters
        (tensor,) = instruction.outputs
        assert tensor >= min(t for t in second_readings(theory_of(name))), "the new tensors come last"
        e, source = graph.tensors[tensor], graph.tensors[parameter]
        assert (e.shape, e.dtype, e.name) == (source.shape, source.dtype, f"{source.name} again")
        readers = graph.consumers[tensor]
        assert readers[0] == i + 1 or all(j in again for j in range(i + 1, readers[0])), "right before it"
        others = [r for r in graph.consumers[parameter] if r != i]
        assert others
        assert all(graph.instructions[r].phase == "forward" for r in others)
        assert all(graph.instructions[r].phase == "backward" for r in readers)
    for parameter in parameters - set(again.values()):
        phases = {graph.instructions[r].phase for r in graph.consumers.get(parameter, ())}
        assert len(phases) <= 1


def test_ids_and_arguments_stay_consistent() -> None:
    graph = theory_of("attention").graph
    assert [t.id for t in graph.tensors] == list(range(len(graph.tensors)))
    assert [i.id for i in graph.instructions] == list(range(len(graph.instructions)))
    made: set[int] = set()
    for instruction in graph.instructions:
        named = tuple(refs(instruction.args)) + tuple(t for _, a in instruction.kwargs for t in refs(a))
        assert named == instruction.inputs
        assert set(instruction.inputs) <= made
        made.update(instruction.outputs)


def without_second_reads(graph: Graph) -> Graph:
    """The graph as it was: second readings replaced by what they read."""
    tensors = {graph.instructions[i].outputs[0]: t for i, t in graph.second_reads.items()}
    first = min(tensors)

    def back(reference: Ref) -> Ref:
        return Ref(tensors.get(reference.id, reference.id))

    kept = [i for i in graph.instructions if i.id not in graph.second_reads]
    return replace(
        graph,
        tensors=graph.tensors[:first],
        instructions=tuple(
            replace(
                i, id=n, args=tuple(map_refs(a, back) for a in i.args),
                kwargs=tuple((k, map_refs(a, back)) for k, a in i.kwargs),
                inputs=tuple(tensors.get(t, t) for t in i.inputs),
            )
            for n, i in enumerate(kept)
        ),
    )  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_it_adds_readings_and_nothing_else(name: str) -> None:
    graph = theory_of(name).graph
    plain = without_second_reads(graph)
    assert not plain.second_reads
    assert with_second_reads(plain) == graph
    c = case(name)
    inputs = tuple(c.batch[i.path] for i in graph.inputs)
    with_, without = (single_device(derive(g), c.model, inputs) for g in (graph, plain))
    assert torch.equal(with_.loss, without.loss)
    for key, gradient in without.gradients.items():
        assert torch.equal(with_.gradients[key], gradient)


def test_a_forward_alone_reads_once() -> None:
    c = case("attention")
    graph = trace(c.model, (), c.batch, training=False)
    assert not graph.second_reads
    assert with_second_reads(graph) is graph


def test_a_parameter_that_only_the_backward_or_only_the_forward_needs() -> None:
    graph = theory_of("mlp").graph
    again = {graph.tensors[t].name for t in graph.second_reads.values()}
    names = {p.name for p in graph.parameters}
    assert {"b.weight", "scale"} <= again
    assert not {"a.bias", "b.bias", "unused"} & again
    assert "a.weight" in names - again, "the gradient of the batch is not needed"


class Aliases(torch.nn.Module):
    """Views of parameters by the op that second readings use, in the forward; one that only the forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.randn(6, 4, dtype=torch.float64))
        self.b = torch.nn.Parameter(torch.randn(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shifted = x @ torch.ops.aten.alias.default(self.a) + torch.ops.aten.alias.default(self.b)
        return (shifted @ self.a.detach().T).square().mean()


def test_a_model_s_own_views_are_no_second_readings() -> None:
    torch.manual_seed(0)
    model, x = Aliases(), torch.randn(8, 6, dtype=torch.float64)
    theory = derive(trace(model, (x,), {}))
    graph = theory.graph
    assert all(graph.instructions[i].phase == "backward" for i in graph.second_reads)
    assert {graph.tensors[t].name for t in graph.second_reads.values()} <= {"a"}
    lengths = lengths_for(theory.axes, SHARES)
    want = single_device(theory, model, (x,))
    for again in (True, False):
        program = zero_3(theory, lengths, again=again)
        check(theory, program)
        assert simulated_error(theory, program, lengths, model, (x,), want) <= 1e-9


# programs that gather again ------------------------------------------------------------------------------------


def zero_3(theory: Theory, lengths: Lengths, *, again: bool) -> Program:
    """Data parallelism with parameters in shards; gathered once, or once per phase."""
    searcher = Searcher(search_space(theory, Constraints()))
    within = searcher.space.within(known.zero_like(theory))
    model = CostModel(theory, devices(*[1 / lengths.world] * lengths.world))
    dear = {
        i: np.full(len(searcher.space.rows[i]), 1.0 if again else -0.0)
        for i in sorted(theory.graph.second_reads)
    }
    prices = Prices(np.zeros(int(searcher.pricing.keep_start[-1])), dear)
    return searcher.search(model, lengths, Limits(), within=within, prices=prices).program


def gathered(theory: Theory, program: Program) -> set[int]:
    """Parameters that the forward gathers."""
    return {
        s.tensor for s in program.steps
        if hasattr(s, "tensor") and s.tensor in {p.tensor for p in theory.graph.parameters}
    }  # fmt: skip


@pytest.mark.parametrize("name", [*SMALL, "gpt2"])
def test_programs_that_gather_again_equal_the_single_device(name: str) -> None:
    theory = theory_of(name)
    entry: Any = case(name) if name in SMALL else traced(name)
    batch = entry.batch if name in SMALL else entry.example
    inputs = tuple(batch[i.path] for i in theory.graph.inputs)
    want = single_device(theory, entry.model, inputs)
    # The loss of transformers is computed in float32.
    tolerance = 1e-9 if name in SMALL else 1e-5
    for shares in (SHARES, (0.0, 1.0), (0.25,) * 4):
        lengths = lengths_for(theory.axes, shares)
        program = zero_3(theory, lengths, again=True)
        check(theory, program)
        assert gathered_again(theory, program)
        assert not kept_for_backward(theory, program)
        assert simulated_error(theory, program, lengths, entry.model, inputs, want) <= tolerance


STARTS = (calls.start, calls.start_bucket)


def stack_case() -> tuple[Any, Any, Theory, Lengths]:
    model, example = stack(3, 8, 12, torch.float64)
    theory = derive(trace(model, (), example))
    return model, example, theory, lengths_for(theory.axes, SHARES)


def saved_numbers(theory: Theory, program: Program, lengths: Lengths, model: Any, example: Any) -> list[int]:
    """Elements that each rank saves between forward and backward, without the batch."""
    parameters = dict(model.named_parameters())

    def body(communicator: Any) -> int:
        local = lower(theory, program, lengths, communicator.rank, CPU)
        with torch.no_grad():
            shards = [
                layout.slice(parameters[p.name].detach()).clone()
                for layout, p in zip(local.parameters, theory.graph.parameters, strict=True)
            ]
            runtime = Runtime(communicator, randomness(communicator.rank))
            _, _, _, saved = local.forward(runtime, *shards, example["x"])
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
        storages.pop(example["x"].untyped_storage().data_ptr(), None)
        return sum(storages.values()) // 8

    return list(run_ranks(lengths.world, body))


def test_what_is_saved_between_forward_and_backward_are_the_shards() -> None:
    model, example, theory, lengths = stack_case()
    again, once = (zero_3(theory, lengths, again=flag) for flag in (True, False))
    repeated = gathered_again(theory, again)
    assert len(repeated) == 2, "of three layers; the first one's weight is not needed again"
    assert not gathered_again(theory, once)
    for rank in range(3):
        backward = [lower(theory, p, lengths, rank, CPU).backward for p in (again, once)]
        starts = [sum(n.target in STARTS for n in b.graph.nodes) if b is not None else 0 for b in backward]
        assert starts[0] == starts[1] + len(repeated), "the backward gathers"
    with_shards, with_whole = (saved_numbers(theory, p, lengths, model, example) for p in (again, once))
    for rank, (few, many) in enumerate(zip(with_shards, with_whole, strict=True)):
        form = theory.axes.axis(next(iter(repeated)), 0)
        assert form is not None
        held = 8 * lengths.units[form.id][rank] * 8 // form.units
        assert many - few >= len(repeated) * (64 - held) > 0


def test_the_profile_sees_the_same_difference() -> None:
    _, _, theory, lengths = stack_case()
    again, once = (zero_3(theory, lengths, again=flag) for flag in (True, False))
    middle = next(i.id for i in theory.graph.instructions if i.phase == "backward" and not i.is_source)
    few, many = (memory_profile(theory, p, lengths).during(middle) for p in (again, once))
    assert (many - few == len(gathered_again(theory, again)) * 64 * 8).all()


def test_stored_whole_there_is_nothing_to_gather() -> None:
    _, _, theory, lengths = stack_case()
    searcher = Searcher(search_space(theory, known.data_parallel(theory)))
    program = searcher.search(CostModel(theory, devices(*SHARES)), lengths, Limits()).program
    assert not gathered_again(theory, program)
    assert not kept_for_backward(theory, program)
    steps = [s for s in program.steps if getattr(s, "instruction", None) in theory.graph.second_reads]
    assert len(steps) == len(theory.graph.second_reads)
    assert all(s.row.post[0] in (REPLICATE, shard(0), shard(1)) for s in steps)


# real processes ------------------------------------------------------------------------------------------------


def plan_of(theory: Theory, lengths: Lengths, program: Program) -> Plan:
    cost = StepCost(0.0, 0.0, 0.0, 0.0, (0,) * lengths.world, 1, (0.0,) * lengths.world)
    report = SearchReport(0.0, 0.0, 0.0, "handmade", 0)
    shares = (0.75, 0.25)
    schedule = make_schedule(theory, program)
    step = one_fragment(program, schedule, (shares,), lengths)
    return Plan(theory.graph, step, devices(*shares), cost, report, {}, ())


def two_ranks() -> tuple[Any, Any, Plan]:
    model, example = stack(3, 8, 12, torch.float64)
    theory = derive(trace(model, (), example))
    lengths = lengths_for(theory.axes, (0.75, 0.25))
    return model, example, plan_of(theory, lengths, zero_3(theory, lengths, again=True))


def worker(rank: int, folder: str) -> None:
    """Two steps of SGD on one of two processes."""
    import torch.distributed as dist

    from hetspmd.run.module import HAP

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model, example, plan = two_ranks()
    hap = HAP(model, plan.cluster, plan=plan)
    optimizer = torch.optim.SGD(hap.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = hap(**example)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    torch.save({"losses": losses, "state": hap.full_state_dict()}, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_that_gather_again(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    target: Callable[..., None] = worker
    processes = [spawn.Process(target=target, args=(rank, str(tmp_path))) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    model, example, plan = two_ranks()
    assert gathered_again(plan.theory, plan.program)
    assert all(is_sharded(plan.parameter_layout()[p.name][0]) for p in plan.graph.parameters)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(**example)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    for rank in range(2):
        result = torch.load(tmp_path / f"{rank}.pt")
        assert result["losses"] == pytest.approx(losses, rel=1e-12)
        for key, value in model.state_dict().items():
            torch.testing.assert_close(result["state"][key], value, rtol=1e-12, atol=1e-14)
