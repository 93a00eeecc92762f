"""The plans of one HAP module, by batch and mode: the first one, and those that are compiled when they are needed.

A plan serves the structure, shapes and plain values of one batch (:mod:`hetspmd.run.guard`) in one mode of the
model. Every later plan stores parameters in the same shards as the first one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from hetspmd.dist.agreement import agreed_plan
from hetspmd.dist.runtime import Runtime
from hetspmd.errors import BatchMismatchError, HetspmdError
from hetspmd.lower import LocalProgram, LocalTensor
from hetspmd.run.autograd import Runner
from hetspmd.run.beside import HostSide, Served
from hetspmd.run.calling import TorchMode, calling_text, changing, parted
from hetspmd.run.captured_regions import Captures
from hetspmd.run.entry import Entry
from hetspmd.run.guard import expected, match, refuse_own_rows, refuse_shards
from hetspmd.run.host_guard import Guard
from hetspmd.run.known_parameters import KnownParameters
from hetspmd.run.observer import Observer
from hetspmd.run.own_rows import OwnBatch, OwnRows
from hetspmd.run.passthrough import is_the_model
from hetspmd.run.same_model import check_same_model, traced_for
from hetspmd.run.setting import Mode, Setting
from hetspmd.run.source_location import SourceFinder
from hetspmd.run.store import Store, slot
from hetspmd.run.structure import other_parameters
from hetspmd.run.variety import make_room
from hetspmd.trace.blocks import as_in
from hetspmd.trace.compat.trees import spec_from_text
from hetspmd.trace.graph import Graph
from hetspmd.trace.trace import split_example, trace
from hetspmd.trace.trial import trial

if TYPE_CHECKING:
    from hetspmd.plan.plan import Plan
    from hetspmd.run.attendance import Attendance


class PlanCache:
    """The plans of a HAP module; ``plan`` and its local ``program`` are the first.

    ``example`` is a batch for which the first plan is. ``attendance``, if there is one, is told of a batch for
    which there is no plan before one is made.
    """

    def __init__(
        self,
        setting: Setting,
        store: Store,
        runtime: Runtime,
        plan: Plan,
        program: LocalProgram,
        traced: bool,
        example: Any = None,
    ) -> None:
        self.setting, self.store, self._runtime = setting, store, runtime
        self.host = HostSide(setting, None if example is None else split_example(example))
        self.entries = [self._entry(plan, program, from_plan=True)]
        self.entries[0].traced = traced
        self._calls = 0
        self.attendance: Attendance | None = None

    @property
    def first(self) -> Plan:
        """The plan that was made first; it decides where parameters live."""
        return self.entries[0].plan

    def calling(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        torch_mode: TorchMode,
        why: str = "",
        own: OwnBatch | None = None,
    ) -> str:
        """How the model is called, in words; ``why`` no plan fits. ``own``: as of :meth:`select`."""
        setting = self.setting
        said = calling_text(setting.model, setting.called, torch_mode, args, kwargs, why)
        guards = (guard for entry in self.entries for _, guard in entry.served.states)
        words = () if own is None else (own.words,)
        return "; ".join((*words, said, *changing(guards)))

    def check_model(self, entry: Entry, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise PlanMismatchError on every rank unless the plan computes the model; once. Blocks."""
        if entry.traced or torch.is_inference_mode_enabled():
            return
        setting, graph = self.setting, entry.plan.graph

        def again() -> Graph:
            with self.store.whole_shapes(setting.device):
                return traced_for(
                    graph,
                    trace,
                    setting.model,
                    args,
                    kwargs,
                    loss=setting.loss,
                    host_randomness=self.host.randomness,
                    recompute=as_in(graph),
                )

        check_same_model(setting.communicator, graph, again, setting.device.type)
        entry.traced = True

    def plans(self) -> list[Plan]:
        """The plans that there are, the first one first."""
        return [entry.plan for entry in self.entries]

    def runners(self) -> list[tuple[Plan, Runner]]:
        """Each plan with what runs it."""
        return [(entry.plan, entry.runner) for entry in self.entries]

    def whole(
        self, rows: OwnRows | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], OwnBatch | None]:
        """A batch with the shapes of the whole one and, where it is this rank's rows, what it was made of."""
        if rows is None:
            return args, kwargs, None
        own = rows.taken(self.setting.called, args, kwargs, [entry.expected for entry in self.entries])
        return own.args, own.kwargs, own

    def select(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        recording: Observer | None,
        own: OwnBatch | None = None,
    ) -> tuple[Entry, list[torch.Tensor]]:
        """The plan for this batch in the present mode, compiled if there is none, and the batch's tensors.

        ``own``: what the batch was made of where every rank was given its own rows. Raises BatchMismatchError if
        none can be made.
        """
        self._calls += 1
        mode = self.setting.mode(self.host.structure())
        backward = torch.is_grad_enabled() and any(mode[1])
        self._meet((args, dict(kwargs)), only_if_unnamed=True)
        choice, why = self._known(args, kwargs, mode, backward)
        if choice is None and self._meet((args, dict(kwargs)), only_if_unnamed=False):
            choice, why = self._known(args, kwargs, mode, backward)
        if choice is not None:
            choice[0].used = self._calls
            return choice
        runners = self.runners()
        entry = self._new(args, kwargs, backward=backward, why=why, own=own)
        if recording is not None and not any(entry.runner is runner for _, runner in runners):
            recording.add(entry.plan, entry.runner)
        inputs, why = match(entry.expected, args, kwargs)
        if inputs is None:
            raise BatchMismatchError(f"the batch cannot be planned for: {why}")
        return entry, inputs + entry.served.numbers

    def _known(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], mode: Mode, backward: bool
    ) -> tuple[tuple[Entry, list[torch.Tensor]] | None, str]:
        """The plan that there is for a batch, with the batch's tensors; or None, and why there is none."""
        why = ""
        for entry in self.entries:
            inputs, why = match(entry.expected, args, kwargs)
            if inputs is None or not entry.served.fits(mode):
                continue
            if entry.plan.micro_batches > 1 and not backward:  # it computes gradients in any case
                continue
            if entry.differentiable or not backward or entry.plan.graph.loss is None:
                return (entry, inputs + entry.served.numbers), why
        return None, why

    def _meet(self, batch: object, *, only_if_unnamed: bool) -> bool:
        """Find the classes of a batch to which no name leads; whether there are other ones than before."""
        if not self.host.meets(batch, only_if_unnamed=only_if_unnamed):
            return False
        for entry in self.entries:
            for _, guard in entry.served.states:
                guard.unbind()
        return True

    def check_ranks(self) -> None:
        """Raise PlanMismatchError, on every rank, unless every rank's model is as the first plan's was.
        Blocks."""
        self.host.check_ranks(self.entries[0].served.states[0][1])

    def meet_classes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Let this rank, which has traced nothing, meet the classes in which the model returns its outputs."""
        with self.store.whole_shapes(self.setting.device):
            trial(self.setting.model, self.setting.called, args, kwargs)

    def _entry(self, plan: Plan, program: LocalProgram, *, from_plan: bool = False) -> Entry:
        graph, setting = plan.graph, self.setting
        capturing = setting.capturing
        captures = None
        if capturing.capturer is not None and not self._runtime.idle:
            captures = Captures(program, self._runtime, capturing.capturer, capturing.reasons, capturing.busy)
        runner = Runner(
            program,
            self._runtime,
            graph.loss,
            gather=setting.gather_outputs,
            origin=SourceFinder(graph, setting.model),
            compile=setting.compile_options,
            captures=captures,
        )
        names = [p.name for p in graph.parameters]
        parameters = [slot(setting.model, name) for name in names]
        lowered = self._runtime.idle or setting.compile_options is not None or captures is not None
        mode = (*setting.mode(self.host.structure())[:2], graph.autocast, self.host.structure())
        output_spec = spec_from_text(graph.output_spec)
        served = Served()
        served.add(mode, self.host.guard(graph, output_spec.num_leaves, from_plan=from_plan))
        return Entry(
            plan=plan,
            mode=mode,
            served=served,
            expected=expected(graph, setting.called),
            runner=runner,
            output_spec=output_spec,
            parameters=parameters,
            buffers=[slot(setting.model, b.name) for b in graph.buffers],
            known_parameters=KnownParameters(setting.model, names, parameters, self.store.shards),
            inputs=[i.path for i in graph.inputs],
            model=not lowered and is_the_model(plan),
        )

    def _new(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        backward: bool,
        why: str,
        own: OwnBatch | None,
    ) -> Entry:
        setting = self.setting
        self.entries[0].known_parameters.now()
        refuse_shards(args, kwargs)
        for entry in self.entries:
            refuse_own_rows(entry.runner.program.outputs, setting.called, args, kwargs)
        if self.attendance is not None:
            now = TorchMode.now(setting.device)
            self.attendance.unplanned(
                self.calling(args, kwargs, now, why or "the mode of the model changed", own)
            )
        if own is not None:
            own.agree(setting.communicator)

        def make() -> Plan:
            training = decision.graph.training
            with self.store.whole_shapes(setting.device):
                return setting.compile(
                    args, kwargs, training=training, like=self.first, traced=decision.graph
                )

        mode = setting.mode(self.host.structure())
        try:
            with setting.communicator.busy(), self.store.whole_shapes(setting.device):
                plans, guards = self._candidates(args, kwargs, mode)
                decision = self.host.replan(args, kwargs, backward=backward, plans=plans, guards=guards)
            if decision.position is None:
                plan = agreed_plan(setting.communicator, make)
        except HetspmdError as error:
            why = why or parted(setting.model, mode, self._states(args, kwargs))
            raise BatchMismatchError(
                f"this step is not as the plan's was ({why}), and no plan could be made for it: {error}"
            ) from error
        if decision.graph.autocast != mode[2]:
            raise BatchMismatchError(
                f"rank 0 runs under autocast {decision.graph.autocast or 'off'}, rank {setting.communicator.rank} "
                f"under {mode[2] or 'off'}; every rank must call the model in the same torch.autocast"
            )
        if decision.position is not None:
            entry = self.entries[decision.position]
            guard = self.host.guard(decision.graph, entry.output_spec.num_leaves)
            entry.served.add(mode, guard)
            entry.used = self._calls
            return entry
        program = setting.lower(plan)
        self._check_shards(plan, program.parameters)
        entry = self._entry(plan, program)
        entry.used = self._calls
        self.entries.append(entry)
        make_room(self.entries)
        return entry

    def _candidates(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], mode: Mode
    ) -> tuple[list[Plan], list[Guard]]:
        """All plans, and of those for this batch and mode what their traces found of Python."""
        guards = [guard for state_mode, guard in self._states(args, kwargs) if state_mode == mode]
        return [entry.plan for entry in self.entries], guards

    def _states(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[Mode, Guard]]:
        """The states in which the plans for this batch serve."""
        entries = (entry for entry in self.entries if match(entry.expected, args, kwargs)[0] is not None)
        return [state for entry in entries for state in entry.served.states]

    def _check_shards(self, plan: Plan, parameters: tuple[LocalTensor, ...]) -> None:
        """Raise PlanMismatchError for parameters that the model did not have, and BatchMismatchError where the
        first plan stores others than this one."""
        shards = self.store.shards
        new = sorted(p.name for p in plan.graph.parameters if p.name not in shards)
        if new:
            raise other_parameters([name.removeprefix("model.") for name in new])
        for parameter, layout in zip(plan.graph.parameters, parameters, strict=True):
            stored = shards[parameter.name]
            if (stored.form, stored.extents) != (layout.form, layout.extents):
                raise BatchMismatchError(
                    f"the new plan stores {parameter.name} in other shards than the first"
                )
