"""``HAP(..., cuda_graphs="auto")``: what is between two communications of a local graph is captured, and repeated.

A stretch (:mod:`hetspmd.run.stretches`) is here whatever computes on the device alone: ATen ops, what rules
have written, and random numbers that are drawn from a generator. In its first run it warms up, in its second
one it is captured (:mod:`hetspmd.run.capturer`), and from then on it is repeated.

**Where tensors lie** (:mod:`hetspmd.run.capture_memory`). A capture reads and writes at fixed places.
Parameters and buffers are read where they are: a ``Variant`` is what was captured for one set of places. The
batch is copied to places of its own in each step, and so is what collectives deliver. The outputs of a stretch
stay where they are, and nothing else lies there: other stretches, the collectives and the backward read them
there. What a capture needs within itself lies in a pool that the captures of a variant have in common: they are
repeated in the order in which they were made, so that no one works where the outputs of another are still needed.
Steps of other variants may come between a forward and its backward, and have pools of their own.

**Until when.** The next repetition overwrites them. So whatever leaves the step is a copy: the loss, the other
outputs, the gradients. What is saved for the backward is not: a step is ``Held`` until its backward has run, or
cannot run any more, and a forward that comes before that runs uncaptured.

**Turns.** Of a step in micro-batches the stretches of each turn are captured, by which turns that are alike run
one after the other (:mod:`hetspmd.run.captured_turns`).

**Threads.** One at a time runs captured; another one that comes meanwhile runs uncaptured.

Whatever is not as it was captured runs uncaptured, which is always right, and :meth:`Captures.report` says why.
"""

from __future__ import annotations

import operator
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from functools import partial
from threading import Lock
from typing import Any, Final

import torch
from torch import fx, nn

from hetspmd.dist.random import is_drawn_by_generator, may_draw
from hetspmd.dist.runtime import Runtime
from hetspmd.lower import calls
from hetspmd.lower.emit import item, take_saved
from hetspmd.lower.local_program import LocalProgram
from hetspmd.run.capture_memory import CapturedStretch, Held, Place, Variant, ordinary, without_views
from hetspmd.run.captured_turns import Stretch, TurnsCut, constants_of_turns, cut_turns
from hetspmd.run.capturer import Capture, Capturer
from hetspmd.run.capturing import PlanCaptures, Reasons, TurnCaptures
from hetspmd.run.stretches import cut
from hetspmd.run.turn_graphs import calls_of_turns, put_sum, sum_of
from hetspmd.trace.compat.tensors import is_op

WARM_UPS: Final = 1
"""Runs of a stretch before it is captured: in the first one libraries choose and load kernels."""
VARIANTS: Final = 4
"""Sets of places that are kept: a module and its copy may take turns, and exchange their weights."""
MOST_VARIANTS: Final = 8
"""Sets of places of one plan, after which no other one is captured: each costs what many steps gain."""
STEPS_IN_PLACE: Final = 4
"""What had more steps than these in one place is kept when too many places were seen."""

PENDING: Final = (
    "a forward ran before the backward of the one before it, whose results are still held. Call backward() before "
    "the next forward, without retain_graph, or evaluate under torch.no_grad()"
)
REFERENCE: Final = "random numbers are drawn for a comparison with one device"
MOVING: Final = (
    "parameters or buffers were found at a new place again and again; change them in place (p.copy_(...), not "
    "p.data = ...), and make a copy of the module once, to copy weights into it"
)
THREADS: Final = "another thread runs the module by its captures"
ANOMALY: Final = "torch is asked to detect anomalies"
RECORDED: Final = "it is recorded"
ELSEWHERE: Final = "a tensor lay elsewhere, or had another shape, than when the calls were captured"
HOST: Final = "a tensor lies on another device"
_COMPUTE: Final = ("hetspmd.rules.", "hetspmd.trace.gpu_attention", "hetspmd.trace.gpu_dropout")
"""Modules whose functions compute on the device alone."""


class _Region(Stretch):
    """A stretch: its calls, which are captured when it runs for the second time."""

    def __init__(self, captures: Captures, number: int, body: fx.GraphModule) -> None:
        super().__init__()
        self._captures = weakref.ref(captures)  # a circle would hold the memory of a GPU until it is found
        self.number, self.body = number, body
        self.draws = any(node.target is calls.draw for node in body.graph.nodes)
        self.runs, self.reason = 0, ""
        self.missed = 0
        """Runs as it is, since a value was not as it was captured."""

    def forward(self, *values: Any) -> Any:
        captures = self._captures()
        assert captures is not None, "it runs"
        return captures.run(self, values)


class _Kept(nn.Module):
    """What the first turn of a step leaves for the others lies behind it in one place."""

    def __init__(self, captures: Captures, number: int) -> None:
        super().__init__()
        self._captures, self._number = weakref.ref(captures), number

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        captures = self._captures()
        assert captures is not None, "it runs"
        return captures.step().keep(self._number, value)


