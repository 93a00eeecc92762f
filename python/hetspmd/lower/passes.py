"""The passes of lowering: one list for every plan, flat or across machines, and for every rank, be it idle.

The first pass writes the two graphs of a rank, the others rewrite them. A pass is a function from the state of the
lowering to the next one. A state owns its graphs: a pass may rewrite them in place, so that what is wanted of a
state is taken from it before the next pass runs (``observer`` of :func:`run_passes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from torch import fx

from hetspmd.lower import fuse
from hetspmd.lower.draws import write_noise
from hetspmd.lower.emit import drop_unread
from hetspmd.lower.local_program import LocalGraphs, LocalProgram
from hetspmd.lower.reuse import mark_spare
from hetspmd.lower.saves import save_least


class Graphs(Protocol):
    """The graphs of one rank: :class:`~hetspmd.lower.local_program.LocalGraphs`, or
    :class:`~hetspmd.lower.turns.TurnGraphs` of a step in micro-batches."""

    @property
    def graphs(self) -> tuple[fx.Graph, ...]:
        """All of them, to be rewritten in place."""

    def program(self) -> LocalProgram:
        """The program that a rank runs: the graphs as code."""


class Emitter(Protocol):
    """What writes the graphs of one rank of a plan: :class:`~hetspmd.lower.local.ActiveEmitter`,
    :class:`~hetspmd.lower.turns.TurnEmitter` or :class:`~hetspmd.lower.idle.IdleEmitter`."""

    def emit(self) -> Graphs:
        """The graphs, newly written. Raises PlanError if the program reads what it has not produced."""


@dataclass(frozen=True)
class Lowering:
    """The state of the lowering of one rank: who writes its graphs, and the graphs once they are written."""

    emitter: Emitter
    written: Graphs | None = None

    @property
    def graphs(self) -> Graphs:
        """The graphs, which the first pass has written."""
        assert self.written is not None, "the first pass writes the graphs"
        return self.written


@dataclass(frozen=True)
class Pass:
    """A pass: its name, what it does in one line, and the function from a state to the next one. ``compiled``: it
    runs only where what lies between communications will be compiled, or only where it will not be."""

    name: str
    what: str
    run: Callable[[Lowering], Lowering]
    compiled: bool | None = None


@dataclass(frozen=True)
class Rewrite:
    """A pass that looks at each graph by itself."""

    rewrite: Callable[[fx.Graph], None]

    def __call__(self, state: Lowering) -> Lowering:
        """The state whose graphs are rewritten: they are those of ``state``."""
        for graph in state.graphs.graphs:
            self.rewrite(graph)
        return state


@dataclass(frozen=True)
class OfAStep:
    """A pass that looks at the forward and the backward of a step together, if it is in one micro-batch."""

    rewrite: Callable[[LocalGraphs], None]

    def __call__(self, state: Lowering) -> Lowering:
        """The state whose graphs are rewritten: they are those of ``state``."""
        if isinstance(state.graphs, LocalGraphs):
            self.rewrite(state.graphs)
        return state


def emit(state: Lowering) -> Lowering:
    """The state with graphs. Raises PlanError if the program reads what it has not produced."""
    return Lowering(state.emitter, state.emitter.emit())


def check(graph: fx.Graph) -> None:
    """Raise if a graph is malformed, which would be a fault of a pass."""
    graph.lint()


PASSES: Final[tuple[Pass, ...]] = (
    Pass("emit", "writes ops of local shapes, and collectives where they start and are waited for", emit),
    Pass(
        "unread",
        "drops what nothing reads: results of ops with several, the runtime inside a machine",
        Rewrite(drop_unread),
    ),
    Pass("aliases", "drops calls that only rename a value", Rewrite(fuse.drop_aliases)),
    Pass(
        "convolutions",
        "computes both gradients of a convolution by one call",
        Rewrite(fuse.join_convolutions),
    ),
    Pass(
        "scatter",
        "writes a factor per row to its place, where the rest of the row is zero",
        Rewrite(fuse.scatter_rows),
    ),
    Pass(
        "batch-norms",
        "computes the pieces of a batch norm by one call, where a rank has the whole batch",
        Rewrite(fuse.join_batch_norms),
        compiled=False,
    ),
    Pass(
        "noise",
        "draws noise by calls, of which ops that are compiled make what random ops return",
        Rewrite(write_noise),
        compiled=True,
    ),
    Pass(
        "saves",
        "saves what is least to hold where elementwise ops are compiled, which compute the rest again",
        OfAStep(save_least),
        compiled=True,
    ),
    Pass(
        "in-place",
        "lets elementwise ops write to an operand that nothing reads afterwards",
        Rewrite(fuse.write_in_place),
    ),
    Pass(
        "spare",
        "lets collectives work in the memory of an operand that nothing reads afterwards",
        Rewrite(mark_spare),
    ),
    Pass("check", "checks that each value is written once, before it is read", Rewrite(check)),
)
"""All passes, in the order in which they run. In the graphs of an idle rank the rewrites find nothing to do."""

Observer = Callable[[int, Pass, Graphs], None]
"""Called after each pass with its place in the list, the pass, and the graphs, which it must leave as they are."""


def run_passes(emitter: Emitter, observer: Observer | None = None, *, compiled: bool = False) -> LocalProgram:
    """The local program that the passes make of what ``emitter`` writes. Raises PlanError if the program reads what
    it has not produced."""
    state = Lowering(emitter)
    for place, each in enumerate(PASSES):
        if each.compiled in (None, compiled):
            state = each.run(state)
        if observer is not None:
            observer(place, each, state.graphs)
    return state.graphs.program()


def rewrite(graphs: Iterable[fx.Graph]) -> None:
    """Let all passes but the first one rewrite graphs that are not compiled, in place."""
    for graph in graphs:
        for each in PASSES:
            if isinstance(each.run, Rewrite) and not each.compiled:
                each.run.rewrite(graph)
