"""``HAP``: a model that runs a plan, used as ``DistributedDataParallel`` is."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn, Unpack
from weakref import ref

import torch
from torch import nn

import hetspmd
from hetspmd.cluster.cluster import Cluster
from hetspmd.dist.communicator import Communicator
from hetspmd.dist.random import Randomness, next_seed
from hetspmd.errors import ShardError
from hetspmd.lower import LocalTensor
from hetspmd.placement import is_sharded
from hetspmd.run.anomaly import is_looked_for
from hetspmd.run.asking import no_step
from hetspmd.run.attendance import Attendance, meet_ranks
from hetspmd.run.calling import TorchMode
from hetspmd.run.capture_report import ReportsCaptures
from hetspmd.run.capturing import Capturing
from hetspmd.run.compiled_regions import compile_options
from hetspmd.run.entry import Entry
from hetspmd.run.forwarding import attribute_of_the_model, forwards
from hetspmd.run.gradient_hooks import give_whole, tell_module_hooks, whole_hooks
from hetspmd.run.guard import check_same_batch, check_tensors
from hetspmd.run.holders import check_unwrapped
from hetspmd.run.observer import Observer
from hetspmd.run.own_rows import OwnBatch, OwnRows
from hetspmd.run.parameter_registry import remember
from hetspmd.run.passthrough import run_model
from hetspmd.run.plan_cache import PlanCache
from hetspmd.run.reach import reach
from hetspmd.run.replicas import replicas_of
from hetspmd.run.run_options import HapKeywords, RunOptions
from hetspmd.run.scaler import ExpectedScale
from hetspmd.run.setting import Setting
from hetspmd.run.signature import Forward
from hetspmd.run.starting import device_for, first_plan, joined, runtime_of
from hetspmd.run.store import Store, check_model
from hetspmd.run.taking_part import TakesPart
from hetspmd.run.transforms import refuse_transforms
from hetspmd.run.twin import twin_attributes, twin_model, twin_plans, twin_store
from hetspmd.run.whole_states import WholeStates
from hetspmd.run.wrappers import RefusesWrappers
from hetspmd.trace.admissible import check_model as check_admissible
from hetspmd.trace.compat.bytecode import left_by_compilers
from hetspmd.trace.compat.trees import unflatten
from hetspmd.trace.containers import MissingClassError

if TYPE_CHECKING:
    import os

    from hetspmd.plan.plan import Plan
    from hetspmd.trace.losses import Loss


class HAP(TakesPart, WholeStates, ReportsCaptures, RefusesWrappers):
    """A single-device model as one rank of an SPMD program.

    ``hap(*args, **kwargs)`` is called as the model is called, with the same global batch on every rank (or with
    its own rows of it, ``batch="own"``), and returns the model's own output structure. The loss is the global
    loss on every rank. ``loss.backward()`` puts gradients on this rank's parameter shards, and an elementwise
    optimizer over ``hap.parameters()`` steps the shards. An output that the program leaves sharded along dim 0
    comes back as this rank's rows; any other output comes back whole.

    A plan may leave a device idle. The rank of an idle device runs nothing: its parameters and its rows of
    outputs have no elements. It gets the loss and the whole outputs from the first active rank. Its buffers
    do not follow the training; :meth:`full_state_dict` returns the true ones on every rank.

    A batch of another shape, ``train()`` or ``eval()``, frozen parameters and ``torch.autocast`` each get a
    plan of their own, with the same shards. Such a plan is compiled when it is first needed, and kept. Make
    HAP under the autocast in which it will be called, and it compiles once.

    Args:
        model: The model. Its parameters are cut to this rank's shards, in place.
        cluster: A :class:`~hetspmd.Cluster`, a dict, or the path of a cluster file, with one device per rank.
        example: A batch to plan for: a dict of keyword arguments or a tuple of positional arguments.
        loss: Where the loss is in the model's output, by name or index (``"losses.total"``, ``1``), or a
            function ``loss(model, *args, **kwargs)``. By default the loss is the output, its ``.loss`` or its
            first item.
        plan: A :class:`~hetspmd.Plan` or the path of a plan file, instead of an example.
        gather_outputs: Return whole outputs on every rank.
        gather_state: ``state_dict()`` of this module, and of optimizers over its parameters, gathers the
            whole tensors of the single device; every rank must call it. By default ``state_dict()`` of shards
            is refused.
        strict: Raise MissingRuleError where an op has no rule.
        device: Where to run; by default where the model is.
        process_group: By default the default group. A Communicator is taken as well (simulation).
        sync_module_states: Start from rank 0's parameters and buffers, as DistributedDataParallel does.
        check_batches: Compare in every step what the ranks are given, and now and then their copies of
            replicated tensors. Set it to False if a rank's batch is right only in the rows that the rank
            uses.
        timeout: Seconds that a rank waits in a collective for a rank that does not come (it hangs, or is busy
            between two steps) before it raises RankFailedError. The death of a process is noticed within
            seconds. Compiling does not count.
        compile: Run the ops between two communications through ``torch.compile``; a dict holds its options.
            Predictions and recordings are of the ops as they are.
        cuda_graphs: Capture the ops between two communications in CUDA graphs: ``True``, or ``"auto"`` where that
            is possible, also of steps in micro-batches (docs/training.md, *CUDA graphs*). Off by default: it has
            not been tried on a GPU. :meth:`cuda_graphs_report` says what is captured.
        check_plan: Trace the model again at the first step, on rank 0, and compare the trace with ``plan``,
            which may have been made from an older version of the code.
        batch: ``"whole"``: every rank is given the same global batch. ``"own"``: each is given the batches of
            :func:`hetspmd.loader`, which has loaded the rows that this rank uses.
        options: Further arguments of :func:`hetspmd.compile`.

    Raises:
        OptionError: An argument does not exist or has a value that it cannot have, or ranks were given unlike
            ones; ``device``, ``process_group``, ``timeout``, ``compile``, ``cuda_graphs`` and ``loss`` are each
            rank's own. Raised before anything else.
        WorldSizeError: The size of the process group is not that of the cluster. Raised before anything else.
        PlanMismatchError: The ranks hold different plans, or (at the first step) the plan does not compute
            the model.
        DeviceError: The model lies on several devices.
        BatchMismatchError: The first batches of the ranks differ.
        HetspmdError: What :func:`hetspmd.compile` raises, on every rank alike.
    """

    runs_a_plan: Final = True
    """Says to the trace that this is no single-device model."""

    def __init__(
        self,
        model: nn.Module,
        cluster: Cluster | Mapping[str, Any] | str | os.PathLike[str],
        *,
        example: Any = None,
        plan: Plan | str | os.PathLike[str] | None = None,
        **options: Unpack[HapKeywords],
    ) -> None:
        super().__init__()
        run, compilation = RunOptions.of(options, ("model", "cluster", "example", "plan"))
        check_admissible(model)
        check_unwrapped(model)
        tell_module_hooks(model)
        self.cluster = Cluster.load(cluster)
        compiled_with = compile_options(run.compile)
        communicator = self._everyone = joined(self.cluster, run, compilation, with_plan=plan is not None)
        self.device = device_for(model, run.device)
        self.module = model
        self.gather_outputs, self.gather_state = run.gather_outputs, run.gather_state
        setting = Setting(
            model=model,
            cluster=self.cluster,
            device=self.device,
            communicator=communicator,
            gather_outputs=run.gather_outputs,
            compile_options=compiled_with,
            capturing=Capturing.of(run.cuda_graphs, self.device, compiled=compiled_with is not None),
            options=compilation,
        )
        first = first_plan(setting, plan, example)
        check_model(model, first.graph)
        ranks = meet_ranks(communicator, self.device, next_seed(), run.check_batches)
        randomness = Randomness(ranks.seed, communicator.rank, self.device)
        self._runtime = runtime_of(communicator, first, randomness, ExpectedScale(self))
        program = setting.lower(first)
        self._store = Store(model, first.graph, program.parameters)
        if run.sync_module_states:
            self._store.synchronize(communicator, self.device)
        self._store.shard(self.device, communicator)
        self._store.guard(idle=self._runtime.everyone is not None)
        traced = plan is None or not run.check_plan
        self._plans = PlanCache(setting, self._store, self._runtime, first, program, traced, example)
        if plan is None:
            self._plans.check_ranks()
        self._loss = setting.loss
        self._attendance: Attendance | None = None
        if ranks.roll is not None:
            alike = ranks.alike and first.inside is None
            of = self._store, first.graph, program, lambda: self._runtime
            replicas = replicas_of(*of, alike=alike) if run.check_batches else None
            self._attendance = Attendance(ranks, self.device, replicas)
            self._plans.attendance = self._attendance
        self._check = run.check_batches
        self.own_rows = OwnRows(communicator, self._plans.plans) if run.batch == "own" else None
        self._recording: Observer | None = None
        self._lowered = False
        remember(self)
        reach()
        self._own = frozenset(vars(self)) - frozenset(vars(nn.Module())) | {"_own"}

    @property
    def plan(self) -> Plan:
        """The plan that was made first. It decides where parameters live."""
        return self._plans.first

    @property
    def loss_function(self) -> Loss | None:
        """The argument ``loss`` as a function; None where it was left out."""
        return self._loss

    @property
    def rank(self) -> int:
        """This rank in the cluster."""
        return self._everyone.rank

    @property
    def everyone(self) -> Communicator:
        """All ranks of the cluster, idle ones too."""
        return self._everyone

    @property
    def source(self) -> int:
        """The first active rank, which has what idle ranks lack."""
        return self._runtime.source

    def counts(self, name: str) -> bool:
        """Whether this rank's part of the parameter ``name`` is to be counted in a sum over all ranks: a shard, or
        on the first active rank a whole parameter."""
        layout = self._store.shards.get(name)
        if self._runtime.idle:
            return False
        if layout is not None and is_sharded(layout.form):
            return layout.extents[self._runtime.communicator.rank] > 0
        return self.rank == self.source

    @Forward
    @left_by_compilers
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step on a global batch, which must be the same on every rank."""
        if self._attendance is None:
            args, kwargs, own = self._plans.whole(self.own_rows, args, kwargs)
            planned = self._planned(args, kwargs, own)
            if own is not None:
                own.complete()
            return self._run(*planned, args, kwargs)
        with self._attendance.may_refuse():
            args, kwargs, own = self._plans.whole(self.own_rows, args, kwargs)
            entry, inputs, parameters = self._planned(args, kwargs, own)
        describe = partial(self._plans.calling, args, kwargs, TorchMode.now(self.device), own=own)
        names, first = entry.expected.input_names, not entry.compared
        compared = (names, inputs) if own is None else own.compared(names, inputs)
        hooks: tuple[str, ...] = ()
        if entry.differentiable and torch.is_grad_enabled():
            hooks = whole_hooks(self, entry.plan.graph.parameters, parameters)
        state = f"recorded {self._recording is not None}{'' if own is None else own.state}"
        with self._attendance.at(entry, compared, state, describe, hooks):
            if own is not None:
                own.complete(check=first and self._check)
            return self._run(entry, inputs, parameters, args, kwargs)

    def _planned(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], own: OwnBatch | None
    ) -> tuple[Entry, list[torch.Tensor], list[torch.Tensor]]:
        """The plan for a batch, the batch's tensors, and the parameters as they are now."""
        no_step()
        refuse_transforms()
        entry, inputs = self._plans.select(args, kwargs, self._recording, own)
        check_tensors(inputs, entry.inputs, self.device)
        if own is not None:
            own.fit(entry.plan, inputs)
        try:
            parameters = entry.known_parameters.now()
        except ShardError as error:
            self._everyone.report(error)
            raise
        if self._check and self._attendance is None and not entry.compared and own is None:
            check_same_batch(self._everyone, inputs, entry.inputs)
            entry.compared = True
        return entry, inputs, parameters

    def _run(
        self,
        entry: Entry,
        inputs: list[torch.Tensor],
        parameters: list[torch.Tensor],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        if not entry.traced:
            self._plans.check_model(entry, args, kwargs)
        if entry.model and not (self._lowered or self._recording is not None or is_looked_for()):
            of = entry.plan, entry.runner, entry.output_spec
            return run_model(self.module, self._loss, args, kwargs, *of)
        entry.runner.before_gradients = partial(
            give_whole, ref(self), entry.plan.graph.parameters, parameters
        )
        buffers = [owner._buffers[leaf] for owner, leaf in entry.buffers]
        loss, outputs = entry.runner.run(parameters, buffers, inputs)  # type: ignore[arg-type]  # none is None
        graph = entry.plan.graph
        leaves = graph.filled_outputs(outputs if graph.loss is None else {**outputs, graph.loss: loss})
        entry.served.leave(leaves)
        count = entry.output_spec.num_leaves
        try:
            return unflatten(leaves[:count], entry.output_spec)
        except MissingClassError:
            self._plans.meet_classes(args, kwargs)
            return unflatten(leaves[:count], entry.output_spec)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accept loops that were written for ``DistributedDataParallel.no_sync``; changes nothing.

        Accumulated gradients are right with ``no_sync`` and without it. A program reduces gradients where its
        plan says: most of them between other ops of the backward, some not at all. So there is no last
        reduction that could be skipped. Every backward adds the whole gradients of its micro-batch to
        ``.grad``, in place.
        """
        yield

    @contextmanager
    def record(self, path: str | os.PathLike[str] | None = None) -> Iterator[Observer]:
        """Record what every rank does within the ``with`` block: each instruction, wait and collective.

        Every rank must enter and leave the block, and run whole steps within it, backward and optimizer
        included. At the end of the block rank 0 writes the steps to ``path`` as a Chrome trace. The trace has
        the layout of the simulated step that ``hap.plan.timeline().save(...)`` writes. ``print(recording)``
        compares the two; times are in seconds.

        Args:
            path: The file to write; by default none.

        Yields:
            The recording.

        Raises:
            OutputError: The file cannot be written. Raised on every rank, before anything runs.
            RuntimeError: The module is being recorded already.
        """
        if self._recording is not None:
            raise RuntimeError("this module is being recorded already")

        self.meet("record()")
        entries = self._plans.runners
        recording = hetspmd.attached("Recording")(
            self._everyone, self._runtime, self.device, path, entries, self.parameters
        )
        with recording:
            self._recording = recording
            try:
                yield recording
                self.meet("the end of record()")
            finally:
                self._recording = None

    def use_randomness(self, randomness: Randomness) -> None:
        """Draw random numbers from ``randomness`` from now on (a restored run, a verification)."""
        self._runtime.randomness = randomness

    def run_lowered(self) -> None:
        """Run the local graphs from now on, also where the model itself would run: to verify or measure them."""
        self._lowered = True

    def parameter_shards(self) -> dict[str, LocalTensor]:
        """Name of each parameter (tied names included) to its whole shape and what this rank holds of it."""
        return dict(self._store.shards)

    def __deepcopy__(self, memo: dict[int, Any]) -> HAP:
        """A second HAP in the same shards, for averages of weights and target networks; nothing is sent."""
        twin = memo[id(self)] = type(self).__new__(type(self))
        with self._store.sentry.lifted():
            model = twin_model(self._store, memo)
            twin.__dict__.update(twin_attributes(self.__dict__, self._own, memo), _recording=None)
        twin._store = twin_store(self._store, model)
        twin._store.guard(idle=self._runtime.everyone is not None)
        twin._plans = twin_plans(self._plans, twin._store)
        remember(twin)
        return twin

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ShardError(
            "a HAP module is tied to its process group and cannot be pickled, nor copied by copy.copy. Write state "
            "= hap.full_state_dict() on every rank, then torch.save(state, FILE) on one; copy.deepcopy(hap) makes "
            "a second HAP module"
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if not forwards(self, name):
                raise
        raise AttributeError(attribute_of_the_model(name, sys._getframe(1).f_globals.get("__name__", "")))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "module" and "_own" in self.__dict__:
            raise ShardError(
                "the plan runs the model that was wrapped; wrap another one: hetspmd.HAP(model, ...)"
            )
        if "_own" in self.__dict__ and forwards(self, name):
            raise AttributeError(
                f"{name!r} is an attribute of the model, not of HAP: write hap.module.{name} = ..."
            )
        super().__setattr__(name, value)
