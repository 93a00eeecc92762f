"""What the tests of whole programs share: clusters, traced models, forced constraints, one simulated step."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

import hetspmd.rules.ops  # noqa: F401  # registers the rules
import zoo
from hetspmd.cluster.cluster import Cluster
from hetspmd.dist.communicator import Communicator
from hetspmd.dist.random import Randomness
from hetspmd.dist.runtime import Runtime
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import MissingRuleWarning
from hetspmd.placement import PARTIAL, Placement, is_sharded
from hetspmd.program.lengths import Lengths
from hetspmd.program.program import Communicate, Compute, Program
from hetspmd.program.schedule import Schedule
from hetspmd.rules.rule import Triple
from hetspmd.rules.theory import Theory, derive
from hetspmd.search import constraints as known
from hetspmd.search.constraints import Constraints
from hetspmd.trace.trace import split_example, trace
from hetspmd.verify.comparison import largest_error
from hetspmd.verify.reference import ReferenceResult, run_reference
from scheduled import lower

CPU = torch.device("cpu")


def cluster(*speeds: float, fast: bool = True) -> Cluster:
    """Devices of the given relative speeds. ``fast``: so slow beside their network that small models are
    worth dividing; otherwise a network that makes nearly every collective too dear."""
    devices = [
        {"name": f"d{i}", "flops": s * 1e6, "memory_bandwidth": 1e9 * s, "launch": 1e-9}
        for i, s in enumerate(speeds)
    ]
    bandwidth, latency = (1e12, 1e-9) if fast else (1e9, 1e-5)
    return Cluster.load({"devices": devices, "network": {"bandwidth": bandwidth, "latency": latency}})


@dataclass(frozen=True)
class Traced:
    """A model of the zoo (or of examples/) in float64 with its batch and the theory of its training step."""

    name: str
    model: nn.Module
    example: Any
    loss: Callable[..., Any] | None
    theory: Theory


@cache
def traced(name: str) -> Traced:
    """An entry of the zoo, or ``bert-moe``. Ops without a rule and what torch says of a model's own settings are
    no fault here: such models run, with less divided."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MissingRuleWarning)
        warnings.filterwarnings("ignore", message="enable_nested_tensor")
        return _traced(name)


def _traced(name: str) -> Traced:
    if name == "bert-moe":
        model, example = example_module("bert_moe").small()
        model, loss = model.double(), None
    else:
        model, example, loss = zoo.build(name, torch.float64)
    args, kwargs = split_example(example)
    return Traced(name, model, example, loss, derive(trace(model, args, kwargs, loss=loss)))


@cache
def example_module(name: str) -> ModuleType:
    """A file of examples/ as a module."""
    path = Path(__file__).parent.parent / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"example_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# forced programs ---------------------------------------------------------------------------------------------


def copies(theory: Theory, tensors: Iterable[int]) -> set[int]:
    """The tensors and all views of them."""
    found = set(tensors)
    for instruction in theory.graph.instructions:
        rule = theory.rules.get(instruction.id)
        if rule is not None and rule.alias and instruction.inputs and instruction.inputs[0] in found:
            found.update(t for t in instruction.outputs if t >= 0)
    return found


def used_where_it_lies(theory: Theory, forms: dict[int, Placement]) -> Constraints:
    """Parameters stored as ``forms`` say and read so by every op, views of them read in shards; nothing is
    divided along the batch."""
    held = copies(theory, forms)
    again = theory.graph.second_reads
    stored = {
        theory.graph.instructions[i].outputs[0]: forms[t] for i, t in again.items() if t in forms
    } | forms
    batch = theory.batch_axes

    def allowed(instruction: int, row: Triple, axis: int | None) -> bool:
        inputs = theory.graph.instructions[instruction].inputs
        for t, form in zip(inputs, row.pre, strict=True):
            if t in held and form != stored.get(t, form if is_sharded(form) else None):
                return False
        return axis not in batch

    return Constraints(forms, allowed)


CONTRACTIONS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.convolution_backward.")


