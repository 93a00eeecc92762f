"""The roll call: before a rank does what concerns all ranks, it tells the others what that is, and on what.

A program is right only if all ranks run the same one, at the same step, on the same batch and with the same
replicated parameters; where they part, collectives hang, fail in the backend, or add up what does not belong
together. So every call of a HAP module says, in a round of the channel (:mod:`hetspmd.dist.channel`),

    what it is ("step 17 of module 0", "full_state_dict()") and in which plan and mode it runs,
    a digest of each input, and one of a part of the replicated tensors,
    what it did to its parameters since the step before (:mod:`hetspmd.dist.doings`).

The words travel while the step runs, and are looked at when it has run, before the loss is returned, and by a
rank that waits in a collective for long. A rank that is about to do other things than in the step before (another
plan or mode, a state dict, a step after one whose backward was left out) first waits for the others' words: as
long as one of them does what it did before, or does the same, no two ranks are ever in collectives that do not
belong together. Nor may they be: a collective of another size than the others' ends the process inside of gloo, and
hangs in NCCL, and no rank says why. So whatever is no step waits, also what belongs to many steps (a norm of all
gradients, the skipping of a step with inf or NaN); a word has room for the number that such a call shares, so that
ranks on CPUs need no collective beside it.

Ranks that wait for each other at different places, so that the words of one never come (it left out a backward that
the others wait in), are told so by what they write on a board (:mod:`hetspmd.dist.stalled`).
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final
from zlib import crc32

from hetspmd.dist.channel import Answer, Channel
from hetspmd.dist.digest import join
from hetspmd.dist.doings import Doing
from hetspmd.dist.parting import Told, parted
from hetspmd.errors import CollectiveMismatchError

_KEPT: Final = 16
"""Events that are remembered."""


@dataclass(frozen=True)
class RollCall:
    """What a rank says.

    ``what`` names the call and ``key`` the plan and mode; ``describe`` says in words in which mode and on which
    shapes. ``inputs`` are (path, digest) of the batch of step ``of``, ``replicas`` (name, digest, projection,
    square) of pieces of replicated tensors then: None on a rank that holds none. ``tolerances``: of each by what
    part of its norm it may differ between ranks; 0.0: digests must be equal, and where those of another piece are
    not, its projections are compared. ``arguments`` of the call must be the
    same on every rank, and so must ``doings``: what the rank did since the step before. ``shared`` is a number of
    64 bits that the others want to know.
    """

    what: str
    key: str = ""
    describe: Callable[[], str] = str
    of: int = 0
    inputs: tuple[tuple[str, int], ...] = ()
    replicas: tuple[tuple[str, int, float, float], ...] | None = None
    tolerances: tuple[float, ...] = ()
    arguments: tuple[str, ...] = ()
    doings: tuple[Doing, ...] = ()
    shared: int = 0

    def numbers(self) -> list[int]:
        """What always travels: digests of what is called and on what, then of replicated tensors, if any."""
        words = crc32("\n".join((self.what, self.key, *self.arguments)).encode())
        said = words, self.of, join(d for _, d in self.inputs)
        did = join(doing.number for doing in self.doings)
        if self.replicas is None:
            return [*said, 0, 0, 0, did, self.shared]
        pieces = list(zip(self.replicas, self.tolerances, strict=True))
        exact = join(r[1] for r, _ in pieces)
        scaled = sum(r[2] / (tolerance * math.sqrt(r[3])) for r, tolerance in pieces if tolerance and r[3])
        return [*said, 1, exact, *struct.unpack("<q", struct.pack("<d", scaled)), did, self.shared]

    def told(self) -> dict[str, Any]:
        """All of it, of what JSON knows."""
        return {
            "what": self.what,
            "key": self.key,
            "mode": self.describe(),
            "of": self.of,
            "arguments": list(self.arguments),
            "inputs": [list(i) for i in self.inputs],
            "replicas": None
            if self.replicas is None
            else [
                [name, digest, _bits(projection), _bits(square)]
                for name, digest, projection, square in self.replicas
            ],
            "tolerances": list(self.tolerances),
            "doings": [doing.told() for doing in self.doings],
        }


def _bits(number: float) -> str:
    """JSON knows no NaN."""
    return struct.pack("<d", number).hex()


@dataclass
class Roll:
    """The roll of one set of ranks, on this one. Several HAP modules of one process group share it.

    ``parted``: after how many events the ranks were found to have parted. ``last`` is what this rank did last, in
    which plan and mode: doing the same again needs no waiting.
    """

    channel: Channel
    modules: int = 0
    events: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT))
    count: int = 0
    last: str = ""
    parted: int = -1
    _answer: tuple[RollCall, Answer] | None = None
    _looking: bool = False

    def __post_init__(self) -> None:
        self.channel.listen(self.look, self.place)

    def start(self, call: RollCall) -> None:
        """Say it, and go on. The words before are looked at first."""
        self.settle()
        self.happens(call.what)
        self._answer = call, self.channel.start(call.numbers(), call.told)

    def meet(self, call: RollCall) -> list[int]:
        """Say it, and go on when all ranks have said the same; what each of them shares."""
        self.start(call)
        return self.settle()

    def happens(self, event: str) -> None:
        """Remember what this rank does, for messages."""
        self.count += 1
        self.events.append(event)

    def place(self) -> str:
        """What this rank did last, or does."""
        return self.events[-1] if self.events else "HAP(...)"

    def look(self) -> None:
        """Look at the others' words if they are here."""
        if self._answer is not None and not self._looking and self._answer[1].ready():
            self.settle()

    def stalled(self, begin: float) -> None:
        """Look whether all ranks wait for each other, this one since ``begin``. Raises CollectiveMismatchError, on
        every rank."""
        if text := self.channel.stalled(begin, self.place()):
            self.parted = self.count
            raise CollectiveMismatchError(text)

    def settle(self) -> list[int]:
        """Wait for the others' words; what each of them shares. Raises BatchMismatchError, ParameterMismatchError or
        CollectiveMismatchError, on every rank alike, if they do not say the same."""
        if self._answer is None or self._looking:
            return []
        _, answer = self._answer
        self._looking = True
        try:
            numbers = answer.numbers()
            self._answer = None
            if not _alike(numbers):
                told = [None if said is None else Told.of_json(said) for said in answer.objects()]
                error = parted(told, self.channel.rank)
                if error is not None:
                    self.parted = self.count
                    raise error
            return [said[-1] for said in numbers]
        finally:
            self._looking = False


def _alike(numbers: list[list[int]]) -> bool:
    """Whether all ranks said the same; ranks that hold no replicated tensors say nothing of them."""
    if any(said[:3] != numbers[0][:3] or said[6] != numbers[0][6] for said in numbers):
        return False
    holding = [said for said in numbers if said[3]]
    if len({said[4] for said in holding}) > 1:
        return False
    scaled = [struct.unpack("<d", struct.pack("<q", said[5]))[0] for said in holding]
    return not scaled or max(scaled) - min(scaled) <= 1.0 or all(map(math.isnan, scaled))
