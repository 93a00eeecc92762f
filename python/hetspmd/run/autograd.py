"""A step of a local program as one node of PyTorch's autograd.

The loss is differentiable with respect to this rank's parameter shards, for any incoming gradient (loss
scaling works). Other floating-point outputs are attached to the node only to refuse: a gradient that reaches
one raises GradientError instead of being lost.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

import torch
from torch import fx

from hetspmd.dist import collectives
from hetspmd.dist.runtime import Runtime
from hetspmd.errors import GradientError, NanError, RankFailedError
from hetspmd.lower.local_program import LocalProgram, LocalTensor
from hetspmd.placement import PARTIAL, is_sharded, shard, sharded_dim
from hetspmd.run import anomaly
from hetspmd.run.capture_memory import Held
from hetspmd.run.captured_regions import ANOMALY, Captures
from hetspmd.run.compiled_turns import compiled
from hetspmd.run.shard_tensors import plain
from hetspmd.run.source_location import SourceFinder, annotate
from hetspmd.trace.autocast import without_autocast
from hetspmd.trace.compat.bytecode import left_by_compilers
from hetspmd.trace.compat.tensors import graph_is_kept

NOT_THE_LOSS: Final = (
    "a gradient reached an output of HAP that is not the loss; compute what is differentiated inside the model, or "
    "pass loss= to HAP"
)

ONCE: Final = (
    "create_graph=True asks for gradients that can be differentiated again, and a plan computes them once. Put "
    "what needs them (a gradient penalty, say) into the model or into loss=, where torch.autograd.grad(..., "
    "create_graph=True) is part of the step; optimizers that need second derivatives cannot step a HAP module"
)


class Attends(Protocol):
    """What is told that the backward of a step begins (:class:`hetspmd.run.attendance.Attendance`)."""

    step: int

    def backward(self, step: int, tangent: torch.Tensor) -> None:
        """The backward of a step begins; ``tangent``: what it multiplies the gradients of the loss by."""


class Runner:
    """Runs the forward and backward graphs of a local program.

    ``loss`` is the loss's tensor id. ``outputs`` lists the positions among the program's outputs that are
    returned beside it: each tensor once. ``gather`` makes all of them whole on every rank. ``origin`` names the
    model's modules in errors. ``compile``: what ``torch.compile`` is given for the ops between communications;
    None to leave them as they are. ``captures``: how the graphs run captured, if they do. ``before_gradients`` is
    called when a backward begins.
    """

    def __init__(
        self,
        program: LocalProgram,
        runtime: Runtime,
        loss: int | None,
        *,
        gather: bool = False,
        origin: SourceFinder | None = None,
        compile: Mapping[str, Any] | None = None,
        captures: Captures | None = None,
    ) -> None:
        self.origin, self.captures = origin, captures
        self.attendance: Attends | None = None
        self.program, self.runtime, self.loss, self.gather = program, runtime, loss, gather
        seen: dict[int, int] = {}
        for position, output in enumerate(program.outputs):
            if output.tensor != loss:
                seen.setdefault(output.tensor, position)
        self.outputs = tuple(seen.values())
        self.before_gradients: Callable[[], None] | None = None
        self._copies: dict[int, tuple[fx.GraphModule, fx.GraphModule]] = {}
        self._compiled: dict[fx.GraphModule, fx.GraphModule] = {}
        if compile is not None and not runtime.idle:
            busy = (runtime.everyone or runtime.communicator).busy
            self._compiled = compiled(program, compile, busy, None if origin is None else origin.graph)

    def run(
        self,
        parameters: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor | None, dict[int, torch.Tensor]]:
        """One forward pass: the loss (None without one) and the outputs by tensor id.

        Buffers and parameters that the model updates are overwritten. With gradients enabled the results are part
        of the autograd graph.
        """
        self.runtime.randomness.begin_step()
        if torch.is_grad_enabled() and any(p.requires_grad for p in parameters):
            results = _Step.apply(self, buffers, inputs, *parameters)
        else:
            with torch.no_grad():
                stored = plain(parameters)
                held = self.begin(stored, buffers)
                results, _ = self.forward(stored, buffers, inputs, held, alone=True)
        loss, *outputs = results
        ids = [self.program.outputs[i].tensor for i in self.outputs]
        return (None if self.loss is None else loss), dict(zip(ids, outputs, strict=True))

    def begin(self, parameters: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> Held | None:
        """The captured step that begins, of which :meth:`forward` is next; None where it runs as it is."""
        if self.captures is None:
            return None
        if self.origin is not None and anomaly.is_looked_for():
            self.captures.without(ANOMALY)
            return None
        return self.captures.begin(self.program.forward, parameters, buffers)

    def forward(
        self,
        parameters: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        held: Held | None = None,
        *,
        alone: bool = False,
    ) -> tuple[tuple[torch.Tensor | None, ...], list[torch.Tensor]]:
        """``((loss, *outputs), saved)``; buffers are updated, and parameters that the model itself writes to.

        ``held``: the step that :meth:`begin` has begun with these tensors; ``alone``: no backward follows."""
        if held is None or self.captures is None:
            return self._forward(parameters, buffers, inputs, None)
        try:
            return self._forward(parameters, buffers, held.inputs(inputs), held)
        finally:
            if alone:
                held.release()
            self.captures.leave()

    def _forward(
        self,
        parameters: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        held: Held | None,
    ) -> tuple[tuple[torch.Tensor | None, ...], list[torch.Tensor]]:
        tensors = (*parameters, *buffers, *inputs)
        graph = self._running(self.program.forward, held)
        with self._named(graph):
            loss, outputs, updates, saved = graph(self.runtime, *tensors)
        loss = self._shared_loss(loss)
        foreign = {_storage(t) for t in tensors}
        results: list[torch.Tensor | None] = [loss]
        for position in self.outputs:
            value = self._shared_output(outputs[position], self.program.outputs[position])
            results.append(value.clone() if _storage(value) in foreign else value)
        if loss is not None and _storage(loss) in foreign:
            results[0] = loss.clone()
        if held is not None:
            results = held.copies(results)
        if updates:
            of = self.program
            targets = [buffers[i] for i in of.updated] + [parameters[i].data for i in of.written]
            parts = [of.buffers[i] for i in of.updated] + [of.parameters[i] for i in of.written]
            changed = {_storage(target) for target in targets}
            saved = [t.clone() if _storage(t) in changed else t for t in saved]
            values = [u.clone() if _storage(u) in changed else u for u in updates]
            for target, part, value in zip(targets, parts, values, strict=True):
                target.copy_(part.slice(value))
        return tuple(results), saved

    def send(self, results: Mapping[int, torch.Tensor]) -> None:
        """Send idle devices the loss and outputs, by tensor id, of a step that the only active one has run."""
        with torch.no_grad():
            if self.loss is not None:
                self._shared_loss(results[self.loss].detach())
            for position in self.outputs:
                layout = self.program.outputs[position]
                self._shared_output(results[layout.tensor].detach(), layout)

    def _shared_loss(self, loss: torch.Tensor | None) -> torch.Tensor | None:
        if loss is None:
            return None
        with self._shared("the loss of the step"):
            return self.runtime.share(loss)

    def _shared_output(self, value: torch.Tensor, layout: LocalTensor) -> torch.Tensor:
        with self._shared(f"output {self._name(layout.tensor)} of the step"):
            return self._returned(value, layout)

    def _returned(self, value: torch.Tensor, layout: LocalTensor) -> torch.Tensor:
        """An output as the caller gets it: this rank's rows (an idle rank has none), or whole."""
        if layout.form == shard(0) and not self.gather:
            return value
        if self.runtime.idle:
            return self.runtime.share(value.new_empty(layout.shape))
        if layout.form == PARTIAL:
            value = collectives.start_all_reduce(self.runtime, value).wait()
        elif is_sharded(layout.form):
            dim = sharded_dim(layout.form)
            value = collectives.start_all_gather(self.runtime, value, dim, layout.extents).wait()
        return self.runtime.share(value)

    def _running(self, graph: fx.GraphModule, held: Held | None = None) -> fx.GraphModule:
        """What runs for a local graph: if torch is asked to find NaN, the copy of it that does; compiled, or
        captured in a step that is held, if it is to be (a copy that is recorded is not); itself."""
        if self.origin is None or not anomaly.is_looked_for():
            if self.captures is not None:
                return self.captures.graph(graph, held)
            return self._compiled.get(graph, graph)
        entry = self._copies.get(id(graph))
        if entry is None or entry[0] is not graph:
            rank = (self.runtime.everyone or self.runtime.communicator).rank
            entry = self._copies[id(graph)] = graph, anomaly.watched(graph, self.origin, rank)
        return entry[1]

    def _name(self, tensor: int) -> str:
        return f"tensor {tensor}" if self.origin is None else self.origin.graph.tensors[tensor].name

    @contextmanager
    def _shared(self, what: str) -> Iterator[None]:
        """A rank that fails while ``what`` is handed to the callers is reported in it."""
        try:
            yield
        except RankFailedError as error:
            error.where = error.where or what
            raise

    @contextmanager
    def _named(self, graph: fx.GraphModule) -> Iterator[None]:
        """Without autocast; an error in ``graph`` names the module of the model, and the other ranks are told."""
        try:
            with without_autocast(self.program.device.type):
                yield
        except Exception as error:
            place = None if self.origin is None else self.origin.of_error(error, graph)
            if isinstance(error, RankFailedError):
                error.where = error.where or str(place or f"the {type(graph).__name__.lower()} of the step")
            else:
                if not isinstance(error, NanError):  # which says it itself
                    annotate(error, place)
                (self.runtime.everyone or self.runtime.communicator).report(error)
            raise

    def backward(
        self, tangent: torch.Tensor, saved: list[torch.Tensor | None], held: Held | None = None
    ) -> list[torch.Tensor]:
        """The gradients of ``program.differentiable``; no two overlap (those of a bucket lie side by side in one
        storage). Empties ``saved``. ``held`` is the step that has saved them, where it runs captured."""
        assert self.program.backward is not None
        if self.before_gradients is not None:
            self.before_gradients()
        given = [tangent, *(t for t in saved if t is not None)]
        taken = {_storage(t): weakref.ref(t.untyped_storage()) for t in given}
        del given
        captured = held is not None and self.captures is not None and self.captures.enter()
        try:
            graph = self._running(self.program.backward, held if captured else None)
            with self._named(graph):
                values = graph(self.runtime, tangent, saved)
            if held is not None:
                values = held.copies(values)
        finally:
            if captured and self.captures is not None:
                self.captures.leave()
        gradients: list[torch.Tensor] = []
        parts: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for gradient in values:
            key, (start, end) = _storage(gradient), _extent(gradient)
            beside = parts.setdefault(key, [])
            # Where something saved has died, its memory may be a gradient's.
            is_taken = key in taken and taken[key]() is not None
            if is_taken or any(start < e and s < end for s, e in beside):
                gradients.append(gradient.clone())
            else:
                gradients.append(gradient)
                beside.append((start, end))
        return gradients


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    """Identifies memory; tensors of no elements have none of their own."""
    storage = tensor.untyped_storage()
    return (storage.data_ptr(), 1) if storage.nbytes() else (id(tensor), 0)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The elements of its storage, first and behind the last, between which all of the tensor's lie."""
    start = int(tensor.storage_offset())
    if not tensor.numel():
        return start, start
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return start, start + 1 + sum((size - 1) * int(stride) for size, stride in steps)


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        runner: Runner,
        buffers: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        *shards: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        parameters = plain(shards)
        held = runner.begin(parameters, buffers)
        results, saved = runner.forward(parameters, buffers, inputs, held)
        ctx.runner, ctx.held = runner, held
        ctx.step = 0 if runner.attendance is None else runner.attendance.step
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(t for t in results if t is not None and not (t.is_floating_point() or t.is_complex()))
        )
        # Memory that others can write to is saved under autograd's version check, the rest without, so that
        # backward can free it as it goes.
        shared = {
            _storage(t) for t in (*parameters, *buffers, *inputs, *(t for t in results if t is not None))
        }
        checked = [_storage(t) in shared for t in saved]
        ctx.save_for_backward(*(t for t, c in zip(saved, checked, strict=True) if c))
        ctx.box = [None if c else t for t, c in zip(saved, checked, strict=True)]
        return results

    @staticmethod
    @left_by_compilers
    def backward(ctx: Any, tangent: torch.Tensor | None, *others: torch.Tensor | None) -> Any:
        runner: Runner = ctx.runner
        if torch.is_grad_enabled():  # in a backward that is what create_graph is
            raise GradientError(ONCE)
        if any(g is not None for g in others):
            raise GradientError(NOT_THE_LOSS)
        none: list[torch.Tensor | None] = [None] * (3 + len(runner.program.parameters))
        if tangent is None:
            return tuple(none)
        if runner.program.backward is None:
            raise GradientError(
                "the plan of this batch computes no gradients (it was made for evaluation, or the model gave "
                "no loss); call the model with labels, under train() or with gradients enabled"
            )
        if ctx.box is None:
            raise RuntimeError(
                "trying to backward through a HAP step a second time; its saved tensors are freed. Pass "
                "retain_graph=True to the first backward"
            )
        if runner.attendance is not None:
            runner.attendance.backward(ctx.step, tangent)
        # What is a result as well knows of this step, which a compiler would look at.
        checked = iter([tensor.detach() for tensor in ctx.saved_tensors])
        saved = [next(checked) if t is None else t for t in ctx.box]
        held: Held | None = ctx.held
        if not (kept := graph_is_kept()):
            ctx.box = None
        gradients = runner.backward(tangent, saved, held)
        if held is not None and not kept:
            held.release()
        for index, gradient in zip(runner.program.differentiable, gradients, strict=True):
            if ctx.needs_input_grad[3 + index]:
                none[3 + index] = gradient
        return tuple(none)