class Captures:
    """The local graphs of a plan as they run captured."""

    def __init__(
        self, program: LocalProgram, runtime: Runtime, capturer: Capturer, reasons: Reasons, busy: Lock
    ) -> None:
        self._runtime, self._capturer, self._reasons, self._busy = runtime, capturer, reasons, busy
        self._randomness = runtime.randomness
        self._regions: list[_Region] = []
        self._kept = 0
        self._variants: dict[Any, Variant] = {}
        self._made = 0
        self._running: weakref.ref[Held] | None = None
        self.steps = Counter[str]()
        """Forwards, by why they did not run captured ("": they did)."""
        self._turns: TurnsCut | None = None
        if calls_of_turns(program.forward):
            graphs = constants_of_turns(program.forward)
            self._turns = cut_turns(program.forward, is_captured, self._region, self._keep)
            self._graphs = {program.forward: self._turns.forward}
        else:
            graphs = [graph for graph in (program.forward, program.backward) if graph is not None]
            self._graphs = {
                graph: cut(graph, f"Captured{type(graph).__name__}", is_captured, self._region)
                for graph in graphs
            }
        self._constants = [constant for graph in graphs for constant in _constants(graph)]

    def _region(self, body: fx.GraphModule) -> nn.Module:
        self._regions.append(_Region(self, len(self._regions), body))
        return self._regions[-1]

    def _keep(self) -> nn.Module:
        self._kept += 1
        return _Kept(self, self._kept)

    def begin(
        self, graph: fx.GraphModule, parameters: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]
    ) -> Held | None:
        """A step whose forward is ``graph``, which :meth:`leave` follows; None where it has to run uncaptured."""
        if graph not in self._graphs:
            self.without(RECORDED)
            return None
        if not self._busy.acquire(blocking=False):
            self._reasons.tell(THREADS)
            self.without(THREADS)
            return None
        variant = None
        try:
            variant, why = self._variant(parameters, buffers)
        finally:
            if variant is None:
                self._busy.release()
        self.steps[why] += 1
        if variant is None:
            return None
        held = Held(variant)
        variant.held = weakref.ref(held)
        return held

    def without(self, why: str) -> None:
        """A step runs uncaptured."""
        self.steps[why] += 1

    def enter(self) -> bool:
        """Whether a backward may run captured, which :meth:`leave` then follows."""
        entered = self._busy.acquire(blocking=False)
        if not entered:
            self._reasons.tell(THREADS)
        return entered

    def leave(self) -> None:
        """What ran captured has been copied; another thread may."""
        self._running = None
        self._busy.release()

    def graph(self, graph: fx.GraphModule, held: Held | None) -> fx.GraphModule:
        """What runs for a local graph of a step."""
        if held is not None and self._runtime.randomness is not self._randomness:
            held = None  # they were exchanged between forward and backward
        if held is None:
            return graph
        self._running = weakref.ref(held)
        return self._graphs.get(graph, graph)

    def _variant(
        self, parameters: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]
    ) -> tuple[Variant | None, str]:
        """What is captured for where parameters and buffers are now; or None, and why."""
        if self._runtime.randomness.reference:
            return None, REFERENCE
        if self._runtime.randomness is not self._randomness:
            self._randomness = self._runtime.randomness
            self._drop()
        tensors = [*parameters, *buffers]
        places = _places(tensors)
        variant = self._variants.pop(places, None)
        if variant is None:
            if self._made == MOST_VARIANTS:
                self._variants = {at: one for at, one in self._variants.items() if one.steps > STEPS_IN_PLACE}
                self._reasons.tell(MOVING)
                return None, MOVING
            self._made += 1
            variant = Variant([*tensors, *self._constants], self._capturer.pool())
        self._variants[places] = variant
        variant.steps += 1
        while len(self._variants) > VARIANTS:
            del self._variants[next(iter(self._variants))]
        if variant.is_held():
            self._reasons.tell(PENDING)
            return None, PENDING
        return variant, ""

    def _drop(self) -> None:
        """Forget captures that draw from the generators of before."""
        if any(region.draws for region in self._regions):
            self._variants.clear()

    def step(self) -> Held:
        """The step that runs."""
        held = None if self._running is None else self._running()
        assert held is not None, "a graph in stretches runs in a step that is held"
        return held

    def run(self, region: _Region, values: Sequence[Any]) -> Any:
        """The outputs of a stretch of the step that runs."""
        held = self.step()
        captured = held.variant.captured.get(region.number)
        if captured is not None:
            outputs = captured.run(values)
            if outputs is None:
                region.missed += 1
                self._reasons.tell(ELSEWHERE)
                return region.body(*values)
            return outputs
        if region.reason:
            return region.body(*values)
        if region.runs < WARM_UPS or held.warms:
            region.runs += 1
            held.warms = True  # what it returns lies anywhere: what reads it is captured in another step
            return self._capturer.warm_up(partial(region.body, *values))
        try:
            with self._computing():
                captured = self._capture(region, held.variant, values)
        except RuntimeError as error:
            region.reason = f"{_named(region.body)}: {str(error).strip().splitlines()[0]}"
            self._reasons.tell(f"some calls cannot be captured: {region.reason}")
            return region.body(*values)
        held.variant.captured[region.number] = captured
        return captured.run(values)

    def _capture(self, region: _Region, variant: Variant, values: Sequence[Any]) -> CapturedStretch:
        """A stretch that is captured now. Raises RuntimeError if it cannot be."""
        given = list(values)
        read: list[Place] = []
        copied: list[tuple[int, torch.Tensor]] = []
        others: list[tuple[int, Any]] = []
        for index, value in enumerate(values):
            if not isinstance(value, torch.Tensor):
                others.append((index, value))
            elif value.device.type != self._capturer.device_type:
                raise RuntimeError(f"{HOST}, {value.device}")
            elif not value.numel() or (index not in region.moves and variant.is_read_there(value)):
                read.append(Place.of(index, value, stays=variant.owns(value)))
            else:
                with ordinary():
                    given[index] = torch.empty_like(value, requires_grad=False).copy_(value)
                copied.append((index, given[index]))
        drawn = self._randomness.generators if region.draws else ()
        with ordinary():
            capture = self._capturer.capture(partial(region.body, *given), drawn, variant.pool)
            capture = Capture(without_views(capture.outputs), capture.replay)
        for output in (*capture.outputs, *(to for _, to in copied)):
            variant.own(output if isinstance(output, (tuple, list)) else [output])
        return CapturedStretch(capture, read, copied, others)

    def _computing(self) -> Any:
        return (self._runtime.everyone or self._runtime.communicator).busy()

    def report(self) -> PlanCaptures:
        """What runs captured, and what does not."""
        graphs = self._graphs.values() if self._turns is None else dict.fromkeys(self._turns.turns)
        nodes = [node for graph in graphs for node in graph.graph.nodes]
        between = sum(node.op == "call_function" and node.target not in _NO_CALLS for node in nodes)
        captured = {number for variant in self._variants.values() for number in variant.captured}
        return PlanCaptures(
            stretches=len(self._regions),
            captured=len(captured),
            calls=sum(_calls(region.body) for region in self._regions),
            between=between,
            steps=dict(self.steps),
            refused=tuple(filter(None, map(_refusal, self._regions))),
            turns=() if self._turns is None else tuple(_of_turns(self._turns, captured)),
        )


