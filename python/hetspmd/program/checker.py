"""The independent checker: proves a program from the Hoare triples alone.

It knows the background theory and nothing of search, cost or lowering. It walks the program, keeps for each
reference tensor e the set of forms I with ``e | I`` proved so far, and demands of

- a computation, that its triple is in the theory and its precondition is proved;
- a communication, that it is one of HAP Fig. 9 (in any implementation), or gives a copy at a cut
  its own segment's lengths, and its source is proved;
- the end, ``loss | replicated`` (which implies ``loss | partial``), every ``gradient | stored form
  of its parameter``, every ``updated buffer or parameter | replicated`` and every output in the form that is
  claimed.

``e | replicated`` proves every other form of e: a device may slice or mask what it holds whole.
"""

from __future__ import annotations

from hetspmd.errors import ProofError
from hetspmd.program.program import Communicate, Compute, Program, Result
from hetspmd.rules.theory import Theory

_WHOLE, _SUMMANDS, _COPIED = 0, 1, 16


def check(theory: Theory, program: Program) -> int:
    """Prove ``program``; the number of properties proved. Raises ProofError where the proof breaks."""
    proof = _Proof(theory)
    for position, step in enumerate(program.steps):
        if isinstance(step, Compute):
            proof.compute(position, step)
        else:
            proof.communicate(position, step)
    proof.conclude(program)
    return sum(map(len, proof.proved.values()))


class _Proof:
    def __init__(self, theory: Theory) -> None:
        self.theory = theory
        self.graph = theory.graph
        self.proved: dict[int, set[int]] = {}
        self.computed_forms: dict[int, int] = {}

    def name(self, tensor: int) -> str:
        return self.graph.tensors[tensor].name

    def holds(self, tensor: int, form: int) -> bool:
        forms = self.proved.get(tensor, set())
        return form in forms or _WHOLE in forms

    def compute(self, position: int, step: Compute) -> None:
        if not 0 <= step.instruction < len(self.graph.instructions):
            raise ProofError(f"step {position}: there is no instruction {step.instruction}")
        instruction = self.graph.instructions[step.instruction]
        where = f"step {position} ({instruction.name})"
        if not any(step.row == row for row in self.theory.rows[step.instruction]):
            raise ProofError(f"{where}: the triple {step.row} is not in the theory")
        for tensor, form in zip(instruction.inputs, step.row.pre, strict=True):
            if not self.holds(tensor, form):
                raise ProofError(f"{where}: needs {self.name(tensor)} | {_text(form)}, which is not proved")
        for tensor, form in zip(instruction.outputs, step.row.post, strict=True):
            if tensor >= 0:
                if tensor in self.computed_forms:
                    raise ProofError(f"{where}: {self.name(tensor)} is computed twice")
                self.computed_forms[tensor] = form
                self.proved.setdefault(tensor, set()).add(form)

    def communicate(self, position: int, step: Communicate) -> None:
        if not 0 <= step.tensor < len(self.graph.tensors):
            raise ProofError(f"step {position}: there is no tensor {step.tensor}")
        where = f"step {position} ({step.kind} of {self.name(step.tensor)})"
        if step.source not in self.proved.get(step.tensor, set()):
            raise ProofError(f"{where}: {_text(step.source)} is not proved before it")
        sharded_source, sharded_target = 2 <= step.source < _COPIED, 2 <= step.target < _COPIED
        right = {
            "all_reduce": step.source == _SUMMANDS and step.target == _WHOLE,
            "reduce_scatter": step.source == _SUMMANDS and sharded_target,
            "grouped_reduce": step.source == _SUMMANDS and sharded_target,
            "ring_reduce": step.source == _SUMMANDS and sharded_target,
            "exchange_reduce": step.source == _SUMMANDS and sharded_target,
            "all_gather": sharded_source and step.target == _WHOLE,
            "grouped_broadcast": sharded_source and step.target == _WHOLE,
            "ring_gather": sharded_source and step.target == _WHOLE,
            "all_to_all": sharded_source and sharded_target and step.source != step.target,
            "rebalance": step.source >= _COPIED and step.target == step.source - _COPIED + 2,
        }
        if not right.get(step.kind, False):
            raise ProofError(f"{where}: it cannot turn {_text(step.source)} into {_text(step.target)}")
        for form in (step.source, step.target):
            if form >= 2 and self.theory.axes.sharded(step.tensor, form) is None:
                raise ProofError(f"{where}: {_text(form)} lies on no logical axis, so it has no lengths")
        self.proved[step.tensor].add(step.target)

    def conclude(self, program: Program) -> None:
        graph = self.graph
        if graph.loss is not None and (program.loss is None or program.loss != Result(graph.loss, _WHOLE)):
            raise ProofError("the program does not claim loss | replicated")
        trainable = [p for p in graph.parameters if p.gradient is not None]
        outputs = [o.tensor for o in graph.outputs if o.tensor is not None]
        if [r.tensor for r in program.gradients] != [p.gradient for p in trainable]:
            raise ProofError("the program does not leave one gradient for each parameter that has one")
        if [r.tensor for r in program.buffers] != list(graph.updates):
            raise ProofError("the program does not leave every updated buffer and parameter")
        if [r.tensor for r in program.outputs] != outputs:
            raise ProofError("the program does not leave every output")
        for parameter in graph.parameters:
            if parameter.tensor not in self.computed_forms:
                raise ProofError(f"parameter {parameter.name} is stored nowhere")
        for parameter, result in zip(trainable, program.gradients, strict=True):
            if result.form != self.computed_forms[parameter.tensor]:
                raise ProofError(
                    f"the gradient of {parameter.name} is left as {_text(result.form)}, "
                    f"the parameter is stored as {_text(self.computed_forms[parameter.tensor])}"
                )
        holders = [h for h in graph.holders if h.updated is not None]
        buffers = {b.tensor for b in graph.buffers}
        for holder, result in zip(holders, program.buffers, strict=True):
            wanted = self.computed_forms.get(holder.tensor) if holder.tensor in buffers else _WHOLE
            if result.form != wanted:
                raise ProofError(f"the new {holder.name} is left as {_text(result.form)}, not whole")
        for result in (
            *([program.loss] if program.loss else []),
            *program.outputs,
            *program.gradients,
            *program.buffers,
        ):
            own = 2 <= result.form < _COPIED
            cut = own and self.theory.axes.axis(result.tensor, result.form - 2) is not None
            possible = cut or result.form == _WHOLE
            if not possible or not self.holds(result.tensor, result.form):
                raise ProofError(
                    f"at the end {self.name(result.tensor)} | {_text(result.form)} is not proved"
                )


def _text(form: int) -> str:
    if form < 2:
        return ("replicated", "partial")[form]
    return f"shard({form - 2})" if form < _COPIED else f"shard({form - _COPIED})'"
