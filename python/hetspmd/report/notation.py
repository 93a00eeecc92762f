"""A program in the notation of HAP Fig. 8, each step with its Hoare triple and what it is in the model.

::

    e1 = Parameter-Shard(0)  {} -> {e1 | shard(0)}                           fc.weight: float32[8, 6]
    All-Gather(e1, 0)        {e1 | shard(0)} -> {e1 | replicated}              192 B, 51 us
    e3 = mm(e2, e1)          {e2 | shard(0), e1 | replicated} -> {e3 | ...}    float32[4, 6]  fc

``e7`` is the reference tensor with id 7 of the plan's graph; it keeps its name in every form, and the
properties say which form a step reads and makes.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetspmd.cluster.collective_kinds import KINDS
from hetspmd.codec.quantities import quantity_text
from hetspmd.placement import Placement, placement_text
from hetspmd.plan.plan import Plan
from hetspmd.plan.plan_facts import collectives
from hetspmd.program.program import Communicate, Compute, Step, communication_text
from hetspmd.trace.graph import Graph, Instruction, value_text

_CALL, _TRIPLE = 44, 76


def program_text(plan: Plan) -> str:
    """The whole program, one step per line, in execution order."""
    costs = {c.position: c for c in collectives(plan)}
    lines = []
    for position, step in enumerate(plan.program.steps):
        call, triple = step_text(plan.graph, step)
        if isinstance(step, Compute):
            note = _source(plan.graph, plan.graph.instructions[step.instruction])
        else:
            cost = costs[position]
            seconds = quantity_text(cost.seconds, "seconds")
            note = f"{quantity_text(cost.nbytes, 'bytes')}, {seconds}, {cost.role}"
            if KINDS[step.kind].keeps_dim and cost.seconds == 0:
                note = "nothing is sent: the lengths agree"
        lines.append(f"{call:<{_CALL}}  {triple:<{_TRIPLE}}  # {note}".rstrip())
    return "\n".join(lines)


def tensor_text(tensor: int) -> str:
    """``e7``."""
    return f"e{tensor}"


def step_text(graph: Graph, step: Step) -> tuple[str, str]:
    """The call and the Hoare triple of a step."""
    if isinstance(step, Communicate):
        before = _properties([step.tensor], [step.source])
        after = _properties([step.tensor], [step.target])
        return communication_text(step, tensor_text(step.tensor)), f"{before} -> {after}"
    instruction = graph.instructions[step.instruction]
    outputs = ", ".join(tensor_text(t) if t >= 0 else "_" for t in instruction.outputs)
    before = _properties(instruction.inputs, step.row.pre)
    triple = f"{before} -> {_properties(instruction.outputs, step.row.post)}"
    if instruction.is_source:
        return f"{outputs} = {step.row.name}", triple
    arguments = [value_text(a, tensor_text) for a in instruction.args]
    arguments += [f"{k}={value_text(v, tensor_text)}" for k, v in instruction.kwargs]
    return f"{outputs} = {op_text(instruction.op)}({', '.join(arguments)})", triple


def op_text(op: str) -> str:
    """``aten.mm.default`` as ``mm``, ``aten.add.Tensor`` as ``add.Tensor``."""
    return op.removeprefix("aten.").removesuffix(".default")


def _properties(tensors: Sequence[int], forms: Sequence[Placement]) -> str:
    texts = dict.fromkeys(
        f"{tensor_text(t)} | {placement_text(f)}" for t, f in zip(tensors, forms, strict=True) if t >= 0
    )
    return "{" + ", ".join(texts) + "}"


def _source(graph: Graph, instruction: Instruction) -> str:
    first = graph.tensors[next((t for t in instruction.outputs if t >= 0), 0)]
    if instruction.is_source:
        return str(first)
    kind = f"{first.dtype}[{', '.join(map(str, first.shape))}]"
    return f"{kind}  {instruction.source}"
