"""What cached functions give while a step is traced, so that each step has what one device would have cached.

A cached function computes once, and keeps what it has computed whatever changes later. Of the entries that a trace
makes, those with numbers and strings as arguments, besides the object whose method it is, are read by the calls
that give them, and taken out again: every rank makes the call itself, in the first step that needs it. All others
are made once more outside of the trace, at its end, and stay with the rank that traces: what it traces later finds
them. So do tensors that follow from buffers, of which the ranks hold shards.

A result with tensors is computed in the graph as long as its function would give it again; one that it would not
give again is a constant, as it was kept. Each rank sees when its own is cleared or changed in place.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import torch

from hetspmd.errors import TraceError
from hetspmd.trace.compat.tensors import is_traced, outside_modes
from hetspmd.trace.host.cached import Arguments, Owner, Place, arguments_of, entries_of, place_of, results_of
from hetspmd.trace.host.places import Path, Roots, text
from hetspmd.trace.host.plain import fingerprint, is_scalar, outline, tensors_in
from hetspmd.trace.host.reads import untold

_MOST_TRIED: Final = 64
"""Entries of one function that are computed once more before a trace."""
Note = Callable[[Place, str, Any], None]
_Call = tuple[Any, Arguments]


class CachedResults:
    """The cached functions that were found, and the calls to make at the end. ``note`` is told of results by the
    places of their calls; ``owner`` tells where the objects lie whose methods they are."""

    def __init__(self, roots: Roots, note: Note, owner: Owner) -> None:
        self._roots, self._note, self._owner = roots, note, owner
        self._known: dict[int, tuple[str, Path, Any, int, frozenset[Any]]] = {}
        self._taken_out: list[_Call] = []
        self._made: dict[tuple[int, Any], _Call] = {}
        self._with_tensors: dict[tuple[int, Any], _Call] = {}

    def know(self, root: str, path: Path, function: Any) -> None:
        """A cached function was found, before it is held as it is."""
        if id(function) not in self._known:
            self._take_out(function)
            hits, keys = function.cache_info().hits, frozenset(results_of(function))
            self._known[id(function)] = root, path, function, hits, keys

    def look(self) -> None:
        """Note what a run has asked for. Raises TraceError for a parameter of the model among the arguments."""
        for root, path, function, hits, keys in list(self._known.values()):
            for key, result in entries_of(function):
                if key not in keys or function.cache_info().hits != hits:
                    self._entry(root, path, function, key, result, new=key not in keys)

    def _entry(self, root: str, path: Path, function: Any, key: Any, result: Any, *, new: bool) -> None:
        call = function, arguments_of(function, key)
        tensors = [t for part in (call[1][0], call[1][1]) for t in tensors_in(part)]
        if new and tensors and {id(t) for t in tensors} & self._own():
            raise TraceError(
                f"{text(root, path)} keeps what it has computed of a parameter or buffer of the model "
                "(functools.cache), which changes from step to step: one device would go on with the first value; "
                "compute it in forward, or keep that value with register_buffer"
            )
        if any(map(is_traced, tensors)):
            return  # another tensor in each step: nothing is found again
        place = place_of(root, path, function, key, self._owner)
        if tensors_in(result):
            if new:
                self._with_tensors[id(function), key] = call
            elif place is not None:
                self._note(place, outline(result), result)
        elif place is not None and (is_scalar(result) or callable(result)) and not _is_place(result):
            self._note(place, fingerprint(result), result)
        elif new and (place is None or is_scalar(result) or callable(result)):
            self._made[id(function), key] = call

    def check(self) -> None:
        """Raise TraceError for results with tensors that a call outside of the trace does not give each time. Those
        that follow from buffers, and so are traced ones here, were judged by the graph."""
        for (name, key), (function, (positional, named)) in list(self._with_tensors.items()):
            root, path, *_ = self._known[name]
            results: list[Any] = []
            with (
                suppress(Exception),
                untold(),
                outside_modes(),
            ):  # it may fail on what is there only in a trace
                results = [function.__wrapped__(*positional, **named) for _ in range(2)]
            traced = [tensor for tensor in tensors_in(results) if is_traced(tensor)]
            asked = [t for part in (positional, named) for t in tensors_in(part)]
            if (
                len(results) < 2
                or (traced and (asked or any(tensor.requires_grad for tensor in traced)))
                or len(set(map(outline if traced else fingerprint, results))) > 1
            ):
                raise TraceError(
                    f"{text(root, path)} keeps its first result (functools.cache), tensors that it does not give "
                    "again when it is called outside of forward: one device computes them once, and a plan would "
                    "in every step. Compute them in __init__ and keep them with register_buffer, or leave the "
                    "cache out where they have to follow"
                )
            place = None if traced else place_of(root, path, function, key, self._owner)
            if place is not None:
                self._note(place, outline(results[0]), results[0])
                del self._with_tensors[name, key]

    def leave(self, *, failed: bool) -> None:
        """At the end of a trace: make the calls whose results stay here."""
        calls = () if failed else (*self._made.values(), *self._with_tensors.values())
        for function, (positional, named) in (*self._taken_out, *calls):
            function(*positional, **named)

    def _take_out(self, function: Any) -> None:
        """Take out results with tensors that the function would give again, to compute them in the graph."""
        held = [(key, result) for key, result in entries_of(function) if tensors_in(result)]
        for key, result in held if len(held) <= _MOST_TRIED else ():
            call = function, arguments_of(function, key)
            with suppress(Exception), untold(), outside_modes():  # the function may raise anything
                again = function.__wrapped__(*call[1][0], **call[1][1])
                if not any(t.requires_grad for t in tensors_in(result)) and fingerprint(again) == fingerprint(
                    result
                ):
                    del results_of(function)[key]
                    self._taken_out.append(call)

    def _own(self) -> set[int]:
        return {id(t) for t in (*self._roots.model.parameters(), *self._roots.model.buffers())}


def _is_place(result: object) -> bool:
    """Whether a result says where a rank computes, which differs between ranks as it should."""
    return isinstance(result, torch.device) or (isinstance(result, str) and result.startswith("cuda"))
