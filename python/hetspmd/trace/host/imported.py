"""Modules that forward imports for the first time: what they have taken of a stand-in is put right afterwards.

A module that is imported while a model is traced finds stand-ins in the place of clocks (``from time import time``)
and would keep them.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from types import FunctionType
from typing import Any

from hetspmd.trace.host.stand_ins import original


def put_right(before: Collection[str], originals: Mapping[int, Any]) -> None:
    """Replace stand-ins in the modules that are new since those of ``before``.

    They lie in the modules' variables, in those of their classes and among defaults of their functions.
    ``originals`` are what functions stand for, by the ids of these.
    """

    def right(value: Any) -> Any:
        return originals.get(id(value), original(value))

    for name in [n for n in sys.modules if n not in before]:
        module = sys.modules.get(name)
        for holder in (module, *_classes(module)):
            for key, value in list(getattr(holder, "__dict__", {}).items()):
                if isinstance(value, staticmethod) and right(value.__func__) is not value.__func__:
                    setattr(holder, key, staticmethod(right(value.__func__)))
                elif right(value) is not value:
                    setattr(holder, key, right(value))
                elif isinstance(value, FunctionType) and value.__defaults__:
                    value.__defaults__ = tuple(map(right, value.__defaults__))


def _classes(module: Any) -> list[type]:
    """The classes that a module defines."""
    values = list(getattr(module, "__dict__", {}).values())
    return [v for v in values if isinstance(v, type) and v.__module__ == getattr(module, "__name__", "")]
