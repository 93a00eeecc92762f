"""Numbers and the like that lie in classes of the user's, by the names in the methods that may change them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from hetspmd.trace.host.code import names_of_methods
from hetspmd.trace.host.foreign import is_foreign, is_installed
from hetspmd.trace.host.places import NOTHING, Path, Roots
from hetspmd.trace.host.plain import fingerprint, is_scalar
from hetspmd.trace.host.snapshot import Snapshot


class ClassData:
    """Which classes are held by ``snapshot``. ``note`` is told the place, the text and the value of each number."""

    def __init__(
        self, roots: Roots, snapshot: Snapshot, note: Callable[[tuple[str, Path], str, Any], None]
    ) -> None:
        self._roots, self._snapshot, self._note = roots, snapshot, note
        self._held: set[type] = set()
        self._in_methods: dict[type, frozenset[str]] = {}

    def hold(self, kind: type, *, all_names: bool = False) -> None:
        """Hold what methods may change of an object's classes (``type(self).count += 1``), by the names in them.

        Numbers and the like are read as well.
        """
        bases = [base for base in kind.__mro__ if not is_foreign(base.__module__)]
        if kind in self._held or not bases:
            return
        self._held.add(kind)
        for base in bases:
            if base not in self._in_methods:
                self._in_methods[base] = names_of_methods(base)
        names = frozenset[str]().union(*(self._in_methods[base] for base in bases))
        for base in bases:
            module = sys.modules.get(base.__module__)
            installed = module is not None and is_installed(module)
            of, own = self._roots.know_class(base), vars(base)
            if installed:  # a large library's methods have thousands of names
                counting = own.keys() if all_names else names & own.keys()
            else:
                counting = names | own.keys() if all_names else names
            for name in sorted(counting):
                value = own.get(name, NOTHING)
                if name.startswith("__") or not (value is NOTHING or is_scalar(value)):
                    continue
                self._snapshot.variable(of, (f".{name}",), base)
                inherited = next((vars(b)[name] for b in base.__mro__ if name in vars(b)), NOTHING)
                if is_scalar(inherited) and not installed:
                    self._note((of, (f".{name}",)), fingerprint(inherited), inherited)
