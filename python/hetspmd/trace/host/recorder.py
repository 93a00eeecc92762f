"""Which attributes a model's Python reads while it runs.

For the time of a trace, ``__getattribute__`` of ``nn.Module``, and of the classes of other objects that are
met on the way, tells the recorder of the running thread what was read of the objects that it follows. What
is read before it is written is part of what the graph was made of.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import torch
from torch import nn

from hetspmd.trace.compat.tensors import outside_modes
from hetspmd.trace.host.bound import Bound
from hetspmd.trace.host.cached import Caches, is_cache
from hetspmd.trace.host.cached_results import CachedResults
from hetspmd.trace.host.class_data import ClassData
from hetspmd.trace.host.code import CodeReader
from hetspmd.trace.host.content import own_attributes, referent
from hetspmd.trace.host.discovery import discover, own_kinds
from hetspmd.trace.host.entropy import Draws
from hetspmd.trace.host.exact_types import comparison_in
from hetspmd.trace.host.followed import PAST_THE_CLASS, Followed, place_in
from hetspmd.trace.host.foreign import is_foreign, is_installed, is_own
from hetspmd.trace.host.in_place import content_of
from hetspmd.trace.host.kinds import bound_to, is_function, is_iterator, made_of, parts_of, tells_its_class
from hetspmd.trace.host.members import code_of, home_of_data, members, slots_of
from hetspmd.trace.host.outside import SLOTS, Outside
from hetspmd.trace.host.places import NOTHING, Namespace, Path, Roots, items
from hetspmd.trace.host.plain import MISSING, fingerprint, is_container, is_plain, is_scalar, type_name
from hetspmd.trace.host.raw import size
from hetspmd.trace.host.reads import restore, tell, told
from hetspmd.trace.host.snapshot import OF_TORCH, Snapshot
from hetspmd.trace.host.stand_ins import is_calendar
from hetspmd.trace.host.steps import ALL
from hetspmd.trace.host.wrapped import registered

Place = tuple[str, Path]

_LONGEST_PATH: Final = 40
"""Steps of a path to an object that is followed: a linked list has no end of them."""
_MOST_ELEMENTS: Final = 10_000
"""Elements of the largest container that is looked into: a data set would take longer than a trace."""


class Recorder:
    """Reads by place, with their fingerprints; ``snapshot`` holds what is read, ``draws`` the generators."""

    def __init__(self, roots: Roots, snapshot: Snapshot, draws: Draws) -> None:
        self._snapshot, self._draws = snapshot, draws
        self.reads: dict[Place, str] = {}
        self.values: dict[Place, Any] = {}
        self.iterators: dict[Place, str] = {}
        self.aliases: dict[Place, str] = {}
        self.opaque: dict[Place, str] = {}
        self.placed: set[Place] = set()
        self.probes: dict[int, torch.Tensor] = {}
        self.touched = False
        self.failed: Exception | None = None
        self.comparison = ""
        self._followed: dict[int, Followed] = {}
        self._classes: list[type] = []
        self._roots = roots
        owner = partial(place_in, self._followed)
        self._caches = Caches(owner)
        self.results = CachedResults(roots, self._note, owner)
        self._class_data = ClassData(roots, snapshot, self._note)
        self.outside = Outside(roots, self._note, self.note_value)
        self._looking: set[int] = set()
        named = (*roots.model.named_parameters(), *roots.model.named_buffers())
        self._registered: dict[int, str] = {id(tensor): name for name, tensor in named}
        self._modules = frozenset(map(id, roots.model.modules()))
        discover(roots)
        self.bound = Bound(roots)
        self.reader = CodeReader(roots, self._variable, self._visited, self._snapshot.cache)
        for name, module in roots.model.named_modules():
            path = tuple(f".{part}" for part in name.split(".") if part)
            self._follow("model", path, module)
        if roots.loss is not None:
            self.note_value("loss", (), roots.loss)
        for kind in {type(module): None for module in roots.model.modules()}:
            if is_foreign(kind.__module__):
                self.reader.library.of_class(kind)
        for module in roots.model.modules():
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                for hook in hooks.values():
                    self.reader.visit(hook)

    def note_argument(self, value: Any) -> None:
        """Look at the code of what the model is called with: its methods may read variables."""
        for kind in own_kinds(value):
            self.reader.meet(kind, "", ())

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within the context what this thread reads is recorded."""
        self._change(nn.Module)
        try:
            with told(self):
                yield
        finally:
            while self._classes:
                restore(self._classes.pop())

    def saw(self, of: Any, name: str, value: Any) -> None:
        """An attribute was read."""
        if self.probes and id(value) in self.probes:
            self.touched = True
        followed = self._followed.get(id(of))
        if followed is None:
            self.outside.stranger(of, name)
            return
        if name in followed.seen:
            return
        if not name.startswith("__"):
            self.outside.saw(of, name)
        if name in _WHOLE:
            self._all(followed, name)
        elif not name.startswith("__"):
            followed.seen.add(name)
            if name in _UNWATCHED and name not in followed.own:
                return
            try:
                self._read(followed, of, name, value)
            except Exception as error:  # whoever reads the attribute may go on
                self.failed = self.failed or error
                raise

    def _read(self, followed: Followed, of: Any, name: str, value: Any) -> None:
        if name in followed.before:
            if followed.live.get(name, NOTHING) is followed.before[name]:
                self.note_value(followed.root, (*followed.path, f".{name}"), value)
        elif isinstance(value, MethodType) or type(value) is FunctionType:
            self.reader.visit(value)
        elif (code := code_of(type(of), name)) is not None:
            self.reader.visit(code)
        elif (home := home_of_data(type(of), name)) is not None and self._snapshot.is_as_held(home, name):
            self.note_value(followed.root, (*followed.path, f".{name}"), value)

    def _all(self, followed: Followed, asked: str) -> None:
        """The attributes of an object were taken together: by the model's own code (``vars(self)``), or by whoever
        makes a copy of it."""
        frame = sys._getframe(3)
        home = str(frame.f_globals.get("__name__"))
        if is_foreign(home) if asked == "__dict__" else home.startswith("hetspmd."):
            return
        followed.seen.add("__dict__")
        self.outside.saw(followed.of, "children")
        if not isinstance(followed.of, nn.Module) and type(followed.of).__dictoffset__:
            slots = slots_of(type(followed.of))
            keys = fingerprint((type_name(dict), *(name for name in followed.before if name not in slots)))
            self._note((followed.root, (*followed.path, ".__dict__", ALL)), keys, NOTHING)
        for name in sorted(followed.own - followed.seen):
            followed.seen.add(name)
            self.note_value(followed.root, (*followed.path, f".{name}"), followed.before[name])
        for name in frame.f_code.co_consts if asked == "__dict__" else ():  # "name" in self.__dict__
            if isinstance(name, str) and name.isidentifier() and name not in followed.before:
                self._note((followed.root, (*followed.path, f".{name}")), MISSING, NOTHING)

    def missed(self, of: Any, name: str) -> None:
        """An attribute was asked for that is not there."""
        followed = self._followed.get(id(of))
        if followed is None:
            self.outside.stranger(of, name)
            return
        if name in followed.seen or name.startswith("__"):
            return
        for slot in followed.slots:
            if name in slot:
                self.outside.saw(of, name)
                self.outside.saw(slot[name], "")
                return
        own = getattr(type(of), "__getattr__", None)
        if name in followed.before or (own is not None and own is not nn.Module.__getattr__):
            return
        followed.seen.add(name)
        self._note((followed.root, (*followed.path, f".{name}")), MISSING, NOTHING)

    def _visited(self, function: FunctionType) -> None:
        self.bound.defaults(function)
        self.comparison = self.comparison or comparison_in(function.__code__)
        root = self._roots.know(function).replace("closure", "function", 1)
        self._snapshot.attributes(root, (), vars(function))
        if is_own(function.__globals__.get("__name__")) and self._roots.finds(function):
            for path, value in made_of(function):
                self._note((root, path), fingerprint(value), value)

    def _variable(self, root: str, path: Path, value: Any, holder: Any) -> None:
        if isinstance(value, (ModuleType, type)):
            self.bound.look(root, path, value)
            if isinstance(value, type) and not is_calendar(value):
                self._note((root, path), fingerprint(value), value)
            return
        if value is NOTHING:
            self._note((root, path), MISSING, NOTHING)
            return
        if isinstance(holder, (ModuleType, Namespace, type)):
            self._snapshot.variable(root, path, holder)
            if isinstance(holder, ModuleType) and is_installed(holder) and not is_scalar(value):
                self._snapshot.container(root, path, value)
                self.outside.installed(value)
                self.bound.look(root, path, value)
                self._draws.watch(value, root, path)
                if is_cache(value):
                    self._snapshot.cache(value, installed=True)
                return
        elif isinstance(holder, CellType):
            self._snapshot.cell(root, path, holder)
        self.note_value(root, path, value)

    def _note(self, place: Place, text: str, value: Any) -> None:
        if id(value) in self._registered:
            self.aliases[place] = self._registered[id(value)]
        if place not in self.placed:
            self.reads.setdefault(place, text)
            self.values.setdefault(place, value)

    def note_value(self, root: str, path: Path, value: Any) -> None:
        """A value at a place was read, or may be."""
        value = referent(value)
        self.bound.look(root, path, value)
        if is_scalar(value):
            self._note_whole(root, path, value)
            self._beside(root, path, value)
        elif isinstance(value, type):
            self._note((root, path), fingerprint(value), value)
            self._class_data.hold(value, all_names=True)
            self.reader.meet(value, root, path, makes_objects=True)
        elif self._draws.watch(value, root, path):
            return
        elif is_function(value):
            self._function(root, path, value)
        elif is_container(value):
            self._note_whole(root, path, value)
            self._snapshot.container(root, path, value)
            self._look_into(root, path, value)
            self._beside(root, path, value)
        elif (content := content_of(value)) is not None:
            self._note_whole(root, path, value)
            self._snapshot.content(root, path, value, content)
        elif is_iterator(value):
            self.iterators[root, path] = type(value).__name__
        elif not (isinstance(value, nn.Module) and id(value) in self._followed):
            if path:
                self._object(root, path, value)
            self._follow(root, path, value)

    def _function(self, root: str, path: Path, value: Any) -> None:
        """What can be called was found: its code counts, and what it is bound to."""
        if path:
            self._note((root, path), fingerprint(value), value)
        if is_cache(value):
            self.results.know(root, path, value)
            self._snapshot.cache(value)
            self._caches.know(root, path, value)
            self.hold_results(self.results_made())
        self.reader.visit(value)
        if (registry := registered(value)) is not None:
            self.note_value(root, (*path, ".registry"), registry)
        for step, part in bound_to(value):
            self.note_value(root, (*path, step), part)
        self._follow(root, path, value)

    def results_made(self) -> list[Place]:
        """Where results of cached functions lie that were not noted."""
        return [place for place in self._caches.places() if place not in self.reads]

    def hold_results(self, places: list[Place]) -> None:
        """Note these results, which are made where they are not there."""
        with outside_modes():
            for root, path in places:
                self.note_value(root, path, self._roots.value(root, path))
        self._snapshot.hold_caches()

    def _beside(self, root: str, path: Path, value: Any) -> None:
        """A container, number or string was found, which may have attributes as well."""
        attributes = own_attributes(value)
        if isinstance(value, Enum):
            for name in parts_of(value):
                self.note_value(root, (*path, f".{name}"), attributes[name])
        elif attributes and attributes is not value:
            self._follow(root, path, value)

    def _object(self, root: str, path: Path, value: Any) -> None:
        opaque: list[str] = []
        self._note_whole(root, path, value, opaque)
        if opaque:
            self.opaque.setdefault((root, path), opaque[0])

    def _note_whole(self, root: str, path: Path, value: Any, opaque: list[str] | None = None) -> None:
        """Note a value's text, and look at the code of all that it holds: what is told as text has methods, too."""
        met: dict[type | FunctionType, bool] = {}
        self._note((root, path), fingerprint(value, opaque, met), value)
        for definition, itself in met.items():
            if not is_own(definition.__module__):
                continue
            if isinstance(definition, type):
                self.reader.meet(
                    definition, root, path, makes_objects=itself or issubclass(definition, nn.Module)
                )
            else:
                self.reader.visit(definition)

    def _look_into(self, root: str, path: Path, container: Any) -> None:
        if id(container) in self._looking:
            return
        if size(container) > _MOST_ELEMENTS or len(path) > _LONGEST_PATH:
            kinds = (
                type(v) for _, v in items(container) if not is_plain(v) and not isinstance(v, torch.Tensor)
            )
            if (kind := next(kinds, None)) is not None:
                self.opaque.setdefault((root, path), type_name(kind))
            return
        self._looking.add(id(container))
        for step, value in items(container):
            if is_container(value):
                self._look_into(root, (*path, step), value)
            elif id(value) in self._registered:
                self.aliases[root, (*path, step)] = self._registered[id(value)]
            elif not is_scalar(value) and not isinstance(value, torch.Tensor):
                self.note_value(root, (*path, step), value)
        self._looking.discard(id(container))

    def _follow(self, root: str, path: Path, value: Any, within: nn.Module | None = None) -> None:
        """Record the attributes of an object, and hold them. ``within``: the module that has it as a submodule."""
        kind = type(value)
        if id(value) in self._followed or isinstance(value, (torch.Tensor, type)):
            return
        attributes = members(value)
        if attributes is None:
            return
        if len(path) > _LONGEST_PATH:
            if not is_foreign(kind.__module__):
                self.opaque.setdefault((root, path), type_name(kind))
            return
        if not isinstance(value, nn.Module):
            foreign = is_foreign(kind.__module__) and not kind.__module__.startswith("torch.distributions")
            if foreign and kind.__module__ not in _HOLD_DATA:
                return
            if foreign or not self._change(kind):
                if (whole := getattr(value, "__dict__", None)) is not None:
                    self.note_value(root, (*path, ".__dict__"), whole)
                return
        self._class_data.hold(kind)
        before = self._snapshot.attributes(root, path, attributes)
        self._followed[id(value)] = Followed(value, root, path, attributes, before)
        self.reader.meet(kind, root, (*path, ".__class__"))
        if path and not isinstance(value, nn.Module) and is_own(kind.__module__) and tells_its_class(value):
            self._note((root, (*path, ".__class__")), fingerprint(kind), kind)
        if PAST_THE_CLASS & self.reader.names:
            self._past_its_class(self._followed[id(value)])
        if isinstance(value, nn.Module) and id(value) not in self._modules:
            self._outside(self._followed[id(value)], within)

    def _outside(self, followed: Followed, within: nn.Module | None) -> None:
        """A module was found that the model does not have."""
        self.outside.know(followed, within)
        if is_foreign(type(followed.of).__module__):
            self.reader.library.of_class(type(followed.of))
        for name, inner in list(followed.before.get("_modules", {}).items()):
            if inner is not None:
                self._follow(followed.root, (*followed.path, f".{name}"), inner, followed.of)

    def settle(self) -> None:
        """After a run: what cached functions gave counts, and all of a module whose slots the code asks for."""
        self.results.look()
        if self.reader.names & set(SLOTS):
            self.outside.everything()

    def _past_its_class(self, followed: Followed) -> None:
        """Look at the attributes that code may read in a way of which no one is told, by their names."""
        for name in sorted(followed.own & self.reader.names - followed.seen):
            followed.seen.add(name)
            self.note_value(followed.root, (*followed.path, f".{name}"), followed.before[name])

    def _change(self, kind: type) -> bool:
        if kind in self._classes:
            return True
        if not tell(kind):
            return False
        self._classes.append(kind)
        return True


_WHOLE: Final = frozenset({"__dict__", "__getstate__", "__reduce__", "__reduce_ex__"})
"""Attributes by which all others are taken together; ``copy`` and ``pickle`` ask for the last three."""

_HOLD_DATA: Final = frozenset({"collections", "queue", "weakref", "_thread"})
"""Modules of Python's own whose classes keep data in attributes, which are looked at all at once."""

_UNWATCHED = (OF_TORCH | frozenset(dir(nn.Module))) - {"training", "forward"}
"""Attributes of torch's own machinery; hooks and submodules are part of a model's structure."""
