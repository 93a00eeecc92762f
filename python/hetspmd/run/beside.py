"""The host's side of the plans of one HAP module: in which states of Python each of them serves, and what
comes next.

A plan serves a mode (``train()``, frozen parameters, autocast, the structure of the model) in which
everything that its trace read is as it was. The same plan may serve several.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch

from hetspmd.errors import OptionError, PlanMismatchError, RetraceWarning, TraceError
from hetspmd.run.host_guard import Guard
from hetspmd.run.outside_parameters import look_for_untrained
from hetspmd.run.replan import Replanned, Replanner, differ
from hetspmd.run.structure import StructureGuard
from hetspmd.trace.blocks import as_in
from hetspmd.trace.host.discovery import discover, rediscover, unnamed_kinds
from hetspmd.trace.host.entropy import State, advance
from hetspmd.trace.host.places import Roots
from hetspmd.trace.host.recorder import Place
from hetspmd.trace.trace import trace

if TYPE_CHECKING:
    from hetspmd.plan.plan import Plan
    from hetspmd.run.setting import Mode, Setting
    from hetspmd.trace.graph import Graph

_MOST_STATES: Final = 64
"""States in which one plan serves that are remembered: each holds what it guards, and is compared in turn."""


@dataclass
class Served:
    """States in which one plan serves, each a mode and what the trace read; ``now`` is that of the present
    step."""

    states: list[tuple[Mode, Guard]] = field(default_factory=list)
    now: Guard | None = None

    def fits(self, mode: Mode) -> bool:
        """Whether the plan serves the present state."""
        for state_mode, guard in self.states:
            if state_mode == mode and not guard.once and guard.holds():
                self.now = guard
                return True
        return False

    def add(self, mode: Mode, guard: Guard) -> None:
        """Serve one more state."""
        self.states = [s for s in self.states if not s[1].once][-_MOST_STATES + 1 :]
        self.states.append((mode, guard))
        self.now = guard

    @property
    def numbers(self) -> list[torch.Tensor]:
        """The numbers of the model that the step takes as inputs."""
        return self.now.numbers() if self.now is not None else []

    def leave(self, outputs: Sequence[torch.Tensor | None]) -> None:
        """Put what forward leaves behind where it leaves it."""
        if self.now is not None:
            self.now.leave(outputs)


class HostSide:
    """What the plans of a HAP module have in common on this rank's host."""

    def __init__(self, setting: Setting, batch: object = None) -> None:
        self._setting = setting
        self._roots = Roots(setting.model, setting.loss, unnamed_kinds(batch))
        discover(self._roots)
        self._replanner = Replanner(self._roots)
        self._structure = StructureGuard(setting.model)
        self._last = self._structure.number()
        self._told: set[str] | None = set() if setting.communicator.rank == 0 else None
        self.randomness = setting.options.host_randomness
        self._warned = False

    def structure(self) -> int:
        """The number of the model's present structure."""
        number = self._structure.number()
        if number != self._last:
            rediscover(self._roots)
            self._last = number
        return number

    def meets(self, batch: object, *, only_if_unnamed: bool) -> bool:
        """Whether a batch has other classes to which no name leads than the batch before had; ``only_if_unnamed``:
        look only if that one had some."""
        if only_if_unnamed and not self._roots.batch_classes:
            return False
        kinds = unnamed_kinds(batch)
        if kinds == self._roots.batch_classes:
            return False
        self._roots.batch_classes = kinds
        rediscover(self._roots)
        return True

    def guard(self, graph: Graph, own_outputs: int, *, from_plan: bool = False) -> Guard:
        """What the trace of a graph found of Python, on this rank's model. Raises OptionError for draws that
        were not allowed here."""
        if graph.host.draws and self.randomness == "refuse":
            raise OptionError(
                f"the plan was made of a step whose Python draws random numbers{graph.host.draws}; say "
                'host_randomness="trace_each_step" or host_randomness="freeze" here, too'
            )
        rediscover(self._roots)
        self._warn_of_draws(graph.host.draws)
        once = bool(graph.host.draws) and self.randomness == "trace_each_step"
        if self._setting.communicator.world > 1:
            look_for_untrained(graph.host.reads, self._roots, self)
        of = graph, self._roots, self._setting.device, own_outputs
        return Guard(*of, once=once, from_plan=from_plan, told=self._told)

    def _warn_of_draws(self, draws: str) -> None:
        """Say once, on the first rank, what it costs that every step is traced anew."""
        if self._warned or not draws or self.randomness != "trace_each_step":
            return
        self._warned = True
        if self._setting.communicator.rank == 0:
            warnings.warn(
                f'the forward draws random numbers in Python{draws}, and host_randomness="trace_each_step" traces '
                "every step anew, which takes as long as the first trace; an outcome that was not met before is "
                "compiled, too. Draw with torch, as part of the graph, or before the call and pass it in the batch",
                RetraceWarning,
                stacklevel=2,
            )

    def moved(self, served: Served, structure: int) -> Served:
        """The states of another model's plan, as those of this model, which is a copy of that one in its
        ``structure``."""
        states = [
            ((*mode[:-1], 0), guard.on(self._roots)) for mode, guard in served.states if mode[-1] == structure
        ]
        return Served(states)

    def check_ranks(self, guard: Guard) -> None:
        """Raise PlanMismatchError, on every rank, if what the plan was traced with is not so on one of them.
        Blocks."""
        communicator = self._setting.communicator
        if communicator.world == 1:
            return
        for rank, differences in enumerate(communicator.exchange(differ(guard))):
            if differences:
                name, value = differences[0]
                if rank == 0:
                    raise PlanMismatchError(
                        f"{name} reads differently after the trace than in it: it is {value} now; let it be the "
                        "same from one step to the next, or keep it in a buffer"
                    )
                raise PlanMismatchError(
                    f"rank {rank} has another model than rank 0: its {name} is {value}; give every "
                    "rank's model the "
                    "same attributes, at the same time"
                )

    def replan(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        backward: bool,
        plans: Sequence[Plan],
        guards: Sequence[Guard],
    ) -> Replanned:
        """Rank 0's trace of the present step. Generators of the host are then where its draws leave them."""
        setting = self._setting
        states: list[State] = []

        def traced(numbers: Sequence[Place]) -> tuple[Graph, list[State]]:
            def of(training: bool) -> Graph:
                states.clear()
                return trace(
                    setting.model,
                    args,
                    kwargs,
                    loss=setting.loss,
                    training=training,
                    numbers=numbers,
                    host_randomness=self.randomness,
                    recompute=as_in(plans[0].graph),
                    states=states,
                )

            if not backward or setting.model.training:
                return of(backward), states
            try:
                return of(True), states
            except TraceError:
                return of(False), states

        decision = self._replanner.agree(setting.communicator, traced, plans, guards)
        if self.randomness == "trace_each_step":
            advance(decision.states, self._roots.value)
        return decision
