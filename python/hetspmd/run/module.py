"""``HAP``: a model that runs a plan, used as ``DistributedDataParallel`` is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from hetspmd.cost.cluster import Cluster
from hetspmd.errors import BatchMismatchError, ExampleError, HetspmdError, PlanMismatchError, TraceError
from hetspmd.lower import LocalProgram, LocalTensor, lower_plan
from hetspmd.run.agreement import agreed_plan, same_everywhere
from hetspmd.run.autograd import Runner
from hetspmd.run.communicator import Communicator, communicator_for
from hetspmd.run.guard import Expected, check_same_batch, check_tensors, expected, match
from hetspmd.run.random import Randomness
from hetspmd.run.runtime import Runtime
from hetspmd.run.store import Slot, Store, check_model, slot
from hetspmd.trace.compat import spec_from_text, unflatten
from hetspmd.trace.fake import model_device
from hetspmd.trace.trace import split_example

if TYPE_CHECKING:
    import os

    from hetspmd.plan import Plan
    from hetspmd.trace.step import Loss

_Mode = tuple[tuple[bool, ...], tuple[bool, ...]]
"""``training`` of every submodule, ``requires_grad`` of every parameter."""


@dataclass
class _Entry:
    """A plan that this module can run, and for which batches and modes."""

    plan: Plan
    mode: _Mode
    expected: Expected
    runner: Runner
    output_spec: Any
    parameters: list[Slot]
    buffers: list[Slot]
    inputs: list[str]
    compared: bool = False

    @property
    def differentiable(self) -> bool:
        return self.runner.program.backward is not None


class HAP(nn.Module):
    """A single-device model as one rank of an SPMD program.

    ``hap(*args, **kwargs)`` is called as the model is, with the same global batch on every rank, and returns
    the model's own output structure. The loss is the global loss on every rank; ``loss.backward()`` leaves
    gradients on this rank's parameter shards, and any elementwise optimizer over ``hap.parameters()`` steps
    them. An output that the program leaves divided along dim 0 comes back as this rank's rows, any other
    whole; with ``gather_outputs`` all come back whole.

    Where the plan leaves a device idle, its rank holds parameters of no elements (its optimizer steps nothing)
    and no rows of outputs, and runs nothing; it gets the loss and whole outputs from the first active rank.
    Its buffers do not follow the training; :meth:`full_state_dict` has the true ones on every rank.

    model                the model; its parameters are cut to this rank's shards, in place
    cluster              a Cluster, a dict or the path of a cluster file, with one device per rank
    example              a batch to plan for: a dict of keyword arguments or a tuple of positional ones
    loss                 ``loss(model, *args, **kwargs)`` if the model's output does not hold the loss
    plan                 a Plan or the path of a plan file, instead of an example
    gather_outputs       return whole outputs on every rank
    strict               raise MissingRuleError where an op has no rule
    device               where to run; default: where the model is
    process_group        default: the default group; a Communicator is taken as well (simulation)
    sync_module_states   start from rank 0's parameters and buffers, as DistributedDataParallel does
    options              further arguments of :func:`hetspmd.compile`

    A batch of another shape, ``train()``/``eval()`` and frozen parameters get plans of their own, with the
    same shards, compiled when they first appear; they are kept. Raises WorldSizeError before anything else
    if the group's size is not the cluster's, PlanMismatchError if the ranks hold different plans, DeviceError
    for a model on several devices, BatchMismatchError if the ranks' first batches differ, and what
    :func:`hetspmd.compile` raises, on every rank alike.
    """

    def __init__(
        self, model: nn.Module, cluster: Cluster | Mapping[str, Any] | str | os.PathLike[str], *,
        example: Any = None, loss: Loss | None = None, plan: Plan | str | os.PathLike[str] | None = None,
        gather_outputs: bool = False, strict: bool = False, device: torch.device | str | None = None,
        process_group: dist.ProcessGroup | Communicator | None = None, sync_module_states: bool = True,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        from hetspmd.plan import Plan

        self.cluster = Cluster.load(cluster)
        if isinstance(process_group, Communicator):
            communicator = process_group
        else:
            communicator = communicator_for(process_group, len(self.cluster.devices))
        place = model_device(model)
        if device is not None:
            self.device = torch.device(device)
        else:
            self.device = torch.device("cpu") if place.type == "meta" else place
        self.module = model
        self.gather_outputs = gather_outputs
        self._loss = loss
        self._options = {**options, "strict": strict}
        if plan is not None:
            first = plan if isinstance(plan, Plan) else Plan.load(plan)
            same_everywhere(communicator, first)
            if first.cluster != self.cluster:
                raise PlanMismatchError("the plan was made for another cluster; compile one for this cluster")
        elif example is not None:
            args, kwargs = split_example(example)
            first = agreed_plan(communicator, lambda: self._compile(args, kwargs, training=True))
        else:
            raise ExampleError("HAP needs example= (a batch to plan for) or plan=")
        check_model(model, first.graph)
        seed = communicator.exchange(int(torch.randint(2**62, ())))[0]
        self._everyone = communicator
        randomness = Randomness(seed, communicator.rank, self.device)
        self._runtime = Runtime.join(communicator, first.active, randomness)
        program = lower_plan(first, communicator.rank, self.device)
        self._store = Store(model, first.graph, program.parameters)
        if sync_module_states:
            self._store.synchronize(communicator, self.device)
        self._store.shard(self.device)
        self._entries = [self._entry(first, program)]

    @property
    def plan(self) -> Plan:
        """The plan that was made first; it decides where parameters live."""
        return self._entries[0].plan

    @property
    def rank(self) -> int:
        """This rank in the cluster."""
        return self._everyone.rank

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step on a global batch, the same on every rank."""
        entry, inputs = self._select(args, kwargs)
        check_tensors(inputs, entry.inputs, self.device)
        if not entry.compared:
            check_same_batch(self._everyone, inputs, entry.inputs)
            entry.compared = True
        parameters = [owner._parameters[leaf] for owner, leaf in entry.parameters]
        buffers = [owner._buffers[leaf] for owner, leaf in entry.buffers]
        loss, outputs = entry.runner.run(parameters, buffers, inputs)  # type: ignore[arg-type]  # none is None
        graph = entry.plan.graph
        leaves: list[Any] = []
        for output in graph.outputs:
            if output.tensor is None:
                leaves.append(output.value)
            elif output.tensor == graph.loss:
                leaves.append(loss)
            else:
                leaves.append(outputs[output.tensor])
        return unflatten(leaves, entry.output_spec)

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """The single-device model's state dict, whole tensors on the CPU; every rank must call this.

        ``rank0_only``: the other ranks get an empty dict.
        """
        return self._store.full_state_dict(self._runtime, keep=not rank0_only or self.rank == 0)

    def load_full_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load a single-device state dict into this rank's shards; no communication.

        Returns torch's report of missing and unexpected keys; raises RuntimeError as
        ``Module.load_state_dict`` does.
        """
        return self._store.load_full_state_dict(state_dict, strict=strict)

    def full_tensors(self) -> dict[str, torch.Tensor]:
        """Whole copies of all parameters and buffers by (first) name; every rank must call this."""
        named: dict[str, torch.Tensor] = dict(self.module.named_parameters())
        named.update(self.module.named_buffers())
        return self._store.gather(self._runtime, named)

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """Whole copies of the gradients that there are, by parameter; every rank must call this."""
        named = {n: p.grad for n, p in self.module.named_parameters() if p.grad is not None}
        return self._store.gather(self._runtime, named)

    def use_randomness(self, randomness: Randomness) -> None:
        """Draw random numbers from ``randomness`` from now on (a restored run, a verification)."""
        self._runtime.randomness = randomness

    def parameter_shards(self) -> dict[str, LocalTensor]:
        """Name to layout of every parameter (tied names included)."""
        return dict(self._store.shards)

    def _compile(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, training: bool) -> Plan:
        from hetspmd.compiler import compile_plan

        return compile_plan(
            self.module, args, kwargs, self.cluster, loss=self._loss, training=training, **self._options
        )

    def _entry(self, plan: Plan, program: LocalProgram) -> _Entry:
        graph = plan.graph
        runner = Runner(program, self._runtime, graph.loss, gather=self.gather_outputs)
        return _Entry(
            plan, self._mode(), expected(graph), runner, spec_from_text(graph.output_spec),
            [slot(self.module, p.name) for p in graph.parameters],
            [slot(self.module, b.name) for b in graph.buffers],
            [i.path for i in graph.inputs],
        )  # fmt: skip

    def _mode(self) -> _Mode:
        return (
            tuple(m.training for m in self.module.modules()),
            tuple(p.requires_grad for p in self.module.parameters()),
        )

    def _select(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[_Entry, list[torch.Tensor]]:
        mode = self._mode()
        backward = torch.is_grad_enabled() and any(mode[1])
        why = ""
        for entry in self._entries:
            inputs, why = match(entry.expected, args, kwargs)
            if inputs is None or entry.mode != mode:
                continue
            if entry.differentiable or not backward or entry.plan.graph.loss is None:
                return entry, inputs
        entry = self._new_entry(args, kwargs, backward=backward, why=why)
        inputs, why = match(entry.expected, args, kwargs)
        if inputs is None:
            raise BatchMismatchError(f"the batch cannot be planned for: {why}")
        return entry, inputs

    def _new_entry(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, backward: bool, why: str
    ) -> _Entry:
        def make() -> Plan:
            from hetspmd.compiler import compile_plan

            known = {k: v for k, v in self._options.items() if k != "constraints"}

            def compiled(training: bool) -> Plan:
                return compile_plan(
                    self.module, args, kwargs, self.cluster, loss=self._loss, training=training,
                    like=self.plan, **known,
                )  # fmt: skip

            with self._store.whole_shapes(self.device):
                if not backward or self.module.training:
                    return compiled(backward)
                try:
                    return compiled(True)
                except TraceError:
                    return compiled(False)

        try:
            plan = agreed_plan(self._everyone, make)
        except HetspmdError as error:
            raise BatchMismatchError(
                f"this batch or mode is not the plan's ({why or 'the mode of the model changed'}) and no "
                f"plan could be made for it: {error}"
            ) from error
        program = lower_plan(plan, self.rank, self.device)
        self._check_shards(plan, program.parameters)
        entry = self._entry(plan, program)
        self._entries.append(entry)
        return entry

    def _check_shards(self, plan: Plan, parameters: tuple[LocalTensor, ...]) -> None:
        for parameter, layout in zip(plan.graph.parameters, parameters, strict=True):
            stored = self._store.shards.get(parameter.name)
            if stored is None or (stored.form, stored.extents) != (layout.form, layout.extents):
                raise BatchMismatchError(
                    f"the new plan stores {parameter.name} in other shards than the first"
                )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError(
            "a HAP module is tied to its process group and cannot be copied; use full_state_dict()"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a HAP module is tied to its process group and cannot be pickled; use full_state_dict()"
        )
