"""The traced function: model and loss as one module from flat tensors to ``(loss, *other outputs)``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from hetspmd.errors import TraceError
from hetspmd.trace.assignments import Assignments, named_writes
from hetspmd.trace.checkpoints import Checkpoints
from hetspmd.trace.compat.trees import flatten, flatten_with_names, unflatten
from hetspmd.trace.containers import is_cache
from hetspmd.trace.host.watch import HostWatch
from hetspmd.trace.losses import Loss, find_loss, no_loss_text
from hetspmd.trace.slots import Slots

_LITERALS = (type(None), bool, int, float, str)


class Step(nn.Module):
    """``forward(*tensors)`` rebuilds the batch, runs the model and returns the loss first (if any).

    After a call, ``slots`` lists the leaves of the model's output and, behind them, the tensors that the model is
    left with (``watch``): an index into the returned tensors, or a literal; ``output_spec`` is the output's pytree
    spec. A cache of keys and values comes back as None, since it is no result of a training step: ``dropped`` maps
    its place in the output to its class. ``updates`` maps what the model's parameters and buffers are given in
    other ways than by ops, by name, to an index into the returned tensors; they come behind the others, and at
    last what cached functions keep, by index in ``kept`` with the function. ``changed`` maps inputs
    that are written to, by position, to the line that does so; ``checkpoints`` are the regions that the model would
    recompute. ``detached`` are the indices in ``slots`` of tensors that the model returns without a gradient, where
    gradients are wanted.
    """

    _loss: Loss | None

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | None,
        leaves: list[Any],
        spec: Any,
        *,
        training: bool,
        watch: HostWatch,
    ) -> None:
        super().__init__()
        self._watch = watch
        self.model = model
        self.__dict__["_loss"] = loss  # it may be a module, which is no part of the model
        self._leaves = leaves
        self._spec = spec
        self.wants_gradients = training
        self.slots: list[tuple[int | None, Any]] = []
        self.detached: set[int] = set()
        self.output_spec: Any = None
        self.has_loss = False
        self.dropped: dict[str, str] = {}
        self.updates: dict[str, int] = {}
        self.changed: dict[int, str] = {}
        self.cached_outputs: dict[int, str] = {}
        self.checkpoints = Checkpoints(model)
        self._places = Slots(model)

    def call_on(self, tensors: Sequence[torch.Tensor]) -> Callable[[], Any]:
        """What runs the model, or the loss function, on a batch with these tensors."""
        iterator = iter(tensors)
        leaves = [next(iterator) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]
        args, kwargs = unflatten(leaves, self._spec)
        called = partial(self._loss, self.model) if self._loss else self.model
        return partial(called, *args, **kwargs)

    def rehearsed(self, tensors: Sequence[torch.Tensor]) -> Any:
        """What the model, or the loss function, returns for a batch with these tensors; slots are as before."""
        with self._places.restored():
            return self.call_on(tensors)()

    def _run(self, call: Callable[[], Any]) -> Any:
        """What a call returns; the regions that it would recompute have run twice."""
        output = call()
        self.checkpoints.run_again()
        return output

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = len(tensors) - len(self._watch.numbers)
        batch, numbers = tensors[:count], tensors[count:]
        with self._places.restored():
            self.checkpoints = Checkpoints(self.model, self._watch.counted)
            with Assignments(self.model, batch) as assignments, named_writes(), self.checkpoints.plain():
                output = self._watch.run(partial(self._run, self.call_on(batch)), numbers)
            updates = self._places.updates(assignments.assigned)
        self.changed = assignments.changed
        returned = self._returned(output)
        self.updates = {name: len(returned) + i for i, name in enumerate(updates)}
        returned += (value.detach() for value in updates.values())
        self.cached_outputs = {}
        for name, cached in self._watch.cached_tensors.items():
            self.cached_outputs |= dict.fromkeys(range(len(returned), len(returned) + len(cached)), name)
            returned += (tensor.detach() for tensor in cached)
        return tuple(returned)

    def _returned(self, output: Any) -> list[torch.Tensor]:
        """The loss, if there is one, the other tensors of the model's output, and those that the model is
        left with."""
        loss = find_loss(output, self._loss)
        if loss is None and self.wants_gradients:
            raise TraceError(no_loss_text(output, self._loss))
        self.has_loss = loss is not None
        if self.wants_gradients:
            self._watch.untrained.look(loss)
        flat, self.output_spec = flatten(output)
        returned: list[torch.Tensor] = [] if loss is None else [loss]
        self.slots, self.detached = [], set()
        self.dropped = {}
        for index, leaf in enumerate(flat):
            if not isinstance(leaf, torch.Tensor):
                if not isinstance(leaf, _LITERALS):
                    self._drop(flatten_with_names(output)[index][0], leaf)
                self.slots.append((None, leaf if isinstance(leaf, _LITERALS) else None))
            elif leaf is loss:
                self.slots.append((0, None))
            else:
                if self.wants_gradients and not leaf.requires_grad:
                    self.detached.add(len(self.slots))
                self.slots.append((len(returned), None))
                returned.append(leaf.detach())
        for tensor in self._watch.state_changes.tensors if self._watch.state_changes else ():
            self.slots.append((len(returned), None))
            returned.append(tensor.detach())
        return returned

    def _drop(self, path: str, leaf: Any) -> None:
        """Remember a cache that does not come back; refuse any other object."""
        kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
        if not is_cache(leaf):
            raise TraceError(
                f"the model's output{path} is a {kind}, which cannot come back from a plan; return tensors and "
                "plain values, in containers (dict, tuple, dataclass) or on an object of your own"
            )
        self.dropped[path] = kind
