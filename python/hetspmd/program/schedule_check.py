"""Whether a program can run by a schedule: the check of what is read from a file.

It shares no code with what makes schedules, and accepts every schedule by which the program runs right, not only
the one that would be made today. It walks the two graphs in their order, keeps the values that are there, and
demands that

- no step of the program stands twice, and the parameters, buffers and inputs stand in the forward;
- several steps in one entry are collectives of one kind and dtype that may share a bucket, together no more bytes
  than a bucket has, and none of them reads what another one gives;
- each value that a step reads is there before it: made in the same graph before, or, in the backward, saved by the
  forward, or a constant; a slice or a mask may be cut from the replicated value;
- at its end the forward has what is saved, the loss, the outputs and the updated buffers, and the backward has the
  gradients;
- nothing is saved that the backward does not read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hetspmd.cluster.collective_kinds import KINDS
from hetspmd.errors import PlanError
from hetspmd.placement import placement_text
from hetspmd.program.program import Communicate, Compute, Program, Result
from hetspmd.program.schedule import Places, Schedule
from hetspmd.trace.graph import CONSTANT, Graph

_WHOLE, _SUMMANDS = 0, 1
_FLOATS = ("float16", "bfloat16", "float32", "float64")

Value = tuple[int, int]


def check_schedule(graph: Graph, program: Program, schedule: Schedule) -> None:
    """Check that a program, which was proved, can run by a schedule. Raises PlanError where it cannot."""
    _Check(graph, program, schedule).run()


def _fail(problem: str) -> PlanError:
    return PlanError(f"the program cannot run by its schedule: {problem}; compile the plan again")


class _Check:
    def __init__(self, graph: Graph, program: Program, schedule: Schedule) -> None:
        self.graph, self.program, self.schedule = graph, program, schedule
        self.constants = {i.outputs[0] for i in graph.instructions if i.op == CONSTANT}
        self.read: set[Value] = set()  # what the backward takes of what is saved

    def run(self) -> None:
        """Both graphs."""
        self._places()
        program, graph = self.program, self.graph
        there = self._walk("forward", self.schedule.forward, set(), {})
        results = [*([program.loss] if program.loss else []), *program.outputs, *program.buffers]
        self._leaves("forward", results, there, {})
        saved = self._saved(there)
        begun = set() if graph.tangent is None else {(graph.tangent, _WHOLE)}
        there = self._walk("backward", self.schedule.backward, begun, saved)
        self._leaves("backward", program.gradients, there, saved)
        for value in saved:
            if value not in self.read:
                raise _fail(f"{self._text(value)} is saved, and the backward does not read it")

    def _places(self) -> None:
        """All places are those of steps, none stands twice, and what is given to the program is in the forward."""
        steps, graph = self.program.steps, self.graph
        seen: set[int] = set()
        for places in (*self.schedule.forward, *self.schedule.backward):
            if not places:
                raise _fail("an entry has no step")
            for place in places:
                if not 0 <= place < len(steps):
                    raise _fail(f"there is no step {place} in a program of {len(steps)}")
                if place in seen:
                    raise _fail(f"step {place} stands twice")
                seen.add(place)
            if len(places) > 1:
                self._bucket(places)
        early = {place for places in self.schedule.forward for place in places}
        for place, step in enumerate(steps):
            is_source = isinstance(step, Compute) and graph.instructions[step.instruction].is_source
            if is_source and graph.tangent not in self._outputs(step) and place not in early:
                names = ", ".join(graph.tensors[t].name for t in self._outputs(step))
                raise _fail(f"{names} is given to the program, and its step {place} is not in the forward")

    def _bucket(self, places: Places) -> None:
        steps, tensors = [self.program.steps[place] for place in places], self.graph.tensors
        members = [s for s in steps if isinstance(s, Communicate)]
        where = f"the bucket of steps {', '.join(map(str, places))}"
        if len(members) < len(steps):
            raise _fail(f"{where} has a computation")
        kinds = {(m.kind, tensors[m.tensor].dtype) for m in members}
        if len(kinds) > 1:
            raise _fail(f"{where} has collectives of several kinds or dtypes")
        ((kind, dtype),) = kinds
        if not KINDS[kind].coalesces or dtype not in _FLOATS:
            raise _fail(f"{where} has collectives that share none: {kind} of {dtype}")
        nbytes = sum(tensors[m.tensor].nbytes for m in members)
        if nbytes > self.schedule.bucket_bytes:
            raise _fail(f"{where} has {nbytes} bytes, more than the {self.schedule.bucket_bytes} of a bucket")

    def _outputs(self, step: object) -> Sequence[int]:
        return self.graph.instructions[step.instruction].outputs if isinstance(step, Compute) else ()

    def _walk(
        self, name: str, entries: Iterable[Places], there: set[Value], saved: dict[Value, str]
    ) -> set[Value]:
        """The values that are there at the end of a graph, which begins with ``there`` and what is ``saved``."""
        for places in entries:
            outputs: list[Value] = []
            for place in places:
                step = self.program.steps[place]
                if isinstance(step, Communicate):
                    self._find(f"step {place}", name, (step.tensor, step.source), there, saved)
                    outputs.append((step.tensor, step.target))
                    continue
                instruction = self.graph.instructions[step.instruction]
                for value in zip(instruction.inputs, step.row.pre, strict=True):
                    self._find(f"step {place} ({instruction.name})", name, value, there, saved)
                outputs += zip(instruction.outputs, step.row.post, strict=True)
            there.update(outputs)
        return there

    def _find(self, reader: str, name: str, value: Value, there: set[Value], saved: dict[Value, str]) -> None:
        tensor, form = value
        whole = (tensor, _WHOLE)
        if value in there or tensor in self.constants:
            return
        if value in saved and not (saved[value] == "mask" and form != _SUMMANDS):
            self.read.add(value)
            return
        if whole in there:
            return
        if whole in saved and (saved[whole] == "value" or (saved[whole] == "mask" and form == _SUMMANDS)):
            self.read.add(whole)
            return
        raise _fail(f"{reader} of the {name} reads {self._text(value)}, which is not there")

    def _leaves(
        self, name: str, results: Iterable[Result], there: set[Value], saved: dict[Value, str]
    ) -> None:
        for result in results:
            self._find("the end", name, (result.tensor, result.form), there, saved)

    def _saved(self, there: set[Value]) -> dict[Value, str]:
        """What the forward saves, and how."""
        saved: dict[Value, str] = {}
        for one in self.schedule.saved:
            value, whole = (one.tensor, one.form), (one.tensor, _WHOLE)
            if not 0 <= one.tensor < len(self.graph.tensors):
                raise _fail(f"it saves tensor {one.tensor}, which there is not")
            if value in saved:
                raise _fail(f"it saves {self._text(value)} twice")
            if one.how == "mask" and one.form != _WHOLE:
                raise _fail(f"it saves {self._text(value)} for masks, which are of replicated values")
            if one.how == "slice" and one.form < 2:
                raise _fail(f"it saves {self._text(value)} as a slice, which it is not")
            if value not in there and not (one.how == "slice" and whole in there):
                raise _fail(f"it saves {self._text(value)}, which the forward does not have")
            saved[value] = one.how
        return saved

    def _text(self, value: Value) -> str:
        return f"{self.graph.tensors[value[0]].name} | {placement_text(value[1])}"
