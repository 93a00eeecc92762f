"""Who failed, when a collective does: the ranks tell each other, as far as they still can.

A rank that waits looks up every half second; it gives up when its primitive fails, when another rank has left
a note, when the process of another rank has died, or when ``timeout`` is nearly over and no rank says that it is
busy (compiling). Then it leaves a note itself, reads the others', and names, in this order,

    the ranks that have raised an error (with its text), the ranks whose processes have died or are stopped,
    the rank that hosts the store if that does not answer, the ranks that have left no note.

Notes are on a board (:mod:`hetspmd.dist.board`). Nothing runs, and nothing is sent, while nobody waits for long.
"""

from __future__ import annotations

import json
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hetspmd.errors import HetspmdError, RankFailedError
from hetspmd.dist.board import Board, give_up
from hetspmd.dist.processes import Process, state_of
from hetspmd.dist.uncaught import before_the_end

if TYPE_CHECKING:
    from hetspmd.trace.compat.groups import Store

_LOOK = 0.5
"""Seconds between two looks of a rank that waits."""
_STALL = 15.0
"""Seconds after which it is looked whether all ranks wait for each other."""
_OVER = "over"


class FailureDetector:
    """This rank's view of the ranks ``processes``.

    ``prefix`` is of this set of ranks alone; ``host`` is the rank that hosts the store, None if none of them does.
    ``timeout`` is in seconds, from the beginning of a wait to its error. ``place`` says what this rank was called
    for, for errors. A wait calls ``alarm`` at every look, and after a while ``stalled`` with the time of its
    beginning; what they raise ends it.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        rank: int,
        processes: Sequence[Process],
        host: int | None,
        timeout: float,
    ) -> None:
        self.rank, self.processes, self.host, self.timeout = rank, tuple(processes), host, timeout
        self._patience = timeout - min(0.5 * timeout, 9.0)
        self._grace = min(0.1 * timeout, 3.0)
        self._stall = min(0.5 * self._patience, _STALL)
        self.board = Board(store, prefix, rank, len(self.processes), min(timeout / 6.0, 5.0))
        self.alarm: Callable[[], None] | None = None
        self.stalled: Callable[[float], None] | None = None
        self.place: Callable[[], str] = str
        self._look = min(_LOOK, timeout / 20.0)
        self._slice = timedelta(seconds=self._look)
        self._noted = False
        self._notes: dict[int, dict[str, str]] = {}
        self._beats: dict[int, bytes] = {}
        self._looked = 0.0
        _remember(self)

    def wait(self, work: Any) -> None:
        """Wait for c10d's work on CPU tensors. Raises RankFailedError."""
        begin = time.monotonic()
        while True:
            try:
                work.wait(self._slice)
                return
            except RuntimeError as error:
                if work.is_completed():
                    self.finish(work, begin)
                    return
                if self.alarm is not None:
                    self.alarm()
                if self.stalled is not None and time.monotonic() - begin > self._stall:
                    self.stalled(begin)
                if why := self._trouble(time.monotonic() - begin):
                    raise self.failure(why, time.monotonic() - begin) from error

    def finish(self, work: Any, begin: float | None = None) -> None:
        """Wait without looking up: for completed work, and for that of a GPU, which does not block the host."""
        try:
            work.wait()
        except RuntimeError as error:
            waited = 0.0 if begin is None else time.monotonic() - begin
            raise self.failure(_brief(error), waited) from error

    def failure(self, why: str, waited: float) -> RankFailedError:
        """Tell the others, ask them, and say who it was; ``why`` is what this rank has seen itself."""
        began = time.monotonic()
        self.note("waits", why)
        while True:
            self._read_notes()
            ranks, reason = self._verdict(final=False)
            if ranks or time.monotonic() - began > self._grace:
                break
            time.sleep(self._look / 4)
        if not ranks:
            ranks, reason = self._verdict(final=True)
        # The others look up meanwhile, while this rank is still there and not one more that has died.
        time.sleep(max(0.0, 2.5 * self._look - (time.monotonic() - began)))
        return RankFailedError(ranks, reason, self.rank, waited, why, call=self.place())

    def note(self, kind: str, text: str) -> None:
        """Leave a note, the first one of this rank only: "waits" after a failed wait, "raised" after an error,
        "ended" before the process ends otherwise."""
        if self._noted:
            return
        self._noted = True
        content = json.dumps({"kind": kind, "text": text})

        def send() -> bool:
            board.store.set(board.key("note", self.rank), content)
            board.store.set(trouble, "1")
            return bool(board.store.check([trouble]))  # set does not wait for an answer

        board, trouble = self.board, self._trouble_key
        board.ask(send)
        if kind == "raised" and self.host == self.rank:
            self._linger()

    def explain(self, error: BaseException) -> None:
        """Say in a note of an error of torch, in a collective of the program's own, what the other ranks had met."""
        if self._noted or isinstance(error, HetspmdError) or not isinstance(error, RuntimeError):
            return
        self._read_notes()
        told = [
            f"rank {r} had {'failed' if note['kind'] == 'raised' else 'waited'} ({note['text']})"
            for r, note in sorted(self._notes.items())
            if note["kind"] != "ended"
        ]
        if told:
            error.add_note(
                f"hetspmd: before, {', '.join(told)}. If they waited for this rank: it has called alone what all "
                "ranks call (a dist.barrier(), under `if rank == 0:` or after a break), or left the loop before them"
            )

    def _linger(self) -> None:
        """The store must outlive this rank's note: until the others have answered it, or for the grace."""
        end = time.monotonic() + self._grace
        while len(self._notes) < len(self.processes) - 1 and time.monotonic() < end:
            time.sleep(self._look)
            self._read_notes()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Within the context the others wait for this rank as long as it takes."""
        over = threading.Event()
        board, key = self.board, self.board.key("busy", self.rank)

        def beat() -> None:
            count = 0
            try:
                while not over.wait(0.0 if count == 0 else self._patience / 4):
                    count += 1
                    board.store.set(key, str(count))
                board.store.set(key, _OVER)
            except RuntimeError:
                return  # the store is lost, and with it the others' patience

        thread = threading.Thread(target=beat, daemon=True, name="hetspmd busy")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(board.limit)
            if thread.is_alive():
                give_up(thread)

    def _trouble(self, waited: float) -> str:
        """Why not to wait on, "" if there is no reason."""
        gone = [r for r in self._others() if self._state(r) == "gone" and r not in self._notes]
        if gone:
            return f"a process has died while rank {self.rank} waited for it"
        if self.board.ask(lambda: self.board.store.check([self._trouble_key])):
            self._read_notes()
            if self._notes:
                return "another rank has failed"
        if waited < 0.5 * self._patience or self._someone_is_busy() or waited < self._patience:
            return ""
        return f"nothing came in {waited:.1f} s"

    def _someone_is_busy(self) -> bool:
        """Whether another rank has said so lately; asked again only after the time of nearly two beats."""
        if time.monotonic() - self._looked < 0.45 * self._patience:
            return True
        before, self._beats = self._beats, self.board.read("busy")
        self._looked = time.monotonic()
        return any(beat.decode() != _OVER and before.get(r) != beat for r, beat in self._beats.items())

    def _verdict(self, *, final: bool) -> tuple[tuple[int, ...], str]:
        """The ranks that failed, and how. What only the lack of notes tells is said in the ``final`` one."""
        raised = [(r, n["text"]) for r, n in sorted(self._notes.items()) if n["kind"] == "raised"]
        if raised:
            return tuple(r for r, _ in raised), "; ".join(f"rank {r} failed: {text}" for r, text in raised)
        ended = [(r, n["text"]) for r, n in sorted(self._notes.items()) if n["kind"] == "ended"]
        if ended:
            return tuple(r for r, _ in ended), "; ".join(f"rank {r} has ended, after {text}" for r, text in ended)
        mute = [r for r in self._others() if r not in self._notes]
        for state, text in (("gone", "has died"), ("stopped", "is stopped")):
            ranks = [r for r in mute if self._state(r) == state]
            if ranks:
                named = (f"rank {r} (process {self.processes[r].pid}) {text}" for r in ranks)
                return tuple(ranks), "; ".join(named)
        if not final:
            return (), ""
        if self.board.silent and self.host in mute:
            assert self.host is not None
            return (
                self.host,
            ), f"rank {self.host}, which hosts the store of the process group, does not answer"
        alive = [r for r in mute if self._state(r) == "runs"]
        if mute and alive == mute:
            one = f"rank {mute[0]}" if len(mute) == 1 else f"one of ranks {mute}"
            return tuple(mute), f"{one} is alive but does not come: it is busy between two steps, or hangs"
        if len(mute) == 1:
            return tuple(
                mute
            ), f"rank {mute[0]} does not come and has left no word: it is dead, hangs or is busy"
        if mute:
            return tuple(mute), f"of ranks {mute}, which have left no word, one is dead, hangs or is busy"
        return (), "every rank waits for another: the network between them failed"

    @property
    def _trouble_key(self) -> str:
        return f"{self.board.prefix}/trouble"

    def _others(self) -> list[int]:
        return [r for r in range(len(self.processes)) if r != self.rank]

    def _state(self, rank: int) -> str:
        return state_of(self.processes[rank], self.processes[self.rank])

    def _read_notes(self) -> None:
        for rank, text in self.board.read("note").items():
            self._notes.setdefault(rank, json.loads(text))


def _brief(error: RuntimeError) -> str:
    """A backend's message without the place in its own source and its advice."""
    text = re.sub(r"^\[[^\]]*\]\s*", "", str(error).strip().split("\n")[0])
    return text.partition(". This is typically")[0].rstrip(".")


_WATCHES: list[weakref.ref[FailureDetector]] = []


def _remember(watch: FailureDetector) -> None:
    """An exception that ends this process leaves a note."""
    before_the_end(_leave_notes)
    _WATCHES[:] = [ref for ref in _WATCHES if ref() is not None]
    _WATCHES.append(weakref.ref(watch))


def _leave_notes(error: BaseException) -> None:
    for ref in _WATCHES:
        detector = ref()
        if detector is not None:
            detector.explain(error)
            detector.note("raised", f"{type(error).__name__}: {error}".strip().split("\n")[0])
