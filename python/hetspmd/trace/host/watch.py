"""Around a trace: the model's Python runs as often as torch wants, and leaves nothing behind.

Each run begins in the state in which the model was given, and what it leaves is put back at its end. What it
read, wrote and drew becomes part of the graph (:mod:`hetspmd.trace.host.facts`) or is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Final, Literal, get_args

import torch
from torch import nn

from hetspmd.errors import OptionError, TraceError
from hetspmd.trace.host.asked import Asked, note_held
from hetspmd.trace.host.changes import Left, numbers_of, owner_of, where
from hetspmd.trace.host.discovery import unnamed_kinds
from hetspmd.trace.host.entropy import Draws
from hetspmd.trace.host.facts import Read
from hetspmd.trace.host.kept_tensors import kept_tensors
from hetspmd.trace.host.lines import drawing_line
from hetspmd.trace.host.numbers import AsNumbers
from hetspmd.trace.host.own_memory import memories
from hetspmd.trace.host.places import NOTHING, Path, Roots, item, items, own, put, text
from hetspmd.trace.host.plain import MISSING, fingerprint, is_container, is_plain, outline
from hetspmd.trace.host.process import ProcessSettings
from hetspmd.trace.host.recorder import Place, Recorder
from hetspmd.trace.host.seeds import seeds_refused
from hetspmd.trace.host.settings import SETTINGS, asked_in_vain, counting
from hetspmd.trace.host.snapshot import Snapshot, Structure
from hetspmd.trace.host.steps import ALL, OTHERS
from hetspmd.trace.host.tensor_hooks import observers_refused
from hetspmd.trace.host.untrained import Untrained

_MOST_RUNS: Final = 3
"""Runs of a forward at most after cached functions have given more: each run may meet some that the last hid."""
HostRandomness = Literal["refuse", "trace_each_step", "freeze"]


def check_randomness(randomness: object) -> None:
    """Raise OptionError for another value than those of HostRandomness."""
    if randomness not in get_args(HostRandomness):
        raise OptionError(
            f"host_randomness is {randomness!r}; allowed are {', '.join(map(repr, get_args(HostRandomness)))}"
        )


class HostWatch:
    """What the Python of one trace does beside the graph.

    ``batch`` is what the model is called with. ``numbers`` are the places of numbers that are inputs of the graph.
    ``randomness``: what becomes of random numbers that Python code draws.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: object = None,
        batch: object = None,
        *,
        numbers: Sequence[Place] = (),
        randomness: HostRandomness = "refuse",
    ) -> None:
        self.roots = Roots(model, loss, unnamed_kinds(batch))
        self.numbers, self._randomness = tuple(numbers), randomness
        self._snapshot, self._draws, self.asked = Snapshot(), Draws(), Asked()
        self.recorder = Recorder(self.roots, self._snapshot, self._draws)
        self.recorder.note_argument(batch)
        self.recorder.placed.update(self.numbers)
        self._modules = [
            (tuple(f".{part}" for part in name.split(".") if part), module)
            for name, module in model.named_modules()
        ]
        self.untrained = Untrained(self.roots)
        self._settings = {step: read() for step, read in SETTINGS.items()}
        self.state_changes: Left | None = None
        self.cached_tensors: dict[str, list[torch.Tensor]] = {}
        self.feeding: list[str] = []
        """The buffers on which tensors in caches depend."""
        self.memories = memories(model)
        self._behind: list[tuple[Place, Any]] = []
        self.draws = ""
        self.states: list[Any] = []

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Around all runs of the Python, and the backward; afterwards, also if it fails, all is as it was."""
        try:
            with self.recorder.recording(), observers_refused(), self.asked.noted(), seeds_refused():
                yield
            for (root, path), value in self._behind:
                put(self.roots.holder(root, path), path[-1], value)
            changed = next(self._snapshot.changes(), None)
            if changed is not None:
                name = where(self.roots, changed.root, changed.path)
                raise TraceError(
                    f"a hook of the backward changes {name}, which a plan does not run; compute it in "
                    "forward, or from "
                    "the gradients after loss.backward()"
                )
        finally:
            self._rewind()

    def run(self, call: Callable[[], Any], numbers: Sequence[torch.Tensor] = ()) -> Any:
        """One run of the Python: what ``call`` returns. Raises TraceError for what cannot be kept right.

        Results that cached functions have made in the run, and that may change in place, are made once more and
        held before another run.
        """
        output, places = self._run(call, numbers)
        for _ in range(_MOST_RUNS):
            if not places:
                break
            self.recorder.hold_results(places)
            output, places = self._run(call, numbers)
        return output

    def _run(self, call: Callable[[], Any], numbers: Sequence[torch.Tensor]) -> tuple[Any, list[Place]]:
        structure, grad = Structure(self._modules), torch.is_grad_enabled()
        process = ProcessSettings()
        self._rewind()
        self._hold_numbers()
        originals = self._place(numbers)
        try:
            with AsNumbers(numbers) if numbers else nullcontext(), self.recorder.bound.placed():
                output = call()
            self.recorder.settle()
            places = self.recorder.results_made()
            self.cached_tensors = kept_tensors(self.roots.model, self._snapshot.cached())
            if self.recorder.failed is not None:
                raise self.recorder.failed
            self._check(structure, grad, process)
            for asked in self.recorder.reader.asked:
                note_held(*asked)
            self.asked.check(frozen=self._randomness == "freeze")
            drawn = self._draws.changed()
            if drawn:
                states = self._draws.states()
                if self._found_draws(drawn[0].name, call):
                    self.states = states
            self._take_back(numbers, originals)
            self.state_changes = Left(self.roots, self._snapshot.changes(), self.numbers)
        finally:
            process.rewind()
            structure.rewind()
            self._rewind()
        self._behind = list(
            zip(self.numbers, self._place(numbers), strict=True)
        )  # the backward reads them, too
        return output, places

    def check_results(self) -> None:
        """Raise TraceError for tensors that a cached function would not give again outside of the trace."""
        try:
            self.recorder.results.check()
        finally:
            self._rewind()

    @contextmanager
    def leaving(self) -> Iterator[HostWatch]:
        """Around all of a trace; afterwards caches have what was in them, and what stays where it was traced."""
        failed = True
        try:
            yield self
            failed = False
        finally:
            self._snapshot.forget_results()
            self.recorder.results.leave(failed=failed)

    def rehearse(self, values: Mapping[Place, Any], call: Callable[[], Any]) -> tuple[Any, dict[Place, Any]]:
        """What ``call`` returns with ``values`` at these places, and what it leaves, by place."""
        structure = Structure(self._modules)
        self._rewind()
        self.recorder.touched = False
        try:
            with self.recorder.recording():
                for (root, path), value in values.items():
                    put(self.roots.holder(root, path), path[-1], value)
                output = call()
                return output, {(c.root, c.path): c.after for c in self._snapshot.changes()}
        finally:
            structure.rewind()
            self._rewind()

    def counted(self) -> dict[Place, object]:
        """The numbers that the present run has read and changed so far, by their places."""
        by_place: dict[Place, object] = {}
        for change in self._snapshot.changes():
            if change.inside or (change.root, change.path) in self.recorder.reads:
                numbers = numbers_of(change)
                if numbers:
                    by_place[change.root, change.path] = numbers
        return by_place

    def number_tensors(self) -> list[torch.Tensor]:
        """A tensor for each number, as wide as a Python number is."""
        return [
            torch.tensor(self.roots.value(*place), dtype=_wide(self.roots.value(*place)))
            for place in self.numbers
        ]

    def number_names(self) -> list[str]:
        """What the numbers are called as inputs."""
        return [text(*place) for place in self.numbers]

    def reads(self) -> tuple[Read, ...]:
        """What was read, in the order in which it was, and the settings of torch."""
        reads: dict[Place, str] = {
            ("torch", (step,)): fingerprint(self._settings[step])
            for step in counting(self.recorder.reader.names)
        }
        for place, (before, _) in self.state_changes.changed.items() if self.state_changes else ():
            if before is NOTHING and place[0].startswith("function "):
                reads[place] = MISSING  # a function that makes an attribute of its own asks for it, too
        written = set(self.state_changes.writes) if self.state_changes else set()
        for (root, path), value in self.recorder.reads.items():
            container = self.recorder.values[root, path]
            if is_container(container):
                reads.update(_unwritten(root, path, container, written) or {(root, path): value})
            else:
                reads[root, path] = value
        reads.update(self.recorder.reader.bases())
        reads.update((place, "True") for place in self.untrained.reads(self.recorder.values))
        for name in self.feeding:
            path = tuple(f".{part}" for part in name.split("."))
            reads["model", path] = outline(self.roots.value("model", path))
        for place in self.recorder.reader.library.places:
            reads[place] = fingerprint(self.roots.value(*place))
        return tuple(Read(*place, value) for place, value in reads.items())

    def _hold_numbers(self) -> None:
        """Hold what the numbers lie in, before tensors are put in their place."""
        for root, path in self.numbers:
            self._snapshot.place(root, path, self.roots.holder(root, path))

    def _place(self, numbers: Sequence[torch.Tensor]) -> list[Any]:
        """Put tensors where the numbers are; returns what was there."""
        before = []
        for (root, path), tensor in zip(self.numbers, numbers, strict=True):
            holder = self.roots.holder(root, path)
            before.append(own(holder, path[-1]))
            put(holder, path[-1], tensor)
        return before

    def _take_back(self, numbers: Sequence[torch.Tensor], originals: Sequence[Any]) -> None:
        """Put numbers back where forward leaves them as they are."""
        for (root, path), tensor, value in zip(self.numbers, numbers, originals, strict=True):
            if self.roots.value(root, path) is tensor:
                put(self.roots.holder(root, path), path[-1], value)

    def _rewind(self) -> None:
        self.recorder.outside.rewind()
        self._snapshot.rewind()
        self._draws.rewind()
        if self._settings[".default_dtype"] != torch.get_default_dtype():
            torch.set_default_dtype(self._settings[".default_dtype"])

    def _check(self, structure: Structure, grad: bool, process: ProcessSettings) -> None:
        """Raise TraceError for what forward does to modules, torch's settings and iterators."""
        name = type(self.roots.model).__name__
        self.recorder.outside.check()
        for path, kind in structure.changes():
            module, _ = owner_of(self.roots.model, path)
            what = "a submodule" if kind == "_modules" else "a hook"
            raise TraceError(
                f"the forward of {type(module).__name__} adds, removes or replaces {what}; do it "
                "before the model is "
                "wrapped, in __init__"
            )
        if torch.is_grad_enabled() != grad:
            torch.set_grad_enabled(grad)
            raise TraceError(
                f"the forward of {name} leaves gradients switched {'off' if grad else 'on'}; use "
                "`with torch.no_grad():` around what needs it instead of torch.set_grad_enabled"
            )
        for what, before, now in process.changes():
            raise TraceError(
                f"the forward of {name} changes {what} from {before} to {now}; set it before the model is called"
            )
        for asked in asked_in_vain(self.recorder.reader.names):
            raise TraceError(
                f"the forward of {name} asks for {asked}, which is off while a step is traced; ask before the "
                f"call, model.flag = {asked}, and read self.flag in forward"
            )
        for (root, path), tensor in self.recorder.aliases.items():
            raise TraceError(
                f"forward reads {where(self.roots, root, path)}, which is {tensor} under another name; a plan "
                f"follows the model's own: read self.{tensor}"
            )
        for (root, path), kind in self.recorder.iterators.items():
            raise TraceError(
                f"forward reads {where(self.roots, root, path)}, a {kind} that another step "
                "continues; keep a list, "
                "and a buffer that counts"
            )

        for (root, path), kind in self.recorder.opaque.items():
            raise TraceError(
                f"forward reads {where(self.roots, root, path)}, and a plan cannot tell when the {kind} in it "
                "changes; keep what forward needs of it as a number, or as a tensor with register_buffer, on the "
                "module"
            )

    def _found_draws(self, generator: str, call: Callable[[], Any]) -> bool:
        """Whether forward draws from a generator that has changed, and not another thread of the process."""
        if self.draws and self._randomness != "refuse":
            return True
        self._rewind()
        line = drawing_line(self._draws, self.roots.model, call)
        if not line and not self._draws.changed():
            return False
        self.draws = line
        if self._randomness == "refuse":
            raise TraceError(
                f"the forward draws from {generator}{self.draws}: a plan would repeat this one "
                "outcome for ever. Draw "
                'with torch, as part of the graph (torch.rand(...)), or pass host_randomness="trace_each_step", by '
                'which every step is traced anew, or host_randomness="freeze", by which each plan keeps the '
                "outcome of its trace"
            )
        return True


def _wide(value: object) -> torch.dtype:
    return torch.int64 if isinstance(value, int) else torch.float64


def _unwritten(root: str, path: Path, container: Any, written: set[Place]) -> dict[Place, str]:
    """The parts of a container that decide what forward does, {} if it writes none of them: all but tensors that it
    replaces."""
    if not any(
        r == root and len(p) > len(path) and p[: len(path)] == path and p[-1] != ALL for r, p in written
    ):
        return {}
    parts = {(root, (*path, ALL)): fingerprint(item(container, ALL))}
    rest = item(container, OTHERS)
    if isinstance(rest, dict) and rest:
        parts[root, (*path, OTHERS)] = fingerprint(rest)
    for step, value in items(container):
        place = root, (*path, step)
        if place not in written or is_plain(value):
            parts.update(_unwritten(*place, value, written) or {place: fingerprint(value)})
    return parts