def _of_turns(cut: TurnsCut, captured: Set[int]) -> Iterator[TurnCaptures]:
    for graph in dict.fromkeys(cut.turns):
        own = [module.number for module in graph.children() if isinstance(module, _Region)]
        turns = tuple(number for number, other in enumerate(cut.turns) if other is graph)
        yield TurnCaptures(turns, len(own), len(captured & set(own)))


_NO_CALLS: Final = (operator.getitem, item, take_saved, sum_of, put_sum)


def is_captured(node: fx.Node) -> bool:
    """Whether a call computes on the device alone, whatever the values are."""
    target: Any = node.target
    if target is calls.draw:
        in_the_graph = not isinstance(node.args[3], fx.Node)  # else other turns draw elsewhere
        return in_the_graph and is_drawn_by_generator(node.args[5])
    if target is torch.ops.aten.index.Tensor:
        return True  # of a plan, whose shapes depend on no values: its indices are no masks
    if is_op(target):
        return not any(tag in target.tags for tag in _LOOKS) and not may_draw(target, node.args, node.kwargs)
    return node.op == "call_function" and str(getattr(target, "__module__", "")).startswith(_COMPUTE)


_LOOKS: Final = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
"""Of ops at whose values the host looks."""


def _calls(body: fx.GraphModule) -> int:
    return sum(node.op == "call_function" for node in body.graph.nodes)


def _constants(graph: fx.GraphModule) -> list[torch.Tensor]:
    values = [getattr(graph, str(node.target)) for node in graph.graph.nodes if node.op == "get_attr"]
    return [value for value in values if isinstance(value, torch.Tensor)]


def _named(body: fx.GraphModule) -> str:
    """The first and the last call of a stretch."""
    names = [node.name for node in body.graph.nodes if node.op == "call_function"]
    return f"{names[0]} to {names[-1]}"


def _refusal(region: _Region) -> str:
    if region.reason or not region.missed:
        return region.reason
    return f"{_named(region.body)}, in {region.missed} runs: {ELSEWHERE}"


def _places(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Where tensors lie."""
    return tuple([(t.data_ptr(), t.stride()) for t in tensors])
