"""Where a program and one device part: the first instruction or collective whose value differs.

The ranks run copies of their local graphs that keep every value; together they make the tensors of the
reference graph again (slices, or summands that are added up), which are compared with those of its interpreter
in the graph's order. So all that comes before the one that is named is right. A tensor may differ by the
tolerance, or by ``located_changes`` times what it changes by where every parameter starts one rounding away. The
graph itself is compared with eager PyTorch: where that differs it is the trace, not the program. Flat plans and
plans across machines are looked at alike; values that a fused call does not give are not seen, their readers
are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from hetspmd.cluster.machines import ranks_of
from hetspmd.dist.communicator import Communicator
from hetspmd.dist.random import Randomness
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.lower import lower_plan
from hetspmd.lower.emit import VALUE
from hetspmd.lower.instrument import instrumented
from hetspmd.placement import PARTIAL, REPLICATE, placement_text
from hetspmd.program.layout import Region
from hetspmd.program.level_layout import LevelLayout, RankPlace
from hetspmd.run.autograd import Runner
from hetspmd.run.guard import expected, match
from hetspmd.run.source_location import source_line
from hetspmd.run.starting import runtime_of
from hetspmd.trace.graph import Instruction, instruction_text
from hetspmd.verify.difference import largest_difference, magnitude
from hetspmd.verify.reference import run_reference
from hetspmd.verify.verify_thresholds import THRESHOLDS

if TYPE_CHECKING:
    from hetspmd.plan.plan import Plan
    from hetspmd.verify.training_steps import TrainingCase

Key = tuple[int, ...]
"""(tensor, form), or (tensor, form on machines, form inside)."""
Values = dict[Key, torch.Tensor]
CPU = torch.device("cpu")


def first_difference(plan: Plan, setting: TrainingCase, rounded: TrainingCase, limit: float) -> str:
    """The first value of the program that differs from the graph's at the model's own parameters, "" if none
    does.

    ``rounded``: the setting with parameters that are one rounding away.
    """
    want, near = _reference(plan, setting), _reference(plan, rounded)
    rank_values = run_ranks(plan.cluster.ranks, lambda communicator: _on_rank(plan, setting, communicator))
    layout = _layout(plan)
    producers = plan.graph.producers
    keys = sorted({key for values in rank_values for key in values}, key=lambda key: (producers[key[0]], key))
    for key in keys:
        reference = want[key[0]]
        moved = largest_difference(near[key[0]], reference)
        allowed = max(limit * magnitude(reference), THRESHOLDS.located_changes * moved)
        for ranks, got, part in layout(key, rank_values, reference):
            error = largest_difference(got, part) if got.shape == part.shape else float("inf")
            if not error <= allowed:
                return _text(plan, setting, key, ranks, error, magnitude(reference))
    return ""


def _reference(plan: Plan, setting: TrainingCase) -> dict[int, torch.Tensor]:
    model = setting.copy()
    inputs, _ = match(expected(plan.graph), setting.args, setting.kwargs)
    assert inputs is not None
    values: dict[int, torch.Tensor] = {}

    def watch(instruction: Instruction, computed: Mapping[int, torch.Tensor]) -> None:
        values.update((t, computed[t].detach().clone()) for t in instruction.outputs if t >= 0)

    run_reference(
        plan.theory,
        dict(model.named_parameters()),
        dict(model.named_buffers()),
        inputs,
        randomness=_randomness(setting, 0),
        watch=watch,
    )
    return values


def _randomness(setting: TrainingCase, rank: int) -> Randomness:
    randomness = Randomness(setting.seed, rank, CPU, reference=True)
    randomness.begin_step()
    return randomness


class _Keep:
    """Keeps what the calls of a graph give."""

    def __init__(self) -> None:
        self.values: Values = {}
        self._keys: list[Key] = []

    def behind(self, copy: fx.Graph, watcher: fx.Node, node: fx.Node, copied: Any) -> None:
        key = node.meta.get(VALUE)
        if key is not None:
            copy.call_method("keep", (watcher, len(self._keys), copied(node)))
            self._keys.append(key)

    def keep(self, index: int, value: torch.Tensor) -> None:
        self.values.setdefault(self._keys[index], value.detach().clone())


def _on_rank(plan: Plan, setting: TrainingCase, communicator: Communicator) -> Values:
    rank, model, keep = communicator.rank, setting.copy(), _Keep()
    program = lower_plan(plan, rank, CPU)
    randomness = Randomness(setting.seed, rank, CPU, reference=True)
    runtime = runtime_of(communicator, plan, randomness)
    program = replace(
        program,
        forward=instrumented(program.forward, keep, "Kept", keep.behind),
        backward=program.backward and instrumented(program.backward, keep, "KeptBack", keep.behind),
    )
    if runtime.idle:
        keep.behind = lambda *_: None  # type: ignore[method-assign]  # it runs nothing
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    shards = zip(plan.graph.parameters, program.parameters, strict=True)
    inputs, _ = match(expected(plan.graph), setting.args, setting.kwargs)
    assert inputs is not None
    runner = Runner(program, runtime, plan.graph.loss)
    randomness.begin_step()
    with torch.no_grad():
        (loss, *_), saved = runner.forward(
            [layout.slice(parameters[p.name].detach()).contiguous() for p, layout in shards],
            [buffers[b.name] for b in plan.graph.buffers],
            inputs,
        )
        if program.backward is not None and loss is not None:
            runner.backward(torch.ones_like(loss), list(saved))
    return {} if runtime.idle else keep.values


Parts = list[tuple[list[int], torch.Tensor, torch.Tensor]]


def _layout(plan: Plan) -> Callable[[Key, list[Values], torch.Tensor], Parts]:
    """``(ranks, what they hold, what the reference has there)`` of a value."""
    cluster = plan.cluster
    accelerators = None if plan.inside is None else [cluster.accelerators[j] for j in plan.active]
    layout = LevelLayout(plan.theory, plan.lengths, accelerators)
    ranks, places = ranks_of(cluster, plan.active), layout.places

    def counts(key: Key, at: RankPlace) -> bool:
        """Of what several accelerators have alike, one counts."""
        alike = (form == REPLICATE and layout.peers(n, at)[0] for n, form in enumerate(key[1:]))
        return not any(alike)

    def parts(key: Key, rank_values: list[Values], reference: torch.Tensor) -> Parts:
        held = [(p, rank) for p, rank in enumerate(ranks) if key in rank_values[rank]]
        if PARTIAL not in key[1:]:
            return [
                ([rank], rank_values[rank][key], _narrowed(reference, layout.regions(key, places[p])))
                for p, rank in held
            ]
        if len(held) < len(ranks):
            return []  # a summand that some ranks know to be zero, and do not write
        total = torch.zeros_like(reference)
        for position, rank in held:
            if counts(key, places[position]):
                _narrowed(total, layout.regions(key, places[position])).add_(rank_values[rank][key])
        return [([rank for _, rank in held], total, reference)]

    return parts


def _narrowed(tensor: torch.Tensor, regions: tuple[Region, ...]) -> torch.Tensor:
    for region in regions:
        tensor = tensor.narrow(region.dim, region.start, region.extent)
    return tensor


def _text(plan: Plan, setting: TrainingCase, key: Key, ranks: list[int], error: float, size: float) -> str:
    graph = plan.graph
    instruction = graph.instructions[graph.producers[key[0]]]
    phase = "backward of " if instruction.phase == "backward" else ""
    where = f"{phase}module {instruction.source or type(setting.model).__name__}"
    line = source_line(setting.model, instruction.source)
    forms = ", ".join(map(placement_text, key[1:]))
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"the sum of ranks {', '.join(map(str, ranks))}"
    return (
        f"{graph.tensors[key[0]].name} | {forms} is the first value that differs, on {who}: by {error:.2e} "
        f"of {size:.2e}\n"
        f"`{instruction_text(graph, instruction)}` of {where}{f' at {line}' if line else ''}"
    )
