"""How a HAP module takes part in the roll call (:mod:`hetspmd.dist.roll`): what it says, and when it waits.

Digests of a GPU's tensors are read when they are there: they are said one step later, so that the host never waits
for the device. Those of the first step of every plan are waited for, and so are all before a state dict is made.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from hetspmd.dist.digest import digest
from hetspmd.dist.doings import Doing, backward_onto
from hetspmd.dist.roll import Roll, RollCall
from hetspmd.errors import CollectiveMismatchError, HetspmdError, RankFailedError
from hetspmd.run.replicas import Piece, Replicas, device_kind, factor_of_loss

if TYPE_CHECKING:
    from hetspmd.dist.communicator import Communicator
    from hetspmd.run.entry import Entry

_REMEMBERED_STEPS: Final = 16
"""Steps of which it is known that their backward has run: a script seldom holds the losses of more."""


@dataclass(frozen=True)
class Ranks:
    """What the ranks know of each other from the beginning.

    ``seed``: of random numbers; ``alike``: all devices are of one kind; ``late``: some are GPUs, and digests are
    said a step later; ``check``: steps are compared; ``roll`` is None where there is none.
    """

    seed: int
    alike: bool
    late: bool
    check: bool
    roll: Roll | None


def meet_ranks(communicator: Communicator, device: torch.device, seed: int, check: bool) -> Ranks:
    """Let the ranks know each other; ``check`` is the same on all."""
    answers = communicator.exchange((seed, device_kind(device), device.type))
    roll = communicator.roll() if communicator.world > 1 else None
    modules = 0
    if roll is not None:
        modules, roll.modules = roll.modules, roll.modules + 1
    return Ranks(
        answers[0][0] + modules,
        len({kind for _, kind, _ in answers}) == 1,
        any(kind == "cuda" for *_, kind in answers),
        check,
        roll,
    )


@dataclass(frozen=True)
class _Taken:
    """Digests of one step, which may still be on their way from a device."""

    step: int
    paths: tuple[str, ...]
    pieces: tuple[Piece, ...] | None
    values: torch.Tensor
    ready: Any

    def add_to(self, what: str, key: str, describe: Callable[[], str]) -> RollCall:
        """The call that says them, too."""
        if self.ready is not None:
            self.ready.synchronize()
        numbers: list[int] = self.values.tolist()
        count = len(self.paths)
        replicas = None
        if self.pieces is not None:
            rest = [numbers[i : i + 3] for i in range(count, len(numbers), 3)]
            replicas = tuple(
                (piece.name, total, _float(projected), _float(square))
                for piece, (total, projected, square) in zip(self.pieces, rest, strict=True)
            )
        tolerances = tuple(piece.tolerance for piece in self.pieces or ())
        inputs = tuple(zip(self.paths, numbers[:count], strict=True))
        return RollCall(what, key, describe, self.step, inputs, replicas, tolerances)


def _float(bits: int) -> float:
    (value,) = struct.unpack("<d", struct.pack("<q", bits))
    return float(value)


class Attendance:
    """One HAP module's part in the roll. ``step`` counts its calls of forward, from 1.

    Where steps are not compared (``check_batches=False``) none says a word. Other calls do, and wait.
    """

    def __init__(self, ranks: Ranks, device: torch.device, replicas: Replicas | None) -> None:
        assert ranks.roll is not None
        self._roll, self._late, self._device, self._replicas = ranks.roll, ranks.late, device, replicas
        self._check = ranks.check
        self._hooks: tuple[str, ...] = ()
        self._module = ranks.roll.modules - 1
        self._plans = 0
        self._last = ""
        self._owing = False
        self._behind: _Taken | None = None
        self._doings: list[Doing] = []
        self._first: torch.Tensor | None = None
        self._factors: list[Piece] = []
        self._backwards: deque[int] = deque(maxlen=_REMEMBERED_STEPS)
        self.step = 0

    def unplanned(self, text: str) -> None:
        """This rank has no plan for the batch and mode of its next step: go on if no rank has."""
        self._meet(RollCall(self._name(self.step + 1), "no plan", lambda: text))

    @contextmanager
    def may_refuse(self) -> Iterator[None]:
        """Around what comes before a step: an error of this rank alone is told to the others, which would wait for
        it."""
        if not self._check:
            yield
            return
        try:
            yield
        except (RankFailedError, CollectiveMismatchError):
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if self._roll.parted != self._roll.count:
                with suppress(HetspmdError):
                    self._meet(RollCall(self._name(self.step + 1), "refused", lambda: text))
            raise

    @contextmanager
    def at(
        self,
        entry: Entry,
        inputs: tuple[Sequence[str], Sequence[torch.Tensor]],
        state: str,
        describe: Callable[[], str],
        hooks: tuple[str, ...],
    ) -> Iterator[None]:
        """Around a step of this plan, of whose ``inputs`` (names and tensors) digests are compared; ``state`` is
        what must be the same beside the plan, and so must the ``hooks`` that its backward will call with whole
        gradients."""
        entry.runner.attendance = self
        self._hooks = hooks if self._check else ()
        if not self._check:
            self.step += 1
            self._roll.happens(self._name(self.step))
            yield
            return
        self._first = None if entry.plan.idle else entry.known_parameters.first
        self._begin(entry, inputs, f"gradients {torch.is_grad_enabled()}, {state}", describe)
        yield
        self._owing = torch.is_grad_enabled() and entry.differentiable and not entry.model
        self._roll.settle()

    def _begin(
        self,
        entry: Entry,
        inputs: tuple[Sequence[str], Sequence[torch.Tensor]],
        state: str,
        describe: Callable[[], str],
    ) -> None:
        self.step += 1
        if entry.number < 0:
            entry.number, self._plans = self._plans, self._plans + 1
        first, entry.compared = not entry.compared, True
        what, key = self._name(self.step), f"plan {entry.number}, {state}"
        place = f"{self._module} {key}"
        wait = first or self._owing or place != self._roll.last
        taken = self._take(*inputs, first)
        if self._late and not wait:
            before, self._behind = self._behind, taken
            call = RollCall(what, key, describe) if before is None else before.add_to(what, key, describe)
        else:
            self._catch_up()
            call = taken.add_to(what, key, describe)
        self._owing = False
        if self._doings or self._hooks:
            call = replace(call, doings=tuple(self._doings), arguments=self._hooks)
            self._doings.clear()
        self._roll.start(call)
        self._roll.last = place
        if wait:
            self._roll.settle()

    def backward(self, step: int, tangent: torch.Tensor) -> None:
        """The backward of a step begins. ``tangent``: what it multiplies the gradients of the loss by."""
        if self._check and step in self._backwards:
            self._meet(RollCall(f"another backward of {self._name(step)}"))
        else:
            self._roll.happens(f"the backward of {self._name(step)}")
        if self._first is not None:
            self.did(backward_onto(self._first.grad is not None))
        one = tangent.numel() == 1 and tangent.is_floating_point()
        if one and self._check and self._replicas is not None:
            self._factors.append(factor_of_loss(tangent))
        self._backwards.append(step)
        self._owing = self._owing and step != self.step

    def meet_hooks(self, hooks: tuple[str, ...]) -> None:
        """A backward is about to call these hooks with whole gradients; the step has said so, or it is said
        now."""
        if hooks != self._hooks:
            self._hooks = hooks
            self._roll.meet(RollCall(self._of_module("a backward with other hooks"), arguments=hooks))

    def did(self, doing: Doing) -> None:
        """Say at the next step what this rank does now."""
        if self._check:
            self._doings.append(doing)

    def meet(self, what: str, arguments: tuple[str, ...] = ()) -> None:
        """Go on when all ranks do this, with these arguments."""
        self._meet(RollCall(self._of_module(what), arguments=arguments))

    def share(self, what: str, arguments: tuple[str, ...], own: torch.Tensor) -> torch.Tensor | None:
        """Go on when all ranks do this, as part of a step, with these arguments: every rank's ``own`` (8 bytes),
        in rank order, or None where it is on a GPU, for which the host does not wait."""
        number = 0 if self._late else int(own.view(torch.int64))
        if not self._check:
            arguments = ()
        said = self._roll.meet(RollCall(self._of_module(what), arguments=arguments, shared=number))
        return None if self._late else torch.tensor(said).view(own.dtype).to(own.device)

    def _meet(self, call: RollCall) -> None:
        self._catch_up()
        self._roll.meet(call)
        self._roll.last = call.what

    def _catch_up(self) -> None:
        """Say what is still to be said of the step before."""
        if self._behind is not None:
            taken, self._behind = self._behind, None
            self._roll.meet(taken.add_to(f"what follows {self._name(taken.step)}", "", str))

    def _name(self, step: int) -> str:
        return self._of_module(f"step {step}")

    def _of_module(self, what: str) -> str:
        return what if self._roll.modules == 1 else f"{what} of HAP module {self._module}"

    def _take(self, paths: Sequence[str], inputs: Sequence[torch.Tensor], first: bool) -> _Taken:
        pieces = None if self._replicas is None else (*self._replicas.take(), *self._factors)
        self._factors.clear()
        values = [digest(tensor, self.step, whole=first) for tensor in inputs]
        for piece in pieces or ():
            values += piece.values()
        return _Taken(self.step, tuple(paths), pieces, *_read(values, self._device))


def _read(values: Iterable[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, Any]:
    """Scalars on the CPU, and the event after which they are there (None: they are)."""
    listed = [v.to(device) for v in values]
    if not listed or device.type != "cuda":
        return (torch.stack(listed).cpu() if listed else torch.empty(0, dtype=torch.int64)), None
    there = torch.empty(len(listed), dtype=torch.int64, pin_memory=True)
    there.copy_(torch.stack(listed), non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types there
    event.record(torch.cuda.current_stream(device))
    return there, event
