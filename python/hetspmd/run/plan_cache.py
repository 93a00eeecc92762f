"""The plans of one HAP module, by batch and mode: the first one, and those that are compiled when they are needed.

A plan serves the structure, shapes and plain values of one batch (:mod:`hetspmd.run.guard`) in one mode of the
model. Every later plan stores parameters in the same shards as the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hetspmd.cost.cluster import Cluster
from hetspmd.errors import BatchMismatchError, HetspmdError, TraceError
from hetspmd.lower import LocalProgram, LocalTensor, lower_plan
from hetspmd.lower.nested import lower_nested
from hetspmd.run.agreement import agreed_plan
from hetspmd.run.autograd import Runner
from hetspmd.run.calling import calling_text
from hetspmd.run.communicator import Communicator
from hetspmd.run.guard import Expected, expected, match, refuse_own_rows
from hetspmd.run.known import KnownParameters
from hetspmd.run.lone import is_the_model
from hetspmd.run.origin import Origin
from hetspmd.run.runtime import Runtime
from hetspmd.run.same_model import check_same_model, traced_for
from hetspmd.run.store import Slot, Store, slot
from hetspmd.run.variety import make_room
from hetspmd.trace.autocast import autocast_state, without_autocast
from hetspmd.trace.compat import spec_from_text
from hetspmd.trace.graph import Graph
from hetspmd.trace.trace import trace
from hetspmd.trace.trial import trial

if TYPE_CHECKING:
    from hetspmd.plan import Plan
    from hetspmd.run.attendance import Attendance
    from hetspmd.run.record import Recording
    from hetspmd.trace.step import Loss

Mode = tuple[tuple[bool, ...], tuple[bool, ...], str]
"""``training`` of every submodule, ``requires_grad`` of every parameter, the dtype of autocast ("": off)."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a HAP module was given: everything that its plans have in common.

    ``communicator`` joins all ranks, idle ones too. ``options`` go to :func:`hetspmd.compile`,
    ``compile_options`` to ``torch.compile`` (None: ops run as they are).
    """

    model: nn.Module
    cluster: Cluster
    device: torch.device
    communicator: Communicator
    loss: Loss | None
    gather_outputs: bool
    compile_options: Mapping[str, Any] | None
    options: Mapping[str, Any]

    @property
    def called(self) -> Callable[..., Any]:
        """What takes the batch: the model, or the loss with the model as its first argument."""
        return partial(self.loss, self.model) if callable(self.loss) else self.model

    def mode(self) -> Mode:
        """The mode in which the model is now."""
        return (
            tuple(m.training for m in self.model.modules()),
            tuple(p.requires_grad for p in self.model.parameters()),
            autocast_state(self.device.type),
        )

    def compile(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, training: bool, like: Plan | None = None
    ) -> Plan:
        """A plan of this batch in the present mode; ``like`` an earlier one, which keeps to its constraints."""
        from hetspmd.compiler import compile_plan

        options = {k: v for k, v in self.options.items() if like is None or k != "constraints"}
        with self.communicator.busy():
            return compile_plan(
                self.model,
                args,
                kwargs,
                self.cluster,
                loss=self.loss,
                training=training,
                like=like,
                **options,
            )

    def lower(self, plan: Plan) -> LocalProgram:
        """The local graphs of this rank."""
        with without_autocast(self.device.type), self.communicator.busy():  # constants are computed here
            lowered = lower_plan if plan.inside is None else lower_nested
            return lowered(plan, self.communicator.rank, self.device)


@dataclass(kw_only=True)
class Entry:
    """A plan that the module can run, and for which batches and modes. ``model``: the model itself does so."""

    plan: Plan
    mode: Mode
    expected: Expected
    runner: Runner
    output_spec: Any
    parameters: list[Slot]
    buffers: list[Slot]
    known: KnownParameters
    inputs: list[str]
    model: bool
    compared: bool = False
    number: int = -1
    traced: bool = True
    """Whether the plan is known to be of this model."""
    used: int = 0
    """When it was last called, in calls of the module."""

    @property
    def differentiable(self) -> bool:
        return self.runner.program.backward is not None


class PlanCache:
    """The plans of a HAP module; ``plan`` and its local ``program`` are the first.

    ``attendance``, if there is one, is told of a batch for which there is no plan before one is made.
    """

    def __init__(
        self,
        setting: Setting,
        store: Store,
        runtime: Runtime,
        plan: Plan,
        program: LocalProgram,
        traced: bool,
    ) -> None:
        self.setting, self.store, self._runtime = setting, store, runtime
        self.entries = [self._entry(plan, program)]
        self.entries[0].traced = traced
        self._calls = 0
        self.attendance: Attendance | None = None

    @property
    def first(self) -> Plan:
        """The plan that was made first; it decides where parameters live."""
        return self.entries[0].plan

    def calling(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], why: str = "") -> str:
        """How the model is called, in words; ``why`` no plan fits."""
        setting = self.setting
        return calling_text(setting.model, setting.called, setting.device, args, kwargs, why)

    def check_model(self, entry: Entry, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise PlanMismatchError on every rank unless the plan computes the model; once. Blocks."""
        if entry.traced or torch.is_inference_mode_enabled():
            return
        setting, graph = self.setting, entry.plan.graph

        def again() -> Graph:
            with self.store.whole_shapes(setting.device):
                return traced_for(graph, trace, setting.model, args, kwargs, loss=setting.loss)

        check_same_model(setting.communicator, graph, again, setting.device.type)
        entry.traced = True

    def runners(self) -> list[tuple[Plan, Runner]]:
        """Each plan with what runs it."""
        return [(entry.plan, entry.runner) for entry in self.entries]

    def select(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], recording: Recording | None
    ) -> tuple[Entry, list[torch.Tensor]]:
        """The plan for this batch in the present mode, compiled if there is none, and the batch's tensors.

        Raises BatchMismatchError if none can be made.
        """
        self._calls += 1
        mode = self.setting.mode()
        backward = torch.is_grad_enabled() and any(mode[1])
        why = ""
        for entry in self.entries:
            inputs, why = match(entry.expected, args, kwargs)
            if inputs is None or entry.mode != mode:
                continue
            if entry.differentiable or not backward or entry.plan.graph.loss is None:
                entry.used = self._calls
                return entry, inputs
        entry = self._new(args, kwargs, backward=backward, why=why)
        if recording is not None:
            recording.add(entry.plan, entry.runner)
        inputs, why = match(entry.expected, args, kwargs)
        if inputs is None:
            raise BatchMismatchError(f"the batch cannot be planned for: {why}")
        return entry, inputs

    def meet_classes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Let this rank, which has traced nothing, meet the classes in which the model returns its outputs."""
        with self.store.whole_shapes(self.setting.device):
            trial(self.setting.model, self.setting.called, args, kwargs)

    def _entry(self, plan: Plan, program: LocalProgram) -> Entry:
        graph, setting = plan.graph, self.setting
        runner = Runner(
            program, self._runtime, graph.loss, gather=setting.gather_outputs, origin=Origin(graph, setting.model),
            compile=setting.compile_options,
        )  # fmt: skip
        names = [p.name for p in graph.parameters]
        parameters = [slot(setting.model, name) for name in names]
        lowered = self._runtime.idle or setting.compile_options is not None
        return Entry(
            plan=plan,
            mode=(*setting.mode()[:2], graph.autocast),
            expected=expected(graph, setting.called),
            runner=runner,
            output_spec=spec_from_text(graph.output_spec),
            parameters=parameters,
            buffers=[slot(setting.model, b.name) for b in graph.buffers],
            known=KnownParameters(setting.model, names, parameters, self.store.shards),
            inputs=[i.path for i in graph.inputs],
            model=not lowered and is_the_model(plan),
        )

    def _new(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, backward: bool, why: str) -> Entry:
        setting = self.setting
        self.entries[0].known.now()
        for entry in self.entries:
            refuse_own_rows(entry.expected, entry.runner.program.outputs, args, kwargs)
        if self.attendance is not None:
            self.attendance.unplanned(self.calling(args, kwargs, why or "the mode of the model changed"))

        def make() -> Plan:
            def compiled(training: bool) -> Plan:
                return setting.compile(args, kwargs, training=training, like=self.first)

            with setting.communicator.busy(), self.store.whole_shapes(setting.device):
                if not backward or setting.model.training:
                    return compiled(backward)
                try:
                    return compiled(True)
                except TraceError:
                    return compiled(False)

        try:
            plan = agreed_plan(setting.communicator, make)
        except HetspmdError as error:
            raise BatchMismatchError(
                f"this batch or mode is not the plan's ({why or 'the mode of the model changed'}) and no "
                f"plan could be made for it: {error}"
            ) from error
        autocast = setting.mode()[2]
        if plan.graph.autocast != autocast:
            raise BatchMismatchError(
                f"rank 0 runs under autocast {plan.graph.autocast or 'off'}, rank {setting.communicator.rank} "
                f"under {autocast or 'off'}; every rank must call the model in the same torch.autocast"
            )
        program = setting.lower(plan)
        self._check_shards(plan, program.parameters)
        entry = self._entry(plan, program)
        entry.used = self._calls
        self.entries.append(entry)
        make_room(self.entries)
        return entry

    def _check_shards(self, plan: Plan, parameters: tuple[LocalTensor, ...]) -> None:
        for parameter, layout in zip(plan.graph.parameters, parameters, strict=True):
            stored = self.store.shards.get(parameter.name)
            if stored is None or (stored.form, stored.extents) != (layout.form, layout.extents):
                raise BatchMismatchError(
                    f"the new plan stores {parameter.name} in other shards than the first"
                )