def weight_contractions(theory: Theory) -> dict[int, int]:
    """Parameter tensor to the contraction over the batch that makes its gradient (behind views of it)."""
    graph = theory.graph
    batch = theory.batch_axes
    found: dict[int, int] = {}
    for parameter in graph.parameters:
        tensor = parameter.gradient
        while tensor is not None:
            producer = graph.producer(tensor)
            if producer.op.startswith(CONTRACTIONS):
                if any(axis in batch for axis in theory.row_axes[producer.id]):
                    found[parameter.tensor] = producer.id
                break
            rule = theory.rules.get(producer.id)
            tensor = producer.inputs[0] if rule is not None and rule.alias else None
    return found


def sufficient_factors(theory: Theory) -> Constraints:
    """Data parallelism in which the weight gradients are computed whole on every device (HAP 2.5.2)."""
    data_parallel = known.data_parallel(theory)
    whole = set(weight_contractions(theory).values())
    assert data_parallel.row_filter is not None
    divided = data_parallel.row_filter

    def allowed(instruction: int, row: Triple, axis: int | None) -> bool:
        return row.name == "always" if instruction in whole else divided(instruction, row, axis)

    return Constraints(data_parallel.forms, allowed)


def collectives_of(program: Program, tensors: Iterable[int]) -> list[Communicate]:
    """The collectives of some tensors."""
    wanted = set(tensors)
    return [s for s in program.steps if isinstance(s, Communicate) and s.tensor in wanted]


def row_of(program: Program, instruction: int) -> Triple:
    """The triple that a program uses for an instruction."""
    return next(s.row for s in program.steps if isinstance(s, Compute) and s.instruction == instruction)


# one simulated step ------------------------------------------------------------------------------------------


def randomness(rank: int = 0) -> Randomness:
    """Reference mode: every rank draws what one device draws."""
    found = Randomness(5, rank, CPU, reference=True)
    found.begin_step()
    return found


def single_device(theory: Theory, model: nn.Module, inputs: Sequence[torch.Tensor]) -> ReferenceResult:
    """The reference graph, run whole."""
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    return run_reference(theory, parameters, buffers, inputs, randomness=randomness())


def simulated_error(
    theory: Theory, program: Program, lengths: Lengths, model: nn.Module, inputs: Sequence[torch.Tensor],
    want: ReferenceResult, *, bucket_bytes: int = 0, schedule: Schedule | None = None,
) -> float:  # fmt: skip
    """The largest relative error of loss, outputs, gradients and updated buffers over all ranks of one step.

    Infinite where a result has another shape than its claimed form.
    """
    graph = theory.graph
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())

    def body(communicator: Communicator) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        rank = communicator.rank
        local = lower(theory, program, lengths, rank, CPU, bucket_bytes=bucket_bytes, schedule=schedule)
        runtime = Runtime(communicator, randomness(communicator.rank))
        with torch.no_grad():
            shards = [
                layout.slice(parameters[p.name].detach())
                for layout, p in zip(local.parameters, graph.parameters, strict=True)
            ]
            whole = [buffers[b.name] for b in graph.buffers]
            loss, outputs, updated, saved = local.forward(runtime, *shards, *whole, *inputs)
            assert local.backward is not None
            gradients = local.backward(runtime, torch.ones((), dtype=loss.dtype), saved)
        got = {"loss": loss}
        expected = {"loss": want.loss}
        for index, (layout, value) in enumerate(zip(local.outputs, outputs, strict=True)):
            assert layout.form != PARTIAL
            got[f"output {index}"] = value
            expected[f"output {index}"] = layout.slice(want.outputs[layout.tensor])
        for index, value in zip(local.updated, updated, strict=True):
            name = graph.buffers[index].name
            got[name], expected[name] = value, want.buffers[name]
        for index, value in zip(local.differentiable, gradients, strict=True):
            name = graph.parameters[index].name
            got[name] = value
            expected[name] = local.parameters[index].slice(want.gradients[name])
        return got, expected

    worst = 0.0
    for got, expected in run_ranks(lengths.world, body):
        peak = {"peak": max(t.abs().max() for t in want.gradients.values())}  # the scale of the step's noise
        worst = max(worst, largest_error({**got, **peak}, {**expected, **peak}, 1e-9)[0])
    return worst
